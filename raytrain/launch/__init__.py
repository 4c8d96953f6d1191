"""Starts runs: on a Ray cluster, or on this machine without Ray."""

import os

# libgomp reads it when torch is imported. By default its threads spin while they wait for one that is not scheduled.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
