"""States and results of runs that never trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import TrainResult


def snapshot(rows: Sequence[MetricRow] = (), first_row: int = 0, **more: Any) -> Snapshot:
    """A run that trains on two workers, with this history; ``more`` replaces any field."""
    values: dict[str, Any] = {
        "name": "first",
        "status": "running",
        "step": rows[-1].step if rows else 0,
        "num_steps": 1000,
        "steps_per_epoch": 100,
        "num_workers": 2,
        "elapsed_s": 754.9,
        "time_left_s": 80.0,
        "attempt": 1,
        "first_row": first_row,
        "rows": tuple(rows),
        "num_rows": first_row + len(rows),
        "latest": rows[-1] if rows else None,
        "evaluation": None,
        "num_skipped": 0,
        "num_retries": 0,
        "stop_request": None,
        "events": (),
        "result": None,
    }
    return Snapshot(**{**values, **more})


def train_result(**more: Any) -> TrainResult:
    """A run on two workers that has finished its 12 steps; ``more`` replaces any field."""
    values: dict[str, Any] = {
        "name": "first",
        "status": "finished",
        "steps": 12,
        "epochs": 3.0,
        "samples_seen": 96,
        "validation_accuracy": 0.97,
        "validation_loss": None,
        "checkpoint": "checkpoints/step-000000012.pt",
        "run_dir": "runs/first",
        "seconds": 61.5,
        "num_workers": 2,
    }
    return TrainResult(**{**values, **more})
