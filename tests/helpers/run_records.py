"""Records of runs that never trained, to be shown."""

from __future__ import annotations

from raytrain.config import TrainConfig
from raytrain.runs.documents import SUMMARY, write_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import StopReason, TrainResult
from raytrain.runs.records import RunRecord
from raytrain.runs.status import RunStatus
from raytrain.storage.store import Store


def finished(name: str, rows: list[MetricRow]) -> RunRecord:
    """A run that has finished with this history."""
    return RunRecord(
        name=name,
        config=TrainConfig(batch_size=8, learning_rate=0.1),
        status=RunStatus(status="finished"),
        images={},
        summary={},
        metrics=rows,
        checkpoints=[],
        skipped=[],
    )


def write_summary(
    store: Store,
    name: str,
    steps: int,
    epochs: int,
    *,
    stop_reason: StopReason | None = None,
    num_workers: int = 1,
    validation_accuracy: float | None = None,
) -> TrainResult:
    """Write the summary of a run that has ended, stopped if it has a reason for that, and return what it says."""
    result = TrainResult(
        name=name,
        status="stopped" if stop_reason else "finished",
        steps=steps,
        epochs=epochs,
        samples_seen=0,
        validation_accuracy=validation_accuracy,
        validation_loss=None,
        checkpoint=None,
        run_dir=store.url,
        seconds=1.0,
        num_workers=num_workers,
        stop_reason=stop_reason,
    )
    write_json(store, SUMMARY, result.summary())
    return result
