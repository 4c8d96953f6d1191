"""Which images the workers of a machine keep decoded, and in which folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from raytrain.backends.cache_choice import choose_cache
from raytrain.backends.machine import image_memory
from raytrain.config import ResolvedConfig
from raytrain.data.batch_plan import Cursor
from raytrain.data.dataset import Dataset
from raytrain.storage.disk_cache import DiskCache
from raytrain.storage.tempdir import TemporaryFolder


@dataclass(frozen=True)
class ImageCache:
    """What is kept decoded: the ``folder`` of the files, the same for all workers of a machine.

    ``origin`` is where the training images start; None if they are streamed. ``test``: whether test images are kept.
    ``disk`` keeps files of a bucket as they are.
    """

    folder: str
    origin: Cursor | None
    test: bool
    disk: DiskCache | None


def image_cache(config: ResolvedConfig, data: Dataset, first_step: int, opened: ExitStack) -> ImageCache:
    """Decide what this machine keeps, and make the folder for it, which is removed when ``opened`` is closed.

    Raises UsageError if ``--cache memory`` asks for more memory than there is.
    """
    parent, memory_bytes = image_memory()
    plan = data.plan(config)
    choice = choose_cache(config, data, plan, first_step, memory_bytes)
    folder = opened.enter_context(TemporaryFolder(parent))
    return ImageCache(str(folder), plan.cursor(first_step) if choice.train else None, choice.test, choice.disk)
