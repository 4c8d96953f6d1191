"""What the workers of this machine print, copied to the run's storage."""

from __future__ import annotations

from pathlib import Path

from raytrain.runs.background import Background
from raytrain.runs.process_log import COPY_EVERY_S, LogCopies, log_name, stamp, worker_log
from raytrain.runs.throttle import Throttle
from raytrain.storage.base import Store


class WorkerLogs:
    """The logs that torch's elastic agent writes below ``folder``, for each start and worker, and their copies."""

    def __init__(self, store: Store, folder: Path) -> None:
        self._folder = folder
        self._copies = LogCopies(store)
        self._session = stamp()
        self._throttle = Throttle()
        self._background = Background(self._copy)  # storage may hang, and a stop must not wait for it

    def copy_if_due(self) -> None:
        """Copy what is new every few seconds; returns at once."""
        if self._throttle.due("copy", COPY_EVERY_S):
            self._background(None)

    def close(self) -> None:
        """Copy the rest, when the workers have ended."""
        self._background.close()
        self._copy(None)

    def _copy(self, _: None) -> None:
        for path in self._folder.glob("*/attempt_*/*/std*.log"):
            attempt, rank = path.parts[-3].removeprefix("attempt_"), int(path.parts[-2])
            started, stream = f"{self._session}a{attempt}", path.stem.removeprefix("std")
            self._copies.copy(path, log_name(worker_log(rank), started, stream))
