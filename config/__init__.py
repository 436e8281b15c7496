"""Configuration: frozen pydantic models, the flags made from them, and the environment."""
