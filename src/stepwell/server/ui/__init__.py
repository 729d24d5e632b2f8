"""The page at `/ui`, and the read-only routes it asks."""
