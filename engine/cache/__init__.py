"""Blocks, block tables and their sharing; no torch."""
