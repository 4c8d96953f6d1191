"""A run's documents in storage, and its state while it trains."""
