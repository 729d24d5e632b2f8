"""The engine behind HTTP, as OpenAI's clients speak it. The only place that imports fastapi, uvicorn and prometheus_client."""
