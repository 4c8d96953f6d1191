"""Trackers get every row once, in whatever state they and the run are, and hurt neither the run nor each other."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.errors import RaytrainError, UsageError
from raytrain.monitor.events import TrackerFailed
from raytrain.runs.documents import METRICS, SWEEP, run_store, write_config, write_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import StopReason
from raytrain.runs.status import RunStatus, write_status
from raytrain.storage.store import Store
from raytrain.trackers.open_trackers import open_trackers
from raytrain.trackers.tracker import TrackedRun, Tracker, hyperparams, metric_name, row_metrics
from raytrain.trackers.tracker_threads import TrackerThread, Tracking, gather_s
from tests.helpers.tracked_runs import Recorder, evaluation_row, options, result, snapshot, step_rows, tracked


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return run_store(str(tmp_path), "first")


def stored_run(storage: Path, rows: list[MetricRow], status: str = "finished", name: str = "first") -> Store:
    store = run_store(str(storage), name)
    write_config(store, options())
    write_status(store, RunStatus(status=status, step=10, num_steps=10))
    store.put(METRICS, b"".join(json.dumps(row.to_json()).encode() + b"\n" for row in rows))
    return store


def test_a_tracker_gets_the_options_every_row_and_the_end(store: Store) -> None:
    recorder = Recorder()
    rows = [*step_rows(1, 3, accuracy=0.25), evaluation_row(3)]
    assert tracked(store, [recorder], rows) == []
    assert recorder.params["learning_rate"] == 0.01
    assert recorder.params["image_size"] == "28 28"
    assert recorder.rows[0] == (
        1,
        {"train/loss": 1.0, "train/accuracy": 0.25, "learning_rate": 0.1, "epoch": 1.0, "elapsed_s": 0.0},
    )
    assert recorder.rows[-1] == (3, {"validation/accuracy": 0.5, "validation/loss": 2.0})
    assert recorder.steps == [1, 2, 3]
    assert recorder.statuses == ["success"]


@pytest.mark.parametrize(("status", "told"), [("stopped", "success"), ("failed", "failed")])
def test_the_status_is_one_of_lightnings(status: str, told: str, store: Store) -> None:
    recorder = Recorder()
    tracked(store, [recorder], step_rows(1, 1), status=status)
    assert recorder.statuses == [told]


def test_a_restart_of_the_workers_sends_no_step_twice(store: Store) -> None:
    recorder = Recorder()
    tracking = Tracking(open_trackers([recorder]))
    tracking.begin(options(), store, print)
    tracking.update(snapshot([*step_rows(1, 4), evaluation_row(4)]))
    tracking.update(snapshot([*step_rows(1, 6), evaluation_row(4)]))  # the whole history again, after a failure
    tracking.finish(result(store))
    assert recorder.steps == [1, 2, 3, 4, 5, 6]
    assert len(recorder.rows) == 7


def test_the_test_images_are_sent_although_the_last_evaluation_comes_after_the_same_step(store: Store) -> None:
    recorder = Recorder()
    test_row = MetricRow(kind="test", step=2, epoch=1, metrics={"accuracy": 0.4})
    tracked(store, [recorder], [*step_rows(1, 2), evaluation_row(2), test_row])
    assert recorder.rows[-1] == (2, {"test/accuracy": 0.4})
    again = Recorder()
    tracked(store, [again], [test_row])
    assert again.rows == []


def test_rows_that_come_before_the_documents_of_the_run_are_sent_too(store: Store) -> None:
    recorder = Recorder()
    tracking = Tracking(open_trackers([recorder]))
    tracking.update(snapshot(step_rows(1, 2)))
    tracking.update(snapshot(step_rows(3, 3)))
    tracking.begin(options(), store, print)
    tracking.update(snapshot(step_rows(4, 5)))
    tracking.finish(result(store))
    assert recorder.steps == [1, 2, 3, 4, 5]


def test_a_run_that_is_aborted_before_its_documents_opens_no_tracker(store: Store) -> None:
    recorder = Recorder()
    tracking = Tracking(open_trackers([recorder]))
    tracking.update(snapshot(step_rows(1, 2)))
    tracking.abort()
    tracking.begin(options(), store, print)
    tracking.finish(result(store))
    assert recorder.params == {} and recorder.statuses == []


def test_a_resumed_run_goes_on_after_what_was_sent_under_the_same_id(store: Store) -> None:
    class Numbered(Recorder):
        run_id = "17"

    first, second, seen = Numbered(), Recorder(), []
    tracked(store, [first], step_rows(1, 5))

    def make(run: Any) -> Tracker:
        seen.append(run.id)
        return second

    named = [replace(open_trackers([first])[0], make=make)]
    tracking = Tracking(named)
    tracking.begin(options(), store, print)
    tracking.update(snapshot(step_rows(1, 8)))
    tracking.finish(result(store))
    assert seen == ["17"]
    assert second.steps == [6, 7, 8]


def test_the_position_is_written_before_the_rows_are_sent_so_that_a_kill_repeats_none(store: Store) -> None:
    class Looking(Recorder):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            [document] = [json.loads(store.get(found.path)) for found in store.list("trackers")]
            assert document["step"] >= step
            super().log_metrics(metrics, step)

    looking = Looking()
    assert tracked(store, [looking], step_rows(1, 5)) == []
    assert looking.steps == [1, 2, 3, 4, 5]


class Failing(Recorder):
    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if step == 4:
            raise OSError("http://me:hidden-password@host refused, token hidden-token")
        super().log_metrics(metrics, step)


def test_a_tracker_that_fails_is_reported_once_without_secrets(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hidden-token")
    failing, other = Failing(), Recorder()
    [report] = tracked(store, [failing, other], step_rows(1, 9))
    assert report == "failed (http://…@host refused, token …)"
    assert other.steps == list(range(1, 10))


def test_of_a_long_error_of_a_tracker_the_beginning_and_the_end_are_reported(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As MLflow's of a folder, whose last words name the variable to set; a secret is replaced before it is cut."""
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "hidden-token")

    class Refusing(Recorder):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            raise OSError(f"no folders: {'x' * 130} hidden-token {'y' * 400} set MLFLOW_ALLOW_FILE_STORE=true")

    [report] = tracked(store, [Refusing()], step_rows(1, 2))
    assert report.startswith("failed (no folders: xxx") and report.endswith("yyy set MLFLOW_ALLOW_FILE_STORE=true)")
    assert len(report) < 330 and "hidden" not in report


def test_what_a_failed_tracker_lacks_is_sent_when_the_run_is_over(tmp_path: Path) -> None:
    store = stored_run(tmp_path, step_rows(1, 9))
    failing = Failing()
    tracked(store, [failing], step_rows(1, 9))
    assert failing.steps == [1, 2, 3]
    later = type("Failing", (Recorder,), {})()
    raytrain.track("first", [later], storage=str(tmp_path))
    assert later.steps == [4, 5, 6, 7, 8, 9]
    assert raytrain.track("first", [later], storage=str(tmp_path)).rows == 9
    assert later.steps == [4, 5, 6, 7, 8, 9]


def test_a_tracker_that_has_failed_is_told_the_end_when_the_run_ends(store: Store) -> None:
    failing, told = Failing(), threading.Event()
    tracking = Tracking(open_trackers([failing]))
    tracking.begin(options(), store, lambda event: told.set() if isinstance(event, TrackerFailed) else None)
    tracking.update(snapshot(step_rows(1, 4)))
    assert told.wait(60) and failing.statuses == [], "the run goes on"
    tracking.update(snapshot(step_rows(5, 6)))
    tracking.finish(result(store))
    assert failing.statuses == ["success"]


def test_a_tracker_that_fails_at_the_end_is_told_it_once(store: Store) -> None:
    class FailingAtEnd(Recorder):
        def finalize(self, status: Any) -> None:
            super().finalize(status)
            raise RuntimeError("The server is gone.")

    failing = FailingAtEnd()
    assert len(tracked(store, [failing], step_rows(1, 3))) == 1
    assert failing.statuses == ["success"]


class Hanging(Recorder):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.released = threading.Event()
        setattr(self, where, lambda *_: self.released.wait())


@pytest.mark.parametrize("where", ["log_hyperparams", "log_metrics", "finalize"])
def test_a_tracker_that_hangs_holds_up_nobody(where: str, store: Store) -> None:
    hanging, other = Hanging(where), Recorder()
    reports = tracked(store, [hanging, other], step_rows(1, 5), end_within_s=0.2)
    assert len(reports) == 1
    assert reports[0].startswith("has not finished within")
    hanging.released.set()


def test_a_tracker_that_hangs_in_a_long_run_is_reported_once(store: Store) -> None:
    hanging, now, reports = Hanging("log_hyperparams"), [0.0], []
    thread = TrackerThread(open_trackers([hanging])[0], TrackedRun("first", store), {}, reports.append, lambda: now[0])
    thread.check_alive()
    assert reports == []
    now[0] = 61.0
    thread.check_alive()
    thread.check_alive()
    assert len(reports) == 1
    assert reports[0].reason == "has not answered for 60 s"
    hanging.released.set()


def test_the_last_checkpoint_goes_to_trackers_with_a_place_for_it_once(store: Store) -> None:
    class Keeping(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.networks: list[bytes] = []

        def log_network(self, file: str) -> None:
            self.networks.append(Path(file).read_bytes())

    store.put("checkpoints/step-000000009.pt", b"weights")
    keeping = Keeping()
    for _ in range(2):
        assert tracked(store, [keeping], step_rows(1, 9), checkpoint="checkpoints/step-000000009.pt") == []
    assert keeping.networks == [b"weights"]


def test_numbers_that_are_not_finite_arrive(store: Store) -> None:
    recorder = Recorder()
    rows = [MetricRow(kind="step", step=1, epoch=1, metrics={"loss": math.nan, "a": math.inf, "b": None})]
    tracked(store, [recorder], rows)
    metrics = recorder.rows[0][1]
    assert math.isnan(metrics["train/loss"])
    assert math.isinf(metrics["train/a"])
    assert math.isnan(metrics["train/b"])


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("train/loss", "train/loss"),
        ("\x1b[2J<b>x</b>", "__2J_b_x_/b_"),
        ("../../etc", "etc"),
        ("", "_"),
        ("a//b/", "a/b"),
        ("x" * 300, "x" * 250),
        ("x" * 249 + "/y", "x" * 249),  # MLflow refuses a name that ends so
    ],
)
def test_names_of_metrics_are_harmless(name: str, sent: str) -> None:
    assert metric_name(name) == sent


def test_options_hold_no_control_characters() -> None:
    assert hyperparams(options(model="a\x1b[2Jb"))["model"] == "a␛[2Jb"


def test_a_row_of_a_stored_run_has_the_same_names() -> None:
    row = step_rows(2, 2, own=3.0)[0]
    assert row_metrics(MetricRow.from_json(row.to_json())) == row_metrics(row)


def test_trackers_are_named_by_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no tracker 'tensorbord' .did you mean tensorboard"):
        open_trackers(["tensorbord"])
    no_trackers: list[Any] = [[object()], object(), None, 5]
    for no_tracker in no_trackers:
        with pytest.raises(UsageError, match="is no tracker: it needs the methods"):
            open_trackers(no_tracker)
    assert [each.name for each in open_trackers((), "prometheus")] == ["prometheus"]
    assert [each.name for each in open_trackers(("prometheus",), Recorder())] == ["prometheus", "Recorder"]
    assert [each.name for each in open_trackers(["prometheus", Recorder(), "prometheus", Recorder()])] == [
        "prometheus",
        "Recorder",
        "Recorder#2",
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--track wandb needs wandb, .* install raytrain\[wandb\] \(`"):
        open_trackers(["wandb"])


def test_an_own_class_is_named_by_its_module(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def log_hyperparams(self, params): pass\n"
        f"    def log_metrics(self, metrics, step): open({str(tmp_path / 'log')!r}, 'a').write(f'{{step}} ')\n"
        "    def finalize(self, status): pass\n"
    )
    assert tracked(store, [f"{tmp_path}/mine.py:Mine"], step_rows(1, 3)) == []
    assert (tmp_path / "log").read_text() == "1 2 3 "


def test_what_makes_no_tracker_is_reported_with_what_a_tracker_needs(store: Store, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def nothing(): pass\ndef number(): return 5\ndef its_class(): return int\n")
    for name, made in (
        ("nothing", "nothing"),
        ("number", "5, which is no tracker"),
        ("its_class", "<class 'int'>, which"),
    ):
        [report] = tracked(store, [f"{tmp_path}/mine.py:{name}"], step_rows(1, 3))
        assert f"failed (it returned {made}" in report and "log_metrics and finalize)" in report


def test_only_a_run_that_is_over_is_sent_later(tmp_path: Path) -> None:
    stored_run(tmp_path, step_rows(1, 3), status="running")
    with pytest.raises(UsageError, match="is training"):
        raytrain.track("first", [Recorder()], storage=str(tmp_path))
    stored_run(tmp_path, step_rows(1, 5))
    with pytest.raises(RaytrainError, match="tracker Failing failed"):
        raytrain.track("first", [Failing()], storage=str(tmp_path))


@pytest.mark.not_quick
def test_a_sweep_stands_for_its_trials_which_are_shown_together(tmp_path: Path) -> None:
    sweep = stored_run(tmp_path, [], name="rates")
    write_json(sweep, SWEEP, {"vary": ["seed=0,1,2"], "points": [{"seed": number} for number in range(3)]})
    for name in ("rates-00", "rates-01", "rates-of-others", "rates-2024"):  # the third trial has not started
        stored_run(tmp_path, step_rows(1, 5), name=name)
    result = raytrain.track("rates", "tensorboard", storage=str(tmp_path))
    assert (result.rows, result.trackers) == (10, ["tensorboard"])
    assert result.places == [f"tensorboard --logdir {tmp_path}/rates/tensorboard"]
    assert {file.parent.name for file in tmp_path.rglob("events.*")} == {"rates-00", "rates-01"}
    assert raytrain.track("rates-2024", "tensorboard", storage=str(tmp_path)).places == [
        f"tensorboard --logdir {tmp_path}/rates-2024/tensorboard"
    ]
    with pytest.raises(UsageError, match="'rates' is a sweep, and an object takes one run; name trackers"):
        raytrain.track("rates", Recorder(), storage=str(tmp_path))


def test_a_tracker_that_needs_much_cpu_gets_its_rows_in_larger_groups() -> None:
    assert [gather_s(cpu_s) for cpu_s in (0.0, 0.01, 0.1, 5.0)] == [2.0, 2.0, 10.0, 30.0]


def test_a_stop_that_is_asked_for_in_a_tracker_stops_the_run(store: Store) -> None:
    class Stopped(Recorder):
        def stop_requested(self) -> bool:
            return True

    class Broken(Recorder):
        def stop_requested(self) -> bool:
            raise OSError("out of reach")

    asked: list[StopReason] = []
    has_asked = threading.Event()

    def ask_to_stop(reason: StopReason) -> None:
        asked.append(reason)
        has_asked.set()

    broken = Broken()
    tracking = Tracking(open_trackers([broken, Stopped(), Recorder()]))
    tracking.begin(options(), store, print, ask_to_stop)
    tracking.update(snapshot(step_rows(1, 3)))
    assert has_asked.wait(60)
    tracking.finish(result(store))
    assert asked == [StopReason("tracker", "Stopped")]
    assert (broken.steps, broken.statuses) == ([1, 2, 3], ["success"])
