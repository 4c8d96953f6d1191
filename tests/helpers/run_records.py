"""Records of runs that never trained, to be shown."""

from __future__ import annotations

from raytrain.config import TrainConfig
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.records import RunRecord
from raytrain.runs.status import RunStatus


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
