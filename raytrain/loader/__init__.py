"""Reads a process's part of the images: on any launcher, with or without a run."""
