"""The routes; each only reads, asks a service and answers."""
