"""`octavo blocks`: a live map of a running server's block pool."""
