"""Values that the parts of the engine hand to each other; no torch."""
