"""Choice of a run's cache: decoded in memory, as files on a disk, or none.

Decoded images are the fastest and take the most room: 150 kB for one of 224 pixels. Files of a bucket on the machine's
disk save the network, but are decoded again in each epoch. If the workers' GPUs decode, files are kept in memory, and
each epoch may cut other crops out of them. With ``--cache auto``, images that are used only once are streamed; the
validation images are used in each evaluation.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from raytrain.config import ResolvedConfig
from raytrain.data.dataset import Dataset, evaluation_plan
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.partition import BLOCK_BYTES, CacheOrder
from raytrain.errors import UsageError
from raytrain.loader.machine import image_memory
from raytrain.storage.disk_cache import DiskCache, kept_bytes, make_folder, usable_bytes
from raytrain.storage.open import absolute_path
from raytrain.storage.temporary_files import TemporaryFolder

MACHINE_BLOCK_BYTES = 16 << 20
"""Size of a block that one thread beside a worker decodes.

Data tasks have blocks of four times the size. Here, those would delay the first batch of photographs by a second.
"""

_AUTO_FRACTION = 0.4  # of the memory for decoded images; the rest is for streamed blocks
_SHARED_FRACTION = 0.8  # of the memory for decoded images, if several runs train on the same images at once
_DISK_FRACTION = 0.5  # of the free space of a disk
_LEAST_DISK_BYTES = 1 << 30


@dataclass(frozen=True)
class ImageCache:
    """The images of a run that a machine keeps.

    Attributes:
        train: the order in which training images are kept, decoded or as files; None if they are streamed.
        validation: the same for the validation images.
        disk: where files of a bucket are kept; None if they are not.
        folder: where the processes of this machine find the kept images, unless they are in Ray's object store.
    """

    train: CacheOrder | None = None
    validation: CacheOrder | None = None
    disk: DiskCache | None = None
    folder: str = ""

    def order(self, part: Part) -> CacheOrder | None:
        """Return the order in which the images of a part are kept; None for test images, which are used only once."""
        return {"train": self.train, "validation": self.validation, "test": None}[part]


def image_cache(
    config: ResolvedConfig, data: Dataset, first_step: int, opened: ExitStack, num_caches: int = 1
) -> ImageCache:
    """Return the cache of this machine, with its folder, which is removed when ``opened`` is closed.

    It is one of ``num_caches`` that divide the machine's memory, if processes cannot share one. The cache is that of
    :func:`choose_cache`, which may raise UsageError. On Linux, the files of kept images have no
    names, so that the system frees them with the last process that has them open, even if all are killed. Other
    processes open them through links in the folder to this process's descriptors.
    """
    parent, memory_bytes = image_memory()
    cache = choose_cache(config, data, first_step, memory_bytes // num_caches, MACHINE_BLOCK_BYTES)
    if not os.path.isdir("/proc/self/fd"):  # not on Linux
        return dataclasses.replace(cache, folder=str(opened.enter_context(TemporaryFolder(parent))))
    folder = opened.enter_context(TemporaryFolder())
    for name, order in (("train", cache.train), ("validation", cache.validation)):
        if order is not None:
            file = opened.enter_context(tempfile.TemporaryFile(dir=parent))  # noqa: SIM115 ; it is one
            (folder / name).mkdir()
            (folder / name / "images").symlink_to(f"/proc/{os.getpid()}/fd/{file.fileno()}")
    return dataclasses.replace(cache, folder=str(folder))


def choose_cache(
    config: ResolvedConfig, data: Dataset, first_step: int, memory_bytes: int, block_bytes: int = BLOCK_BYTES
) -> ImageCache:
    """Return the cache of a run: which images are kept in memory, and whether the files of a bucket are on a disk.

    With ``--cache auto``, that depends on what fits and on what is used again: nothing may be kept.

    Args:
        first_step: of this attempt. Images are kept in the order in which it needs them, and streamed if it will use
            them only once.
        memory_bytes: what one machine has for the images that are kept in memory.
        block_bytes: the most bytes of a block in memory; a block is read as a whole.

    Raises UsageError if the memory is too small for ``--cache memory``, or if ``--cache disk`` is impossible.
    """
    train_bytes, validation_bytes = data.num_bytes
    if config.cache == "memory" and train_bytes + validation_bytes > memory_bytes:
        raise UsageError(
            f"--cache is memory, and the images take {(train_bytes + validation_bytes) / 1e9:.2f} GB there, more "
            f"than the {memory_bytes / 1e9:.2f} GB that are left for them; use --cache auto."
        )
    # The orders in which images would be kept, in blocks of as many rows as fit.
    plan = data.plan(config)
    as_files = data.train_format.as_files
    rows = data.train.rows_per_block(data.train_format.shape, as_files=as_files, most_bytes=block_bytes)
    train = CacheOrder(plan, first_step, rows)
    rows = data.validation.rows_per_block(data.evaluation_format.shape, most_bytes=block_bytes)
    validation = CacheOrder(evaluation_plan(data.validation, 1), 0, rows)

    # The user's choice.
    if config.cache == "disk":
        return ImageCache(disk=_disk_cache(config, data))
    if config.cache != "auto":
        return ImageCache(train, validation) if config.cache == "memory" else ImageCache()

    # Keep training images if they are used in more than one epoch, and are the same in each: files are, and pixels
    # unless another crop is decoded each time.
    room_bytes = _AUTO_FRACTION * memory_bytes
    used_again = plan.num_steps - first_step > plan.steps_per_epoch
    stays_same = as_files or not config.crops_originals
    keeps_train = used_again and stays_same and train_bytes + validation_bytes <= room_bytes

    # Otherwise keep their files on the disk, if any is read twice. A packed shard is, because several blocks need it.
    read_again = used_again or data.train.packing is not None
    disk = None
    if read_again and not keeps_train:
        if config.cache_folder is not None and data.train_store.cloud is not None:
            _cache_folder(config)  # one that the user has named must be usable
        with suppress(UsageError):  # the images are in a folder, or the disk has no room
            disk = _disk_cache(config, data)
    return ImageCache(train if keeps_train else None, validation if validation_bytes <= room_bytes else None, disk)


def _disk_cache(config: ResolvedConfig, data: Dataset) -> DiskCache:
    """Return the cache that ``--cache disk`` asks for, and make its folder; raise UsageError if it cannot be used."""
    # Only files of a bucket are kept.
    if data.train_store.cloud is None:
        raise UsageError(f"--cache is disk, and {data.train_store.url} is a folder; that is for images in a bucket.")
    folder = _cache_folder(config)

    # The limit is the user's, or a part of the disk. The files of earlier runs count as free space there, because they
    # are evicted for this run.
    if config.cache_limit_gb is not None:
        return DiskCache(folder, int(config.cache_limit_gb * 1e9), time.time())
    room_bytes = max(0, usable_bytes(folder)) + kept_bytes(folder)
    if room_bytes < _LEAST_DISK_BYTES:
        raise UsageError(
            f"--cache is disk, and the disk of {folder} has {room_bytes / 1e9:.1f} GB to spare; make room there, or "
            "name another --cache-folder."
        )
    return DiskCache(folder, int(_DISK_FRACTION * room_bytes), time.time())


def _cache_folder(config: ResolvedConfig) -> str:
    """Return the folder for files of a bucket on this machine, which is made; raise UsageError if it cannot be used."""
    folder = absolute_path(config.cache_folder or f"{tempfile.gettempdir()}/raytrain-cache-{os.getuid()}")
    try:
        if not make_folder(folder):
            raise UsageError(
                f"--cache is {config.cache}, and {folder} belongs to another user; name another --cache-folder."
            )
        tempfile.TemporaryFile(dir=folder).close()  # raises OSError if nothing can be written there
    except OSError as error:
        raise UsageError(
            f"--cache is {config.cache}, and {folder} cannot be written ({error.strerror}); name another "
            "--cache-folder."
        ) from None
    return folder


def keeps_shared(config: ResolvedConfig, data: Dataset, memory_bytes: int) -> bool:
    """Return whether runs that train on the same images at once, such as trials of a sweep, share them in memory.

    ``memory_bytes`` is what one machine has for them.
    """
    if config.cache != "auto":
        return config.cache == "memory"
    # Images can be shared if all epochs use the same: files are the same, and so are pixels unless another crop is
    # decoded each time.
    stays_same = data.train_format.as_files or not config.crops_originals
    return stays_same and sum(data.num_bytes) <= _SHARED_FRACTION * memory_bytes
