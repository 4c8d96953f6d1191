"""The documents of a run during training: when it becomes visible, its heartbeat, and its final summary."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.monitor.document_writer import DocumentWriter, progress_of
from raytrain.monitor.events import CheckpointWritten
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.stop_request import request_stop
from raytrain.runs.documents import STOP_REQUEST, SUMMARY, read_config, read_json, run_names, run_store
from raytrain.runs.machine_history import MachineUse, read_machine_history, read_machines
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import Outcome, Progress, StopReason
from raytrain.runs.status import read_status
from raytrain.storage.open import open_store
from raytrain.storage.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return run_store(str(tmp_path), "first")


@pytest.fixture
def config() -> ResolvedConfig:
    options = TrainConfig(recipe="digits", batch_size=8, learning_rate=0.1)
    return options.resolve(name="first", num_workers=2, device="cpu", mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture
def monitor(store: Store) -> RunMonitor:
    return RunMonitor("first", num_steps=100, steps_per_epoch=40, history=History(store))


def test_a_run_is_listed_once_it_has_started(store: Store, config: ResolvedConfig, tmp_path: Path) -> None:
    documents = DocumentWriter(store, num_steps=100, first_step=40)
    assert run_names(open_store(str(tmp_path))) == []
    documents.begin(config)
    assert run_names(open_store(str(tmp_path))) == ["first"]
    status = read_status(store)
    assert (status.status, status.step, status.num_steps) == ("starting", 40, 100)


def test_the_heartbeat_tells_of_the_machines(store: Store, config: ResolvedConfig, monitor: RunMonitor) -> None:
    documents = DocumentWriter(store, num_steps=100)
    documents.begin(config)
    use = MachineUse(rank=0, node="n", images_per_s=10.0, data_wait_fraction=0.5)
    monitor.note_start(num_workers=1, step=0)
    monitor.note_machine_use(use)
    documents.heartbeat(monitor.snapshot())
    assert read_machines(store) == (use,)
    [worker] = read_machine_history(store).to_json()["workers"]
    assert worker == {"rank": 0, "node": "n", "values": {"images_per_s": [10.0], "data_wait_fraction": [0.5]}}


def test_every_event_is_logged_once(store: Store, monitor: RunMonitor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="raytrain")
    documents = DocumentWriter(store, num_steps=100)
    monitor.note_start(num_workers=2, step=0)
    documents.heartbeat(monitor.snapshot())
    monitor.note_event(CheckpointWritten("checkpoints/step-000000020.pt", 20))
    documents.heartbeat(monitor.snapshot())
    assert [record.getMessage() for record in caplog.records] == [
        "first: training_started num_workers=2 step=0",
        "first: checkpoint_written path=checkpoints/step-000000020.pt step=20",
    ]


def test_the_summary_says_how_the_run_ended(store: Store, monitor: RunMonitor) -> None:
    documents = DocumentWriter(store, num_steps=100)
    monitor.note_start(num_workers=2, step=0)
    monitor.request_stop(StopReason("signal", "SIGINT"))
    progress = Progress(step=50, samples_seen=400, validation_accuracy=0.75, validation_loss=0.5, evaluated_step=40)
    outcome = Outcome(status="stopped", progress=progress, checkpoint="checkpoints/step-000000050.pt")
    result = documents.result(outcome, monitor.snapshot(), num_workers=2, best_metric="accuracy")
    monitor.finish(outcome.status, result)
    documents.conclude(result, monitor.snapshot())
    assert (result.status, result.epochs, result.stop_reason) == ("stopped", 1.25, StopReason("signal", "SIGINT"))
    assert result.checkpoint == f"{store.url}/checkpoints/step-000000050.pt"
    assert read_json(store, SUMMARY) == result.summary()
    assert (read_status(store).status, read_status(store).step) == ("stopped", 50)


def test_if_the_workers_report_no_result_it_is_taken_from_the_monitor(store: Store, monitor: RunMonitor) -> None:
    monitor.note_start(num_workers=1, step=0)
    monitor.record(MetricRow(kind="step", step=30, epoch=1, samples_seen=240))
    monitor.record(MetricRow(kind="evaluation", step=30, epoch=1, metrics={"accuracy": 0.5, "loss": 1.5}))
    progress = progress_of(monitor.snapshot(), 0)
    assert (progress.step, progress.samples_seen, progress.validation_accuracy, progress.validation_loss) == (
        30,
        240,
        0.5,
        1.5,
    )


def test_a_run_that_ends_before_it_resumes_has_come_as_far_as_its_checkpoint(store: Store, monitor: RunMonitor) -> None:
    monitor.note_start(num_workers=1, step=0)
    for step in (10, 20, 30):
        monitor.record(MetricRow(kind="step", step=step, epoch=1, samples_seen=8 * step))
    monitor.finish("failed")
    resumed = RunMonitor("run", num_steps=100, steps_per_epoch=40, history=History(store))
    assert progress_of(resumed.snapshot(), 20) == Progress(step=20, samples_seen=160)


def test_a_summary_holds_no_secret(store: Store, monitor: RunMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hidden-word")
    documents = DocumentWriter(store, num_steps=100)
    monitor.request_stop(StopReason("caller", "enough of hidden-word"))
    outcome = Outcome(status="failed", progress=Progress(step=5), error="https://hidden-word@host refused")
    result = documents.result(outcome, monitor.snapshot(), num_workers=2, best_metric="accuracy")
    documents.conclude(result, monitor.snapshot())
    assert (result.error, str(result.stop_reason)) == ("https://…@host refused", "caller/enough of …")
    assert "hidden-word" not in str(monitor.snapshot()) and b"hidden-word" not in store.get(SUMMARY)


def test_stored_tags_and_notes_hold_no_secret(
    store: Store, config: ResolvedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hidden-word")
    DocumentWriter(store, num_steps=100).begin(replace(config, tag=("of hidden-word",), note="with hidden-word"))
    stored = read_config(store)
    assert (stored.tag, stored.note) == (("of …",), "with …")


def test_a_stored_request_to_stop_holds_no_secret(
    store: Store, config: ResolvedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hidden-word")
    DocumentWriter(store, num_steps=100).begin(config)
    request_stop(str(tmp_path), "first", StopReason("caller", "enough of hidden-word"))
    assert read_json(store, STOP_REQUEST)["detail"] == "enough of …"
