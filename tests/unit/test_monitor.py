"""The monitor of a run: snapshots, stop requests, resumes, and the end of the run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from raytrain.monitor.events import (
    CheckpointWritten,
    DocumentLost,
    Evaluated,
    Event,
    ImageSkipped,
    Note,
    RequestsRetried,
    StopRequested,
    StorageBack,
    StorageWaits,
)
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.snapshot import RowCursor
from raytrain.runs import metrics_history
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow, SkippedImage
from raytrain.runs.metrics_history import History, read_metrics, read_skipped
from raytrain.runs.outcome import StopReason
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from tests.helpers.snapshots import train_result
from tests.helpers.waiting import wait_for


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


@pytest.fixture
def monitor(store: Store, clock: Clock) -> RunMonitor:
    return RunMonitor("first", num_steps=100, steps_per_epoch=40, history=History(store), clock=clock)


def step_row(step: int, loss: float = 1.0) -> MetricRow:
    return MetricRow(
        kind="step",
        step=step,
        epoch=1,
        samples_seen=8 * step,
        learning_rate=0.1,
        images_per_s=100.0,
        data_wait_fraction=0.0,
        metrics={"loss": loss, "accuracy": 0.5},
    )


def evaluation_row(step: int) -> MetricRow:
    return MetricRow(kind="evaluation", step=step, epoch=1, metrics={"loss": 0.75, "accuracy": 0.625})


def events_of(monitor: RunMonitor) -> list[Event]:
    return [event for _, _, event in monitor.snapshot().events]


def test_time_counts_from_when_the_user_started_the_run(store: Store, clock: Clock) -> None:
    def new() -> RunMonitor:
        started_at = clock.now_s - 20  # the monitor comes after the cluster
        return RunMonitor("first", 100, 40, History(store), clock=clock, started_at=started_at)

    monitor = new()
    assert monitor.snapshot().elapsed_s == 20 and monitor.snapshot().startup_s is None
    clock.now_s += 15
    monitor.note_start(num_workers=2, step=0)
    clock.now_s += 5
    monitor.record(step_row(8))
    assert monitor.snapshot().elapsed_s == 40 and monitor.snapshot().startup_s == 35
    monitor.note_start(num_workers=2, step=0)  # after a failure: the start-up is over
    assert monitor.snapshot().elapsed_s == 40 and monitor.snapshot().startup_s == 35
    monitor.record(step_row(8))
    monitor.finish("stopped")

    resumed = new()
    clock.now_s += 10
    resumed.note_start(num_workers=1, step=8)
    assert resumed.snapshot().startup_s == 30
    assert resumed.snapshot().elapsed_s == 70, "both lives of the run, with both starts"


def test_a_snapshot_has_the_state_of_the_run(monitor: RunMonitor, clock: Clock) -> None:
    assert monitor.snapshot().status == "starting"
    monitor.note_start(num_workers=2, step=0)
    clock.now_s += 10
    monitor.record(step_row(40))
    monitor.record(evaluation_row(40))
    clock.now_s += 5
    monitor.record(step_row(41))
    snapshot = monitor.snapshot()
    assert (snapshot.name, snapshot.status, snapshot.num_workers) == ("first", "running", 2)
    assert (snapshot.step, snapshot.num_steps, snapshot.epoch, snapshot.num_epochs) == (41, 100, 2, 3)
    assert snapshot.latest is not None
    assert snapshot.latest.step == 41
    assert snapshot.evaluation is not None
    assert snapshot.evaluation.accuracy == 0.625
    assert snapshot.elapsed_s == 15
    assert [row.elapsed_s for row in snapshot.rows] == [10, 10, 15]
    assert Evaluated(epoch=1, accuracy=0.625, loss=0.75) in events_of(monitor)


def test_custom_metrics_of_a_loop_are_kept(monitor: RunMonitor) -> None:
    monitor.record(MetricRow(kind="step", step=1, epoch=1, metrics={"generator_loss": 0.5}))
    monitor.record(MetricRow(kind="evaluation", step=1, epoch=1, metrics={"recall": 0.25}))
    assert [row.metrics for row in monitor.snapshot().rows] == [{"generator_loss": 0.5}, {"recall": 0.25}]


def test_the_time_left_is_estimated_from_the_speed_so_far(monitor: RunMonitor, clock: Clock) -> None:
    monitor.note_start(num_workers=2, step=0)
    clock.now_s += 300  # The start-up does not count.
    monitor.record(step_row(10))
    assert monitor.snapshot().time_left_s is None
    clock.now_s += 20
    monitor.record(step_row(20))
    assert monitor.snapshot().time_left_s == pytest.approx(160)
    clock.now_s += 7
    assert monitor.snapshot().time_left_s == pytest.approx(153)
    # No time is left once an evaluation has measured the last step, even if the last row of steps is older.
    monitor.record(evaluation_row(100))
    assert monitor.snapshot().time_left_s == 0


def test_the_latest_use_of_each_machine_is_kept_until_the_workers_are_others(monitor: RunMonitor) -> None:
    def use(rank: int, images_per_s: float) -> MachineUse:
        return MachineUse(rank=rank, node="n", step=7, images_per_s=images_per_s, data_wait_fraction=0.0)

    monitor.note_start(num_workers=2, step=0)
    for rank, speed in ((1, 10.0), (0, 20.0), (1, 30.0)):
        monitor.note_machine_use(use(rank, speed))
    assert [(use.rank, use.images_per_s) for use in monitor.snapshot().machines] == [(0, 20.0), (1, 30.0)]
    assert monitor.snapshot().step == 7  # before the first row, too
    monitor.note_start(num_workers=1, step=0)
    assert monitor.snapshot().machines == ()


def test_a_viewer_gets_only_new_rows(monitor: RunMonitor) -> None:
    monitor.note_start(num_workers=1, step=0)
    monitor.record(step_row(1))
    first = monitor.snapshot()
    monitor.record(step_row(2))
    second = monitor.snapshot(first.cursor)
    assert [row.step for row in second.rows] == [2]
    assert monitor.snapshot(second.cursor).rows == ()


def test_after_a_restart_a_viewer_has_the_same_rows_as_the_history(monitor: RunMonitor, store: Store) -> None:
    seen: list[MetricRow] = []
    cursor = RowCursor()

    def look() -> None:
        nonlocal cursor
        snapshot = monitor.snapshot(cursor)
        seen[snapshot.first_row :] = snapshot.rows
        cursor = snapshot.cursor

    monitor.note_start(num_workers=3, step=0)
    for step in (10, 20, 30):
        monitor.record(step_row(step, loss=9.0))
        look()
    monitor.note_start(num_workers=2, step=20)
    for step in (30, 40, 50):
        monitor.record(step_row(step, loss=1.0))
    look()
    monitor.finish("finished")
    assert [(row.step, row.loss) for row in seen] == [(10, 9.0), (20, 9.0), (30, 1.0), (40, 1.0), (50, 1.0)]
    assert read_metrics(store) == seen


def test_the_clock_of_a_resumed_run_goes_on_after_all_that_the_last_attempt_did(store: Store, clock: Clock) -> None:
    """The last attempt wrote its last row long before it ended, as with rare rows."""
    before = RunMonitor("first", num_steps=100, steps_per_epoch=40, history=History(store), clock=clock)
    before.note_start(num_workers=1, step=0)
    clock.now_s += 60
    before.record(step_row(10))
    clock.now_s += 90
    before.note_event(CheckpointWritten("checkpoints/step-000000018.pt", 18))
    before.finish("stopped")

    resumed = RunMonitor("first", 100, 40, History(store), clock=clock, elapsed_before_s=before.snapshot().elapsed_s)
    clock.now_s += 20
    resumed.note_start(num_workers=2, step=18)
    clock.now_s += 5
    resumed.record(step_row(20))
    snapshot = resumed.snapshot()
    assert (snapshot.startup_s, snapshot.rows[-1].elapsed_s, snapshot.elapsed_s) == (20, 175, 175)
    assert [at_s for _, at_s, _ in before.snapshot().events + snapshot.events] == [0, 150, 170]


def test_a_resumed_run_continues_its_rows_and_its_elapsed_time(monitor: RunMonitor, store: Store, clock: Clock) -> None:
    monitor.note_start(num_workers=1, step=0)
    for step in (10, 20, 30):
        clock.now_s += 60
        monitor.record(step_row(step))
    monitor.finish("stopped")

    resumed = RunMonitor("first", num_steps=100, steps_per_epoch=40, history=History(store), clock=clock)
    resumed.note_start(num_workers=2, step=20)
    snapshot = resumed.snapshot()
    assert [row.step for row in snapshot.rows] == [10, 20]
    assert snapshot.step == 20
    clock.now_s += 5
    resumed.record(step_row(30))
    assert resumed.snapshot().rows[-1].elapsed_s == 185
    resumed.finish("stopped")


def test_a_stop_request_wakes_waiting_callers_and_the_first_reason_counts(monitor: RunMonitor) -> None:
    heard: list[StopReason | None] = []
    waiting = threading.Thread(target=lambda: heard.append(monitor.wait_for_stop_request(timeout_s=30)))
    waiting.start()
    monitor.request_stop(StopReason("command", "here"))
    monitor.request_stop(StopReason("signal", "SIGINT"))
    waiting.join(timeout=60)
    assert heard == [StopReason("command", "here")]
    assert monitor.snapshot().stop_request == StopReason("command", "here")
    assert events_of(monitor) == [StopRequested(StopReason("command", "here"))]


def test_waiting_for_a_stop_request_returns_none_after_the_timeout(monitor: RunMonitor) -> None:
    assert monitor.wait_for_stop_request(timeout_s=0) is None


def test_a_run_that_has_ended_ignores_stop_requests(monitor: RunMonitor, clock: Clock) -> None:
    monitor.finish("finished")
    monitor.request_stop(StopReason("caller", "too late"))
    clock.now_s += 60
    snapshot = monitor.snapshot()
    assert (snapshot.status, snapshot.stop_request, snapshot.elapsed_s) == ("finished", None, 0)
    assert snapshot.over


def test_a_run_that_has_ended_is_at_the_step_of_its_result(monitor: RunMonitor) -> None:
    monitor.note_start(2, 0)
    monitor.record(step_row(30))
    assert monitor.snapshot().step == 30
    monitor.finish("stopped", train_result(steps=32))  # the checkpoint's: no row was due after step 30
    assert monitor.snapshot().step == 32


def test_a_run_without_a_step_is_in_no_epoch(monitor: RunMonitor) -> None:
    assert monitor.snapshot().epoch == 0
    monitor.note_start(2, 0)
    assert monitor.snapshot().epoch == 0
    monitor.record(step_row(1))
    assert monitor.snapshot().epoch == 1


def test_a_skipped_image_counts_once_and_only_the_first_is_an_event(monitor: RunMonitor, store: Store) -> None:
    monitor.note_skipped([SkippedImage("cat/a.jpg", "truncated"), SkippedImage("cat/b.jpg", "empty")])
    monitor.note_skipped([SkippedImage("cat/a.jpg", "truncated"), SkippedImage("dog/c.jpg", "empty")])
    snapshot = monitor.snapshot()
    assert snapshot.num_skipped == 3
    assert events_of(monitor) == [ImageSkipped("cat/a.jpg", "truncated")]
    monitor.finish("finished")
    assert [image.key for image in read_skipped(store)] == ["cat/a.jpg", "cat/b.jpg", "dog/c.jpg"]


def test_retries_are_counted_and_only_the_first_is_an_event(monitor: RunMonitor) -> None:
    monitor.note_retries(3)
    monitor.note_retries(4)
    snapshot = monitor.snapshot()
    assert snapshot.num_retries == 7
    assert events_of(monitor) == [RequestsRetried()]
    monitor.finish("finished")


def test_a_run_can_finish_although_its_history_cannot_be_written(monitor: RunMonitor, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl" / "in the way").mkdir(parents=True)
    monitor.record(step_row(1))
    monitor.finish("finished")
    snapshot = monitor.snapshot()
    assert snapshot.status == "finished"
    assert any(isinstance(event, DocumentLost) for event in events_of(monitor))


@pytest.mark.not_quick
def test_a_storage_failure_and_its_recovery_are_one_event_each(
    monitor: RunMonitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_history, "RETRY_S", 0.1)  # a real history tries again after two seconds
    in_the_way = tmp_path / "metrics.jsonl" / "in the way"
    in_the_way.mkdir(parents=True)
    monitor.record(step_row(1))
    events = until_events(monitor, 1)
    assert isinstance(events[0], StorageWaits)
    in_the_way.rmdir()
    in_the_way.parent.rmdir()
    assert until_events(monitor, 2) == [*events, StorageBack()]
    monitor.finish("finished")


def until_events(monitor: RunMonitor, num_events: int) -> list[Event]:
    wait_for(lambda: len(events_of(monitor)) >= num_events)
    return events_of(monitor)


def test_recording_from_many_threads_loses_nothing(monitor: RunMonitor, store: Store) -> None:
    monitor.note_start(num_workers=4, step=0)
    threads = [
        threading.Thread(target=lambda: [monitor.record(step_row(step)) for step in range(1, 251)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(monitor.snapshot().rows) == 1000
    monitor.finish("finished")
    assert len(read_metrics(store)) == 1000


def test_events_hold_no_secret(monitor: RunMonitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hidden-word")
    monitor.note_event(Note("https://me:hidden-too@host refused hidden-word, s3://bucket/a@b is fine"))
    monitor.request_stop(StopReason("caller", "hidden-word"))
    assert events_of(monitor) == [
        Note("https://…@host refused …, s3://bucket/a@b is fine"),
        StopRequested(StopReason("caller", "…")),
    ]
