"""Which images the workers of a machine keep decoded, and in which folder; and those that several runs share."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from dataclasses import dataclass

from raytrain.backends.cache_choice import choose_cache
from raytrain.backends.machine import image_memory
from raytrain.backends.prepare import PreparedRun
from raytrain.config import ResolvedConfig
from raytrain.data.batch_plan import Cursor
from raytrain.data.block_order import CacheOrder, rows_per_block
from raytrain.data.dataset import Dataset
from raytrain.data.decode import ImageFormat
from raytrain.data.labels.manifest import Manifest
from raytrain.runs.history import History
from raytrain.runs.monitor import RunMonitor
from raytrain.runs.outcome import EndStatus, StopReason
from raytrain.runs.skipped_images import SkippedImage
from raytrain.storage.disk_cache import DiskCache
from raytrain.storage.tempdir import TemporaryFolder


@dataclass(frozen=True)
class ImageCache:
    """Images that are kept decoded: the ``folder`` of the files, the same for all workers of a machine.

    ``train`` and ``test`` are the orders in which images are kept; None if they are streamed. ``disk`` keeps files of a
    bucket as they are.
    """

    folder: str
    train: CacheOrder | None
    test: CacheOrder | None
    disk: DiskCache | None


def image_cache(config: ResolvedConfig, data: Dataset, first_step: int, opened: ExitStack) -> ImageCache:
    """Decide what this machine keeps, and make the folder for it, which is removed when ``opened`` is closed.

    Raises UsageError if ``--cache memory`` asks for more memory than there is.
    """
    parent, memory_bytes = image_memory()
    plan = data.plan(config)
    choice = choose_cache(config, data, plan, first_step, memory_bytes)
    folder = opened.enter_context(TemporaryFolder(parent))
    train = CacheOrder(plan, plan.cursor(first_step), _rows_per_block(data.train, data.train_format))
    test = CacheOrder(data.test_plan(1), Cursor(), _rows_per_block(data.test, data.test_format))
    return ImageCache(str(folder), train if choice.train else None, test if choice.test else None, choice.disk)


def _rows_per_block(manifest: Manifest, format: ImageFormat) -> int:
    return rows_per_block(format.shape.num_bytes, packed=manifest.packing is not None)


class SharedImages:
    """Images that several runs of this machine keep decoded, once for all, while it is open.

    ``prepared`` is what the runs belong to, whose documents list the images that cannot be used; ``config`` are the
    options of one of them. Raises UsageError as :func:`image_cache` does.
    """

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, num_steps: int) -> None:
        self._opened = ExitStack()
        kept = dataclasses.replace(config, cache="memory")
        self.cache = image_cache(kept, prepared.data, 0, self._opened)
        steps_per_epoch = prepared.data.plan(config).steps_per_epoch
        self._monitor = RunMonitor(
            prepared.name, num_steps, steps_per_epoch, History(prepared.store), skip_limit=prepared.skip_limit()
        )

    def __enter__(self) -> SharedImages:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def look(self) -> tuple[StopReason | None, str | None]:
        """A request to stop all runs, and why the images cannot be used, if that is so."""
        return self._monitor.stop_request, self._monitor.failure

    def skip(self, images: list[SkippedImage]) -> None:
        """Note images that a run could not use."""
        self._monitor.skip(images)

    def skipped_images(self) -> list[SkippedImage]:
        """The images that no run can use."""
        return self._monitor.skipped_images

    def finish(self, status: EndStatus) -> None:
        """End the list of skipped images: it is in storage when this returns."""
        self._monitor.finish(status)
