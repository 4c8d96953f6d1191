"""A run at rest: its documents in storage, its history, its logs, and who owns it."""
