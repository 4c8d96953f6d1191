"""Watching a run: its history, the monitor that gathers it, and the terminal view."""
