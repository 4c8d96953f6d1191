"""Training on this machine without Ray: torch's elastic agent starts the workers."""
