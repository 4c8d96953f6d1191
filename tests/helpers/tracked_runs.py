"""Runs for trackers, without training: rows, snapshots, and what W&B wrote to its own file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from wandb.proto import wandb_internal_pb2

from raytrain.config import ResolvedConfig
from raytrain.monitor.events import Event, TrackerOpened
from raytrain.recipes import digits
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import TrainResult
from raytrain.storage.store import Store
from raytrain.trackers.open_trackers import open_trackers
from raytrain.trackers.tracker_threads import Tracking
from tests.helpers.snapshots import snapshot, train_result
from tests.helpers.waiting import wait_for


def options(**more: Any) -> ResolvedConfig:
    config = digits(data="images", mean=(0.5,), std=(0.25,), **more)
    return config.resolve(name="first", num_workers=2, device="cpu", mean=(0.5,), std=(0.25,))


def step_rows(first: int, last: int, **metrics: float) -> list[MetricRow]:
    """A row of each step from ``first`` to ``last``."""
    return [
        MetricRow(kind="step", step=step, epoch=1, learning_rate=0.1, metrics={"loss": 1 / step, **metrics})
        for step in range(first, last + 1)
    ]


def evaluation_row(step: int, accuracy: float = 0.5) -> MetricRow:
    return MetricRow(kind="evaluation", step=step, epoch=1, metrics={"accuracy": accuracy, "loss": 2.0})


def result(store: Store, **more: Any) -> TrainResult:
    return train_result(**{"checkpoint": None, "run_dir": store.url, **more})


def tracked(
    store: Store,
    trackers: Sequence[Any],
    rows: Sequence[MetricRow],
    *,
    end_within_s: float = 60.0,
    checkpoint: str | None = None,
    status: str = "finished",
    sweep: str | None = None,
    **more: Any,
) -> list[str]:
    """Send a whole run to ``trackers`` and return what they reported: where they show the run, and why they failed."""
    events: list[Event] = []
    tracking = Tracking(open_trackers(trackers), end_within_s)
    tracking.begin(options(**more), store, events.append, sweep=sweep)
    tracking.update(snapshot(rows))
    tracking.finish(result(store, status=status, checkpoint=checkpoint and f"{store.url}/{checkpoint}"))
    return [event.place if isinstance(event, TrackerOpened) else str(event.fields()["reason"]) for event in events]


class Recorder:
    """A tracker that keeps what it gets."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.statuses: list[str] = []

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self.params = params

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append((step, metrics))

    def finalize(self, status: str) -> None:
        self.statuses.append(status)

    @property
    def steps(self) -> list[int]:
        return [step for step, metrics in self.rows if "train/loss" in metrics]


def read_wandb_file(file: Path) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The options and, by step, the metrics in the file that ``wandb sync`` uploads, once wandb has finished it.

    Parts of a value are called ``name.part``.
    """
    config: dict[str, Any] = {}
    history: dict[int, dict[str, Any]] = {}
    for record in _finished(file):
        for update in record.config.update:
            config[update.key] = json.loads(update.value_json)
        if record.HasField("history"):
            step = record.history.step.num
            assert step not in history, f"step {step} was sent twice"
            history[step] = {".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
    return config, history


def _finished(file: Path) -> list[Any]:
    """The records of a file, read again until the last one is there: wandb writes in a process of its own."""

    def whole() -> list[Any]:
        records: list[Any] = []
        for data in _records(file.read_bytes()):
            records.append(wandb_internal_pb2.Record())  # pyright: ignore[reportAttributeAccessIssue]
            try:
                records[-1].ParseFromString(data)
            except DecodeError:  # this part of the file is still being written
                return []
        return records if any(record.HasField("exit") for record in records) else []

    return wait_for(whole)


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, after W&B's header of 7 bytes."""
    place, block, whole = 7, 32768, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""
