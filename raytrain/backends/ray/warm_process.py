"""Imported by each process that waits in a warm cluster: all that it would otherwise import while a run starts.

Then it notes that it is ready, in a file whose name is the number of the process.
"""

import os
from pathlib import Path

import torch._dynamo  # noqa: F401 ; every optimizer imports it in its first step

import raytrain.backends.ray.coordinator
import raytrain.backends.ray.worker  # noqa: F401
from raytrain.backends.ray.warm_cluster import READY_FOLDER

if READY_FOLDER in os.environ:
    Path(os.environ[READY_FOLDER], str(os.getpid())).touch()
