"""Load beyond capacity, long mixed load, faults and signals against a server of its own."""
