"""A run whose loss is not finite says so, stops as failed, and its last whole checkpoint is the one that counts."""

from __future__ import annotations

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import raytrain
from raytrain import TrainingFailed
from raytrain.monitor.events import Event, LossNotFinite
from raytrain.monitor.monitor import RunMonitor
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import Outcome
from raytrain.storage.open import open_store
from raytrain.training.checkpoint import read_checkpoint
from tests.helpers import memory_runs
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.small_runs import local_config, loop_with


def poison(run: raytrain.Run, batch: raytrain.Batch, at_step: int, value: float = math.nan) -> None:
    """Before the step after ``at_step`` completed steps, a weight becomes NaN or infinite."""
    if batch.step == at_step:
        model = run.models.trained[0]
        with torch.no_grad():
            next(model.parameters()).flatten()[0] = value


def train(images: Path, storage: Path, at_step: int, value: float = math.nan, **options: Any) -> raytrain.TrainResult:
    loop = partial(loop_with, before_step=partial(poison, at_step=at_step, value=value))
    return raytrain.train(local_config(images, storage, **options), loop=loop)


def steps_of_checkpoints(storage: Path) -> list[int]:
    return sorted(int(file.stem.removeprefix("step-")) for file in storage.glob("run/checkpoints/*.pt"))


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.slow)])
def test_the_run_is_stopped_and_resumes_from_its_last_finite_checkpoint(
    value: float, images: Path, tmp_path: Path
) -> None:
    sentence = r"Run 'run' failed: the loss is nan at step \d+, .*--learning-rate.*--precision.* and resume=True"
    with pytest.raises(TrainingFailed, match=sentence) as raised:
        train(images, tmp_path, 7, value, checkpoint_every=("1ep", "2st"))
    assert raised.value.summary["steps"] < 20
    assert steps_of_checkpoints(tmp_path)[-1] == 6
    assert raised.value.summary["checkpoint"].endswith("step-000000006.pt")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == json.loads((tmp_path / "run/status.json").read_text())["status"] == "failed"
    result = raytrain.train(
        dataclasses.replace(local_config(images, tmp_path), resume=True), loop=partial(loop_with, before_step=nothing)
    )
    assert result.status == "finished" and result.checkpoint is not None
    saved = read_checkpoint(open_store(result.run_dir), result.checkpoint.removeprefix(result.run_dir).lstrip("/"))
    assert all(weight.isfinite().all() for weight in saved.state["model"].values())


def nothing(run: raytrain.Run, batch: raytrain.Batch) -> None: ...


def test_a_run_that_diverges_at_its_end_is_not_finished(images: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"the weight \S+ is not finite after step 20.*--learning-rate") as raised:
        train(images, tmp_path, at_step=19)
    assert raised.value.summary["status"] == "failed"
    assert 20 not in steps_of_checkpoints(tmp_path)


def test_two_workers_agree(tmp_path: Path) -> None:
    outcomes: list[tuple[Outcome, list[Event]]] = run_in_processes(2, diverge, str(tmp_path))
    (first, events), (second, _) = outcomes
    assert first.status == second.status == "failed"
    assert first.error == second.error and "after step 10" in str(first.error)
    assert [file.name for file in sorted(tmp_path.glob("checkpoints/*.pt"))] == ["step-000000005.pt"]
    assert any("checkpoint_skipped" in str(event) for event in events)


def diverge(folder: str) -> tuple[Outcome, list[Event]]:
    recorder = memory_runs.Recorder()
    options = memory_runs.config()
    run = memory_runs.make_run(options, memory_runs.images(70), folder, recorder)
    return memory_runs.trained(run, partial(loop_with, before_step=partial(poison, at_step=6))), recorder.events


def row(step: int, loss: float | None) -> MetricRow:
    return MetricRow(kind="step", step=step, epoch=1, metrics={} if loss is None else {"loss": loss})


def monitor(folder: Path) -> RunMonitor:
    return RunMonitor("run", num_steps=100, steps_per_epoch=100, history=History(open_store(str(folder))))


def test_the_first_row_is_told_at_once_and_three_in_a_row_end_the_run(tmp_path: Path) -> None:
    watched = monitor(tmp_path)
    for step, loss in enumerate([1.0, math.nan, math.inf], start=1):
        watched.record(row(step, loss))
    assert [event for _, _, event in watched.snapshot().events] == [LossNotFinite("nan", 2)]
    assert watched.failure is None and watched.stop_request is None
    watched.record(row(4, -math.inf))
    assert watched.failure is not None and "--learning-rate" in watched.failure
    assert watched.stop_request is not None


def test_rows_that_recover_or_have_no_loss_do_not_count(tmp_path: Path) -> None:
    watched = monitor(tmp_path)
    for step, loss in enumerate([math.nan, math.nan, 1.0, math.nan, math.nan, None, 0.5, math.nan], start=1):
        watched.record(row(step, loss))
    assert watched.failure is None
    watched.note_start(1, 8)
    for step in (9, 10):
        watched.record(row(step, math.nan))
    assert watched.failure is None
