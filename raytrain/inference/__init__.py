"""Use a trained run: evaluate it, predict with it, load it, export it."""
