"""Images that runs on one machine share, such as the trials of a sweep: decoded once for all of them."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

from raytrain.config import ResolvedConfig
from raytrain.launch.prepare import PreparedRun
from raytrain.loader.image_cache import ImageCache, image_cache, keeps_shared
from raytrain.loader.machine import image_memory
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.metrics_history import History


class SharedImages(RunMonitor):
    """Images that runs on this machine share while this is open, decoded once.

    ``cache`` is None if they do not fit into memory; then each run decodes them for itself. As a monitor, this collects
    the images that cannot be used, which each run reports. ``num_steps`` counts the steps of all runs together.
    """

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, num_steps: int) -> None:
        history, skip_limit = History(prepared.store), prepared.skip_limit()
        super().__init__(prepared.name, num_steps, num_steps, history, skip_limit=skip_limit)
        self._opened = ExitStack()
        self.cache: ImageCache | None = None
        if keeps_shared(config, prepared.data, image_memory()[1]):
            config_in_memory = dataclasses.replace(config, cache="memory")
            self.cache = image_cache(config_in_memory, prepared.data, 0, self._opened)

    def __enter__(self) -> SharedImages:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def poll(self) -> tuple[Snapshot, str | None]:
        """Return a snapshot, and why the runs must end, or None if they may continue.

        The snapshot has the number of images that cannot be used, and a request to stop all runs.
        """
        return self.snapshot(), self.failure
