"""A run that is alive: its events, snapshots and stop requests, and who writes its documents."""
