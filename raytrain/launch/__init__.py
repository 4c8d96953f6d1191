"""Starts runs: on a Ray cluster, or on this machine without Ray."""

import os

# OpenMP reads these variables when torch is imported. By default, threads of libgomp that wait for another one spin for
# milliseconds, even if that thread is not scheduled. Without any spinning, a small step takes a quarter longer. macOS
# has another OpenMP.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
