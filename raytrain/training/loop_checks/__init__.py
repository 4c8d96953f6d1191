"""Checks of the user's loop: by its text before it starts, and by what it does while it runs."""
