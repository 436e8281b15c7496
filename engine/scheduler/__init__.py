"""What runs in each step; no torch."""
