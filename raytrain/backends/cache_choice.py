"""Which images of a run are kept decoded in memory, or as they are on a disk."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.data.batch_plan import BatchPlan
from raytrain.data.dataset import Dataset
from raytrain.errors import UsageError
from raytrain.storage.disk_cache import DiskCache, kept_bytes, make_folder, usable_bytes

_AUTO_FRACTION = 0.4  # of that memory; the rest is for blocks that are streamed
_DISK_FRACTION = 0.5  # of what is free
_LEAST_DISK_BYTES = 1 << 30
_SHARED_FRACTION = 0.8  # of that memory, for runs that train at once on the same images


@dataclass(frozen=True)
class CacheChoice:
    """Whether the decoded training images are kept in memory, and the test images; and files of a bucket on a disk."""

    train: bool
    test: bool
    disk: DiskCache | None = None


def choose_cache(
    config: ResolvedConfig, data: Dataset, plan: BatchPlan, first_step: int, memory_bytes: int
) -> CacheChoice:
    """Decide what is kept, where ``memory_bytes`` is what a machine has for decoded images.

    Raises UsageError if ``--cache memory`` asks for more, or ``--cache disk`` for a folder that cannot be used.
    """
    train_bytes, test_bytes = data.num_bytes
    if config.cache == "memory" and train_bytes + test_bytes > memory_bytes:
        raise UsageError(
            f"--cache is memory, and the decoded images take {(train_bytes + test_bytes) / 1e9:.1f} GB while a "
            f"machine has {memory_bytes / 1e9:.1f} GB for them; use --cache auto."
        )
    if config.cache == "disk":
        return CacheChoice(False, False, _disk_cache(config, data))
    if config.cache != "auto":
        return CacheChoice(config.cache == "memory", config.cache == "memory")
    room = _AUTO_FRACTION * memory_bytes
    used_again = plan.num_steps - first_step > plan.steps_per_epoch
    train = used_again and not config.crops_originals and train_bytes + test_bytes <= room
    read_again = used_again or data.train.packing is not None  # several blocks need images of one shard
    return CacheChoice(train, test_bytes <= room, _disk_if_useful(config, data) if read_again and not train else None)


def keeps_shared(config: TrainConfig, data: Dataset, memory_bytes: int) -> bool:
    """Whether runs that train at once on the same images keep them decoded, once for all, in ``memory_bytes``."""
    fits = not config.crops_originals and sum(data.num_bytes) <= _SHARED_FRACTION * memory_bytes
    return config.cache == "memory" or (config.cache == "auto" and fits)


def _disk_cache(config: ResolvedConfig, data: Dataset) -> DiskCache:
    """The cache that ``--cache disk`` asks for. Raises UsageError if it cannot be used on this machine."""
    if data.train_store.cloud is None:
        raise UsageError(f"--cache is disk, and {data.train_store.url} is a folder; that is for images in a bucket.")
    folder = _folder(config)
    try:
        if not make_folder(folder):
            raise UsageError(f"--cache is disk, and {folder} belongs to another user; name another --cache-folder.")
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"--cache is disk, and {folder} cannot be written ({error.strerror}); name another --cache-folder."
        ) from None
    room_bytes = max(0, usable_bytes(folder)) + kept_bytes(folder)
    if config.cache_limit_gb is not None:
        return DiskCache(folder, int(config.cache_limit_gb * 1e9), time.time())
    if room_bytes < _LEAST_DISK_BYTES:
        raise UsageError(
            f"--cache is disk, and the disk of {folder} has {room_bytes / 1e9:.1f} GB to spare; make room there, or "
            "name another --cache-folder."
        )
    return DiskCache(folder, int(_DISK_FRACTION * room_bytes), time.time())


def _disk_if_useful(config: ResolvedConfig, data: Dataset) -> DiskCache | None:
    """A cache on this machine's disk, if the images are in a bucket and it has the room."""
    try:
        return _disk_cache(config, data)
    except UsageError:
        return None


def _folder(config: ResolvedConfig) -> str:
    return os.path.abspath(config.cache_folder or f"{tempfile.gettempdir()}/raytrain-cache-{os.getuid()}")
