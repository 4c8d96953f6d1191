"""Optimizers, learning rates, losses."""
