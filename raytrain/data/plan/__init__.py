"""The plan: which draws are in each step, and which of them each worker has."""
