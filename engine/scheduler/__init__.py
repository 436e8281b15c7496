"""Which tokens are computed in which step; no torch."""
