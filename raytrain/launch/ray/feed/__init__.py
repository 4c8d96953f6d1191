"""Images on their way to the workers of a Ray cluster."""
