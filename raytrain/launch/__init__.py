"""Starts runs: on a Ray cluster, or on this machine without Ray."""
