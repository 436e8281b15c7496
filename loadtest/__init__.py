"""Load test: speaks HTTP only, to any OpenAI-compatible server."""
