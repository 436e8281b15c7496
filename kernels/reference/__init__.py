"""Plain-torch kernels: production code where nothing faster fits, and the oracle of the rest."""
