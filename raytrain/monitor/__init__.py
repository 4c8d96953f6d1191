"""A run that trains: its events."""
