"""Replays traces of requests through the production cache, with hands that only count. Needs no torch and no page memory."""
