"""Starts runs on this machine, without Ray."""
