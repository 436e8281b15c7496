"""From the plan of a step to its results."""
