"""A run as TensorBoard shows it: event files in the folder ``tensorboard`` of the run, or of the sweep of a trial."""

# tensorboardX is typed in parts only.
# pyright: basic
from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue] ; made at import
from tensorboardX.summary import hparams

from raytrain.runs.background_and_throttle import Throttle
from raytrain.runs.documents import TENSORBOARD
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.trackers.pictures import Pixels, contact_sheet
from raytrain.trackers.tracker import TrackedRun

_UPLOAD_EVERY_S = 30.0


class TensorBoardTracker:
    """Event files in the run's folder. For a run in a bucket they grow on this machine, and are copied every 30 s.

    The files of a trial are in a folder within that of the sweep, so that TensorBoard shows all trials together.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._store = run.sweep.store if run.sweep else run.store
        self.place = shlex.join(["tensorboard", "--logdir", f"{self._store.url}/{TENSORBOARD}"])
        self._path = f"{TENSORBOARD}/{run.name}" if run.sweep else TENSORBOARD
        self._local = TemporaryFolder() if "://" in self._store.url else None
        self._folder = self._local.path if self._local else Path(self._store.url, self._path)
        # The library names files by the second. A finer time in the name keeps this file from replacing one of an
        # earlier attempt, and sorts it after those.
        self._writer = SummaryWriter(str(self._folder), filename_suffix=f".{time.time_ns()}")
        self._throttle = Throttle()

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Write the options, which the tab HPARAMS shows."""
        assert self._writer.file_writer is not None
        for summary in hparams(params, {})[:2]:  # the experiment and the start of the session, but not its end
            self._writer.file_writer.add_summary(summary)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row as one event, which is several times faster than an event for each number."""
        assert self._writer.file_writer is not None
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.file_writer.add_summary(Summary(value=values), step)

    def log_image(self, key: str, images: Sequence[Pixels], step: int, caption: Sequence[str]) -> None:
        """Write images, joined into one, which TensorBoard shows with a slider over the steps."""
        self._writer.add_image(key, contact_sheet(images, caption), step, dataformats="HWC")

    def save(self) -> None:
        """Flush the event file, and copy it to the bucket of the run, if it has one and the last copy is 30 s old."""
        self._writer.flush()
        if self._throttle.due("upload", _UPLOAD_EVERY_S):
            self._upload()

    def finalize(self, status: str) -> None:
        """Close the event file; for a run in a bucket, copy it there and delete it on this machine."""
        self._writer.close()
        self._upload()
        if self._local is not None:
            self._local.remove()

    def _upload(self) -> None:
        """Copy the event files to the bucket; do nothing for a run in a folder, whose files are written in place."""
        for file in self._local.path.glob("events.*") if self._local else ():
            self._store.put(f"{self._path}/{file.name}", file.read_bytes())
