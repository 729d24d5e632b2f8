"""Replays traces of requests through the production cache, with a copy engine that only counts.

Needs no torch and no page memory.
"""
