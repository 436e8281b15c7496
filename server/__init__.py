"""The HTTP front end: fastapi over AsyncEngine."""
