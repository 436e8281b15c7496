"""Request and answer bodies of the HTTP API."""
