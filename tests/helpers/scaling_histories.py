"""Histories of runs on several numbers of workers."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain.runs.metric_row import MetricRow


def history(
    images_per_s: float, accuracies: Sequence[float], images: int = 1000, steps: int = 10, log_every: int = 1
) -> list[MetricRow]:
    """Make the history of a run at constant speed, with one evaluated epoch per accuracy. Evaluations take minutes."""
    rows: list[MetricRow] = []
    for epoch, accuracy in enumerate(accuracies, start=1):
        for step in range(steps * (epoch - 1) + 1, steps * epoch + 1):
            if step % log_every == 0 or step == steps * len(accuracies):
                row = MetricRow(
                    kind="step",
                    step=step,
                    epoch=epoch,
                    elapsed_s=600.0 * epoch,
                    samples_seen=step * images // steps,
                    images_per_s=images_per_s,
                    metrics={"accuracy": accuracy / 2},
                )
                rows.append(row)
        rows.append(evaluation(steps * epoch, epoch, accuracy))
    return rows


def evaluation(step: int, epoch: int, accuracy: float) -> MetricRow:
    return MetricRow(
        kind="evaluation", step=step, epoch=epoch, elapsed_s=600.0 * epoch + 300, metrics={"accuracy": accuracy}
    )
