"""OpenAI's API: bodies to requests, answers to replies, whole and streamed."""
