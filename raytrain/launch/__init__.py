"""Starts runs: on a Ray cluster, or on this machine without Ray."""

import os

# OpenMP reads these when torch is imported. By default the threads of libgomp spin for milliseconds while they wait for
# one that is not scheduled; if they do not spin at all, a small step takes a quarter longer. macOS has another OpenMP.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
