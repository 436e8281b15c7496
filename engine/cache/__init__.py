"""Blocks of the KV cache: who holds them, what they contain, which are free; no torch."""
