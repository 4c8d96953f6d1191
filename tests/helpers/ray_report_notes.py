"""A callback of Ray Train's, as a platform installs one by RAY_TRAIN_CALLBACKS: it notes what workers report."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

# The classes that this variable of Ray's may name are of a private module.
from ray.train.v2._internal.execution.callback import ControllerCallback, ReportCallback

FILE_VARIABLE = "REPORT_NOTES"
"""Names the file for the notes, of JSON lines: first the name of the run, then the metrics of each report."""


class ReportNotes(ReportCallback, ControllerCallback):
    """Notes the name of the run, and what all of its workers report together."""

    def __init__(self) -> None:
        self._file = Path(os.environ[FILE_VARIABLE])

    def after_controller_start(self, train_run_context: Any) -> None:
        self._add(train_run_context.get_run_config().name)

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        self._add(metrics)

    def _add(self, note: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(note) + "\n")
