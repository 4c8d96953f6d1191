"""The loop that sees a run to its end, with a stand-in for whoever trains it."""

from __future__ import annotations

import errno
import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrain.config import ResolvedConfig
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import CoordinatorLost, LoopFailed, NoWholeCheckpoint, StorageError, TrainingFailed, UsageError
from raytrain.launch import session as session_module
from raytrain.launch import suspicious_pictures
from raytrain.launch.coordinator import Coordinator
from raytrain.launch.prepare import PreparedRun, TrainRequest, prepare, settle_options
from raytrain.launch.session import RunSession
from raytrain.launch.train import RunHandle
from raytrain.monitor import document_writer
from raytrain.monitor.document_writer import DocumentWriter
from raytrain.monitor.events import Note
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import CONFIG, EVENTS, MANIFEST, SUMMARY, SUSPICIOUS_LABELS, read_json, run_store
from raytrain.runs.metric_row import SuspiciousLabel
from raytrain.runs.outcome import Outcome, Progress, StopReason, TrainResult
from raytrain.runs.status import RunStatus, read_status, write_status
from tests.helpers.small_runs import config
from tests.helpers.stored_histories import step_row

pytestmark = pytest.mark.not_quick  # images are decoded in a process

DONE = Outcome(status="finished", progress=Progress(step=20))
STOPPED = Outcome(status="stopped", progress=Progress(step=1))


class StandIn:
    """A launch without workers: ``train`` does what they would do, at each poll."""

    num_workers = 2
    ends_workers = True

    def __init__(self, prepared: PreparedRun, train: Callable[[Coordinator], None]) -> None:
        self.config: ResolvedConfig = prepared.resolve(2, "cpu")
        self.closed: list[bool] = []
        plan = prepared.data.plan(self.config)
        self.coordinator = Coordinator(
            prepared.name, prepared.store, num_steps=plan.num_steps, steps_per_epoch=plan.steps_per_epoch
        )
        self._train = train

    def start(self) -> Coordinator:
        return self.coordinator

    def poll(self, snapshot: Snapshot) -> None:
        self._train(self.coordinator)

    def wait(self, timeout_s: float) -> bool:
        self.coordinator.wait_for_end(0.01)
        return False

    def failure(self) -> str | None:
        return None

    def end_workers(self) -> None: ...

    def close(self, *, finished: bool) -> None:
        self.closed.append(finished)


@contextmanager
def session(
    images: Path,
    storage: Path,
    train: Callable[[Coordinator], None],
    signals: StopSignals | None = None,
    loop: Callable[..., None] | None = None,
    **options: Any,
) -> Iterator[tuple[RunSession, StandIn]]:
    wanted = settle_options(config(images, storage, precision="float32", **options))
    with prepare(wanted, TrainRequest(signals=signals or StopSignals(), loop=loop)) as prepared:
        launch = StandIn(prepared, train)
        with RunSession(prepared, launch) as opened:
            yield opened, launch


def run(images: Path, storage: Path, train: Callable[[Coordinator], None], signals: StopSignals) -> TrainResult:
    with session(images, storage, train, signals) as (opened, _):
        return opened.watch()


def train_until_stopped(coordinator: Coordinator) -> None:
    """Report the start, and end as soon as a stop has been requested."""
    coordinator.note_checked()
    if coordinator.snapshot().status == "starting":
        coordinator.note_start(2, 0)
    elif coordinator.wait_for_stop_request(0.0) is not None:
        coordinator.conclude(STOPPED)


def test_a_run_is_written_down_once_its_workers_have_checked_it_and_then_its_end(images: Path, tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "run")
    steps: list[Callable[[Coordinator], None]] = [lambda run: run.note_checked(), lambda run: run.note_start(2, 0)]

    def train(coordinator: Coordinator) -> None:
        if steps:
            assert not store.exists(CONFIG) or len(steps) == 1
            steps.pop(0)(coordinator)
        elif store.exists(CONFIG):
            coordinator.conclude(DONE)

    with session(images, tmp_path, train) as (opened, launch):
        assert opened.watch().status == "finished"
    assert launch.closed == [True]
    assert (read_status(store).status, read_json(store, SUMMARY)["steps"]) == ("finished", 20)


def test_a_long_start_says_what_it_waits_for(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "LONG_START_S", 0.05)
    caplog.set_level(logging.INFO, "raytrain")

    def train(coordinator: Coordinator) -> None:
        starting = caplog.text.count("the workers start, and import torch")
        if "run the loop up to its first batch" in caplog.text:
            assert starting == 2
            coordinator.note_start(2, 0)
            coordinator.conclude(DONE)
        elif starting:
            # On Ray, the driver itself finds that the options fit, before the workers run the loop.
            coordinator.note_checked(starting == 2)

    assert run(images, tmp_path, train, StopSignals()).status == "finished"


def test_a_stop_before_the_workers_train_ends_the_run_at_once(images: Path, tmp_path: Path) -> None:
    signals = StopSignals()
    signals.request_stop(StopReason("signal", "SIGTERM"))

    def never(coordinator: Coordinator) -> None:
        pytest.fail("the workers trained")

    result = run(images, tmp_path, never, signals)
    assert (result.status, result.steps, result.stop_reason) == ("stopped", 0, StopReason("signal", "SIGTERM"))
    assert read_status(run_store(str(tmp_path), "run")).status == "stopped"


def test_a_stop_of_a_run_that_trains_goes_to_its_workers(images: Path, tmp_path: Path) -> None:
    signals = StopSignals()

    def train(coordinator: Coordinator) -> None:
        train_until_stopped(coordinator)
        signals.request_stop(StopReason("page", "here"))

    assert run(images, tmp_path, train, signals).stop_reason == StopReason("page", "here")


def test_a_run_that_has_cost_its_limit_stops_and_says_so(images: Path, tmp_path: Path) -> None:
    with session(images, tmp_path, train_until_stopped, price=("1000000",), max_cost=0.001) as (opened, _):
        result = opened.watch()
    assert result.stop_reason is not None and result.stop_reason.kind == "cost"
    assert result.dollars is not None and result.dollars >= 0.001
    status = read_status(run_store(str(tmp_path), "run"))
    assert (status.status, status.dollars) == ("stopped", result.dollars)


def test_a_run_that_this_process_starts_again_counts_each_hour_once(images: Path, tmp_path: Path) -> None:
    started_at = time.monotonic() - 3600  # the first attempt has lasted for an hour, which the status has
    with session(images, tmp_path, train_until_stopped, price=("2",)) as (_, launch):
        store = run_store(str(tmp_path), "run")
        DocumentWriter(store, num_steps=20).begin(launch.config)
        write_status(store, RunStatus(status="failed", step=1, dollars=2.0, elapsed_s=3600.0))
    wanted = settle_options(config(images, tmp_path, resume=True, price=("2",), precision="float32"))
    request = TrainRequest(restarting=True, started_at=started_at, signals=StopSignals())
    request.signals.request_stop(StopReason("signal", "SIGINT"))
    with prepare(wanted, request) as prepared, RunSession(prepared, StandIn(prepared, train_until_stopped)) as again:
        assert again.watch().dollars == pytest.approx(2.0, abs=0.1)


def test_the_images_whose_labels_look_wrong_are_written_with_their_pictures(images: Path, tmp_path: Path) -> None:
    def train(coordinator: Coordinator) -> None:
        coordinator.note_checked()
        coordinator.replace_suspicious_labels([SuspiciousLabel(5, 2, -1.5, 2.0, 1), SuspiciousLabel(0, 2, 0.5, 0.1, 2)])
        coordinator.conclude(DONE)

    with session(images, tmp_path, train) as (opened, _):
        opened.watch()
    store = run_store(str(tmp_path), "run")
    first, second = read_json(store, SUSPICIOUS_LABELS)["labels"]
    keys = Manifest.from_parquet(store.get(MANIFEST)).keys.to_pylist()
    assert (first["key"], first["suggested"], first["margin"]) == (keys[5], "green", -1.5)
    assert second["image"].startswith("data:image/png;base64,") and second["label"] == keys[0].partition("/")[0]


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("no process starts")])
def test_pictures_that_cannot_be_made_cost_no_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    def train(coordinator: Coordinator) -> None:
        coordinator.note_checked()
        coordinator.replace_suspicious_labels([SuspiciousLabel(5, 2, -1.5, 2.0, 1)])
        coordinator.conclude(DONE)

    # A process without descriptors would fail at many other places, too.
    monkeypatch.setattr(suspicious_pictures, "read_training_pictures", fail)
    with session(images, tmp_path, train) as (opened, _):
        assert opened.watch().status == "finished"
    store = run_store(str(tmp_path), "run")
    assert not store.exists(SUSPICIOUS_LABELS) and read_status(store).status == "finished"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), BrokenPipeError(), SystemExit(1)])
def test_a_view_whose_terminal_is_closed_costs_no_checkpoint(
    images: Path, tmp_path: Path, error: BaseException
) -> None:
    signals = StopSignals()

    def view(snapshot: Snapshot) -> None:
        signals.request_stop(StopReason("signal", "SIGHUP"))
        raise error

    wanted = settle_options(config(images, tmp_path, precision="float32"))
    with (
        prepare(wanted, TrainRequest(signals=signals, view=view)) as prepared,
        RunSession(prepared, StandIn(prepared, train_until_stopped)) as opened,
    ):
        assert opened.watch().stop_reason == StopReason("signal", "SIGHUP")


def test_storage_that_hangs_holds_up_neither_a_stop_nor_the_views(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, free = StopSignals(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        assert free.wait(60)

    # Storage that hangs with everything else would not let the run begin.
    monkeypatch.setattr(document_writer, "write_status", hang)

    def train(coordinator: Coordinator) -> None:
        coordinator.note_checked()
        if coordinator.snapshot().status == "starting":
            coordinator.note_start(2, 0)
        signals.request_stop(StopReason("caller", "enough"))
        if coordinator.wait_for_stop_request(0.0) is not None:  # and storage still hangs
            free.set()
            coordinator.conclude(STOPPED)

    assert run(images, tmp_path, train, signals).status == "stopped"


def test_an_error_before_the_run_is_written_down_is_raised_as_it_is_and_leaves_no_run(
    images: Path, tmp_path: Path
) -> None:
    def give_up(coordinator: Coordinator) -> None:
        coordinator.give_up(UsageError("--model is wrong."))

    with pytest.raises(UsageError, match="--model is wrong"):
        run(images, tmp_path, give_up, StopSignals())
    assert not run_store(str(tmp_path), "run").exists(CONFIG)


def test_an_error_of_a_run_that_trains_and_what_only_the_monitor_knows_fail_it(images: Path, tmp_path: Path) -> None:
    def train(coordinator: Coordinator) -> None:
        coordinator.note_checked()
        coordinator.note_start(2, 0)
        coordinator.give_up(UsageError("the loop is wrong."))

    with session(images, tmp_path, train) as (opened, launch), pytest.raises(TrainingFailed, match="the loop is wrong"):
        opened.watch()
    assert launch.closed == [False]


def test_a_loop_that_fails_after_steps_may_start_again_until_it_fails_in_the_same_way(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = LoopFailed("its loop failed after step 3: ValueError: odd.", restart_may_help=True)
    caplog.set_level(logging.DEBUG, "raytrain")
    with session(images, tmp_path, lambda _: None) as (opened, launch):
        coordinator = launch.coordinator
        coordinator.note_start(2, 0)
        assert [coordinator.give_up(later) for _ in range(2)] == [False, False], "of the two workers"
        coordinator.note_lost_workers({})
        assert coordinator.ending().lost == str(later)
        coordinator.note_start(2, 0)
        assert not coordinator.give_up(
            LoopFailed("its loop failed after step 5: ValueError: odd.", restart_may_help=True)
        )
        coordinator.note_checked()
        assert coordinator.give_up(later, "the trace")
        with pytest.raises(TrainingFailed, match="failed after step 3"):
            opened.watch()
    assert caplog.text.count("the trace") == 1


@pytest.mark.parametrize(
    ("steps", "advice"),
    [
        (0, "It has made no step, and nothing is kept: start it again in the same way once the reason is gone"),
        (1, "It has no checkpoint yet: start it again with {}"),
    ],
)
@pytest.mark.parametrize(
    ("loop", "how"),
    [
        (print, "raytrain.train, the same loop, name='run' and resume=True"),
        (None, "raytrain train --name run --storage {}"),
    ],
)
def test_a_run_that_failed_says_how_to_go_on_and_names_no_command_that_would_train_another_loop(
    images: Path, tmp_path: Path, steps: int, advice: str, loop: Callable[..., None] | None, how: str
) -> None:
    def give_up(coordinator: Coordinator) -> None:
        coordinator.note_checked()
        coordinator.note_start(2, 0)
        for step in range(1, steps + 1):
            coordinator.record(step_row(step))
        coordinator.give_up(LoopFailed("its loop failed.", restart_may_help=False))

    with session(images, tmp_path, give_up, loop=loop) as (opened, _), pytest.raises(TrainingFailed) as raised:
        opened.watch()
    sentence = str(raised.value).replace("uv run ", "")  # as raytrain was started
    assert f"its loop failed. {advice.format(how.format(tmp_path))}" in sentence
    assert ("resum" in str(raised.value)) == bool(steps)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_to_be_resumed(images: Path, tmp_path: Path) -> None:
    def train(coordinator: Coordinator) -> None:
        coordinator.note_checked()
        coordinator.give_up(NoWholeCheckpoint("All are damaged; start a new run."))

    with session(images, tmp_path, train) as (opened, _), pytest.raises(TrainingFailed) as raised:
        opened.watch()
    assert str(raised.value) == "Run 'run' failed: All are damaged; start a new run."


def test_workers_that_end_without_a_word_fail_the_run_with_what_is_known(images: Path, tmp_path: Path) -> None:
    def train(coordinator: Coordinator) -> None:
        coordinator.note_checked()
        coordinator.note_start(2, 0)
        coordinator.note_lost_workers({1: "was killed by SIGKILL"})

    with session(images, tmp_path, train) as (opened, launch):
        launch.wait = lambda timeout_s: launch.coordinator.ending().lost is not None  # pyright: ignore
        with pytest.raises(TrainingFailed, match="worker 1 was killed by SIGKILL"):
            opened.watch()


def test_a_lost_coordinator_leaves_a_run_that_starts_again(images: Path, tmp_path: Path) -> None:
    lost = CoordinatorLost("The process has died.", "run", str(tmp_path / "run"))

    def train(coordinator: Coordinator) -> None:
        coordinator.note_checked()
        if run_store(str(tmp_path), "run").exists(CONFIG):
            raise lost

    with pytest.raises(CoordinatorLost):
        run(images, tmp_path, train, StopSignals())
    assert read_status(run_store(str(tmp_path), "run")).status == "starting"


def test_a_result_that_is_not_there_in_time_is_a_timeout_and_can_be_waited_for_again(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, ended = threading.Event(), object()
    launch = importlib.import_module("raytrain.launch.train")
    monkeypatch.setattr(launch, "train", lambda *_, **__: may_end.wait() and ended)
    handle = launch.RunHandle(config(images, tmp_path), None, None)
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s; stop\(\) asks it to"):
        handle.result(0.01)
    may_end.set()
    assert handle.result() is ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_that_fails_has_a_result_even_if_its_failure_cannot_be_shown(tmp_path: Path) -> None:
    def show(error: BaseException) -> None:
        raise OSError("the notebook is closed")

    handle = RunHandle(config(tmp_path / "images", tmp_path), None, None, on_failure=show)
    with pytest.raises(StorageError, match="no folder"):
        handle.result(30)


def test_an_interrupt_while_the_end_is_written_leaves_no_run_that_seems_to_train(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DocumentWriter, "conclude", interrupt)
    signals = StopSignals()
    signals.request_stop(StopReason("signal", "SIGINT"))
    with pytest.raises(KeyboardInterrupt):
        run(images, tmp_path, train_until_stopped, signals)
    assert read_status(run_store(str(tmp_path), "run")).status == "interrupted"


def test_a_start_that_is_interrupted_leaves_no_event_behind(images: Path, tmp_path: Path) -> None:
    def train(coordinator: Coordinator) -> None:
        coordinator.note_event(Note("the first image cannot be read"))
        coordinator.flush()
        assert run_store(str(tmp_path), "run").exists(EVENTS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(images, tmp_path, train, StopSignals())
    assert list(tmp_path.iterdir()) == []
