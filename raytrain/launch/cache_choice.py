"""Choice of a run's cache: decoded in memory, as files on a disk, or none.

Decoded images are the fastest and take the most room: 150 kB for one of 224 pixels. Files of a bucket on a disk of the
machine save the network, but are decoded again in each epoch. With ``--cache auto``, images that are used only once are
streamed; the test images are used in each evaluation.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from raytrain.config import ResolvedConfig
from raytrain.data.dataset import Dataset
from raytrain.data.plan.partition import CacheOrder
from raytrain.errors import UsageError
from raytrain.launch.placement import image_memory
from raytrain.launch.prepare import PreparedRun
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.history import History
from raytrain.storage.disk_cache import DiskCache, kept_bytes, make_folder, usable_bytes
from raytrain.storage.temporary_files import TemporaryFolder

_AUTO_FRACTION = 0.4  # of the memory for decoded images; the rest is for blocks that are streamed
_SHARED_FRACTION = 0.8  # of the memory for decoded images, for runs that train at once on the same ones
_DISK_FRACTION = 0.5  # of the free space of a disk
_LEAST_DISK_BYTES = 1 << 30


@dataclass(frozen=True)
class ImageCache:
    """What a machine keeps of a run's images.

    Attributes:
        train: the order in which decoded training images are kept; None if they are streamed.
        test: the same of the test images.
        disk: where files of a bucket are kept; None if they are not.
        folder: where decoded images are kept, but for those in Ray's object store.
    """

    train: CacheOrder | None = None
    test: CacheOrder | None = None
    disk: DiskCache | None = None
    folder: str = ""


def image_cache(config: ResolvedConfig, data: Dataset, first_step: int, opened: ExitStack) -> ImageCache:
    """Choose what this machine keeps, and make the folder for it, which is removed when ``opened`` is closed."""
    parent, memory_bytes = image_memory()
    cache = choose_cache(config, data, first_step, memory_bytes)
    return dataclasses.replace(cache, folder=str(opened.enter_context(TemporaryFolder(parent))))


def choose_cache(config: ResolvedConfig, data: Dataset, first_step: int, memory_bytes: int) -> ImageCache:
    """Choose what is kept if a machine has ``memory_bytes`` for decoded images.

    Raises UsageError if that is too little for ``--cache memory``, or if ``--cache disk`` cannot be had.
    """
    train_bytes, test_bytes = data.num_bytes
    if config.cache == "memory" and train_bytes + test_bytes > memory_bytes:
        raise UsageError(
            f"--cache is memory, and the decoded images take {(train_bytes + test_bytes) / 1e9:.1f} GB while a "
            f"machine has {memory_bytes / 1e9:.1f} GB for them; use --cache auto."
        )
    plan = data.plan(config)
    train = CacheOrder(plan, first_step, data.train.rows_per_block(data.train_format.shape))
    test = CacheOrder(data.test_plan(1), 0, data.test.rows_per_block(data.test_format.shape))

    # What the user has chosen.
    if config.cache == "disk":
        return ImageCache(disk=_disk_cache(config, data))
    if config.cache != "auto":
        return ImageCache(train, test) if config.cache == "memory" else ImageCache()

    # Decoded training images are worth their room if they are used in more than one epoch, and do not change with it.
    room_bytes = _AUTO_FRACTION * memory_bytes
    used_again = plan.num_steps - first_step > plan.steps_per_epoch
    keeps_train = used_again and not config.crops_originals and train_bytes + test_bytes <= room_bytes

    # Otherwise their files, if any is read twice: several blocks need images of the same packed shard.
    read_again = used_again or data.train.packing is not None
    disk = None
    if read_again and not keeps_train:
        with suppress(UsageError):  # the images are in a folder, or the disk has no room
            disk = _disk_cache(config, data)
    return ImageCache(train if keeps_train else None, test if test_bytes <= room_bytes else None, disk)


def _disk_cache(config: ResolvedConfig, data: Dataset) -> DiskCache:
    """Return the cache that ``--cache disk`` asks for; raise UsageError if it cannot be used on this machine."""
    if data.train_store.cloud is None:
        raise UsageError(f"--cache is disk, and {data.train_store.url} is a folder; that is for images in a bucket.")
    folder = os.path.abspath(config.cache_folder or f"{tempfile.gettempdir()}/raytrain-cache-{os.getuid()}")
    try:
        if not make_folder(folder):
            raise UsageError(f"--cache is disk, and {folder} belongs to another user; name another --cache-folder.")
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"--cache is disk, and {folder} cannot be written ({error.strerror}); name another --cache-folder."
        ) from None
    if config.cache_limit_gb is not None:
        return DiskCache(folder, int(config.cache_limit_gb * 1e9), time.time())
    # What earlier runs keep there counts as free: it is given up for what this one needs.
    room_bytes = max(0, usable_bytes(folder)) + kept_bytes(folder)
    if room_bytes < _LEAST_DISK_BYTES:
        raise UsageError(
            f"--cache is disk, and the disk of {folder} has {room_bytes / 1e9:.1f} GB to spare; make room there, or "
            "name another --cache-folder."
        )
    return DiskCache(folder, int(_DISK_FRACTION * room_bytes), time.time())


def keeps_shared(config: ResolvedConfig, data: Dataset, memory_bytes: int) -> bool:
    """Return whether runs that train at once on the same images keep them decoded in ``memory_bytes``, once for all."""
    fits = not config.crops_originals and sum(data.num_bytes) <= _SHARED_FRACTION * memory_bytes
    return config.cache == "memory" or (config.cache == "auto" and fits)


class SharedImages(RunMonitor):
    """Images that runs of this machine share, decoded once, while it is open.

    ``cache`` is None if they do not fit. As a monitor, it takes the images that no run can use.
    """

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, num_steps: int) -> None:
        history, skip_limit = History(prepared.store), prepared.skip_limit()
        super().__init__(prepared.name, num_steps, num_steps, history, skip_limit=skip_limit)
        self._opened = ExitStack()
        self.cache: ImageCache | None = None
        if keeps_shared(config, prepared.data, image_memory()[1]):
            in_memory = dataclasses.replace(config, cache="memory")
            self.cache = image_cache(in_memory, prepared.data, 0, self._opened)

    def __enter__(self) -> SharedImages:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def poll(self) -> tuple[Snapshot, str | None]:
        """Return a snapshot, with the images that cannot be used and a request to stop all runs; and why they must end.

        The reason is None if they may continue.
        """
        return self.snapshot(), self.failure
