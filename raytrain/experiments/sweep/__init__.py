"""Sweeps: runs that differ in some options."""
