"""Rows, batches, cache tensors, sampling: what one device runs."""
