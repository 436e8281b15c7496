"""Terminal client of a running server: `octavo chat` and `octavo complete`."""
