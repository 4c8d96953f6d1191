"""A run that is alive: its events, snapshots and stop requests, and the recorder of its documents."""
