"""`octavo top`: a live view of a running server, made from its metrics only."""
