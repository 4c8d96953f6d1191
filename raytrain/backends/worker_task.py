"""A run as the workers of the local backend get it. Imports no torch: the process that starts workers does without."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain.backends.image_cache import ImageCache
from raytrain.backends.local.calls import CallAddress
from raytrain.backends.prepare import Loop
from raytrain.config import ResolvedConfig
from raytrain.data.dataset import Dataset
from raytrain.storage.base import Store


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """A run as its workers, and the agent that starts them, get it. ``folder`` is for their files. Holds no secret.

    ``loop`` is the caller's own; None if the options name one, or none.
    """

    config: ResolvedConfig
    loop: Loop | None
    data: Dataset
    store: Store  # of the run
    first_step: int
    num_workers: int
    cache: ImageCache
    calls: CallAddress
    folder: str
