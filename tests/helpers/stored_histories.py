"""Runs in a folder that were never trained: their documents, made here."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raytrain.monitor.events import Event, TimedEvent
from raytrain.recipes import digits
from raytrain.runs.documents import EVENTS, METRICS, SUMMARY, encode_lines, run_store, write_config, write_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.status import RunStatus, write_status
from raytrain.storage.store import Store
from tests.helpers.snapshots import train_result


def step_row(step: int, **metrics: float | None) -> MetricRow:
    return MetricRow(kind="step", step=step, epoch=1, elapsed_s=0.1 * step, learning_rate=0.1, metrics=metrics)


def evaluation_row(step: int, **metrics: float | None) -> MetricRow:
    return MetricRow(kind="evaluation", step=step, epoch=1, elapsed_s=0.1 * step, metrics=metrics)


def store_run(storage: Path, name: str, rows: Iterable[MetricRow], status: str = "running", **options: Any) -> Store:
    """A run of 1,000 steps with these ``rows``, whose process is this one."""
    store = run_store(str(storage), name)
    config = digits(name=name, data="images", storage=str(storage), mean=(0.2,), std=(0.3,), **options)
    write_config(store, config.resolve(name=name, num_workers=2, device="cpu", mean=(0.2,), std=(0.3,)))
    rows = list(rows)
    store.put(METRICS, encode_lines(row.to_json() for row in rows))
    step = rows[-1].step if rows else 0
    write_status(store, RunStatus(status=status, step=step, num_steps=1000, epoch=1, num_epochs=4, num_workers=2))
    return store


def add_events(store: Store, *events: Event) -> None:
    store.put(
        EVENTS, encode_lines(TimedEvent(number, float(number), event).to_json() for number, event in enumerate(events))
    )


def end_run(store: Store, status: str, step: int, checkpoint: str | None, best: float | None = None) -> None:
    """The summary and the status of a run that is over."""
    result = train_result(
        name="run",
        status=status,
        steps=step,
        checkpoint=checkpoint,
        run_dir=store.url,
        best_metric="accuracy",
        best_value=best,
    )
    write_json(store, SUMMARY, result.summary())
    write_status(store, RunStatus(status=status, step=step, num_steps=1000, epoch=1, num_epochs=4, num_workers=2))


def append_rows(folder: Path, rows: Iterable[MetricRow]) -> None:
    """Let a stored run in ``folder`` go on."""
    with (folder / METRICS).open("a") as file:
        file.writelines(json.dumps(row.to_json()) + "\n" for row in rows)
