"""What a worker that runs without Ray trains. Imports no torch: the process that starts workers does without."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain.backends.image_cache import ImageCache
from raytrain.config import ResolvedConfig
from raytrain.data.dataset import Dataset
from raytrain.storage.base import Store


@dataclass(frozen=True)
class WorkerTask:
    """A run as all of its workers on a machine get it. Holds no secret."""

    config: ResolvedConfig
    data: Dataset
    store: Store  # of the run
    first_step: int
    cache: ImageCache
