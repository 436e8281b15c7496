"""Reading request bodies: strict JSON, strict types, errors in the form of the API."""
