"""Octavo: an OpenAI-compatible inference server over a paged KV cache."""
