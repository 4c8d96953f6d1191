"""On Ray, all of it."""
