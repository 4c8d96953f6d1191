"""Where else a run's metrics are sent."""
