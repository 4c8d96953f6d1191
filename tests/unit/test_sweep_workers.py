"""A sweep over numbers of workers: its trials train one after the other, and what it shows of them."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from matplotlib.lines import Line2D
from rich.console import Console

import raytrain
from raytrain import TrainConfig, UsageError
from raytrain.display.sweep import sweep_figure, sweep_page
from raytrain.experiments import sweep as sweep_module
from raytrain.experiments import trial_run
from raytrain.experiments.sweep_result import SweepResult, SweepSnapshot
from raytrain.launch.placement import Hardware
from raytrain.launch.prepare import TrainRequest
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import METRICS, SUMMARY, encode_lines, read_json, run_store, write_config
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import StopReason, TrainResult
from tests.helpers.run_records import write_summary
from tests.helpers.scaling_histories import history
from tests.helpers.small_runs import config as small_config

pytestmark = pytest.mark.timeout(120)


class Trainer:
    """Trains nothing: writes the documents of a run that each doubling of its workers makes 70 % faster.

    In the trial of ``stop_in`` workers it stops, as a run does whose sweep is asked to.
    """

    def __init__(self, stop_in: int | None = None) -> None:
        self.started: list[tuple[str | None, int, int, bool]] = []  # name, workers, batch size, whether it resumes
        self.groups: list[object] = []
        self.stop_in = stop_in
        self.signals = StopSignals()
        self._looks_since_stop = 0
        self._all_are_asked = threading.Event()

    def view(self, snapshot: SweepSnapshot) -> None:
        """Look at the sweep: it has passed a request to stop on before the second look after that."""
        self._looks_since_stop += self.signals.stop_request is not None
        if self._looks_since_stop > 1:
            self._all_are_asked.set()

    def __call__(self, config: TrainConfig, start: TrainRequest) -> TrainResult:
        workers, name = int(config.workers), config.name or ""
        assert start.view and isinstance(config.batch_size, int)
        self.started.append((name, workers, config.batch_size, config.resume))
        self.groups.append(start.group)
        store = run_store(config.storage, name)
        write_config(store, config)
        is_stopped = workers == self.stop_in
        if is_stopped:
            self.signals.request_stop(StopReason("caller", "enough"))
            self._all_are_asked.wait(60)
        reason = self.signals.stop_request if is_stopped else None
        result = write_summary(store, name, 30, 3, stop_reason=reason, num_workers=workers, validation_accuracy=0.9)
        monitor = RunMonitor(name, 30, 10, History(store))
        monitor.note_start(workers, 0)
        monitor.finish("stopped" if result.stop_reason else "finished", result)
        if not is_stopped:
            rows = history(1000 * 1.7 ** (workers.bit_length() - 1), [0.5, 0.8, 0.9])
            store.put(METRICS, encode_lines(row.to_json() for row in rows))
        start.view(monitor.snapshot())
        return result


@pytest.fixture
def swept(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SweepResult]:
    """A sweep over numbers of workers by a trainer, on a machine of 16 CPUs."""
    found = Hardware(num_nodes=1, cpus=16.0, gpus=0.0, object_store_bytes=10**9)
    monkeypatch.setattr(sweep_module, "open_machines", lambda _: nullcontext(lambda: found))

    def sweep(trainer: Trainer, vary: str = "workers=1,2,4", **more: Any) -> SweepResult:
        monkeypatch.setattr(trial_run, "start_run", trainer)
        target = more.pop("target", None)
        measured = {
            "mean": (0.5, 0.5, 0.5),
            "std": (0.2, 0.2, 0.2),
        }  # so that no process decodes images to measure them
        base = {"name": "sizes", "backend": "local", "workers": "auto", "batch_size": "8/worker"}
        options = small_config(images, tmp_path / "runs", **{**base, **measured, **more})
        words = [] if options.resume else vary.split()
        return raytrain.sweep(options, vary=words, target=target, view=trainer.view, signals=trainer.signals)

    return sweep


def test_trials_train_one_after_the_other_each_alone_on_its_workers(swept: Callable[..., SweepResult]) -> None:
    trainer = Trainer()
    result = swept(trainer, learning_rate="0.1/worker")
    assert trainer.started == [("sizes-00", 1, 8, False), ("sizes-01", 2, 16, False), ("sizes-02", 4, 32, False)]
    assert trainer.groups == [None, None, None], "each reads its own images, as its speed counts"
    (scaling,) = result.scaling
    assert [size.learning_rate for size in scaling.sizes] == pytest.approx([0.1, 0.2, 0.4])
    assert [size.images_per_s for size in scaling.sizes] == pytest.approx([1000, 1700, 2890])
    assert (scaling.values, scaling.images_per_s_gain) == ({}, pytest.approx(0.7))
    assert scaling.target == pytest.approx(0.855)


def test_each_choice_of_the_other_options_scales_by_itself_to_the_same_accuracy(
    swept: Callable[..., SweepResult],
) -> None:
    trainer = Trainer()
    result = swept(trainer, "workers=1,2 batch-size=8/worker,16", target=0.8)
    assert [started[1:3] for started in trainer.started] == [(1, 8), (1, 16), (2, 16), (2, 16)]
    assert [scaling.values for scaling in result.scaling] == [{"batch_size": "8/worker"}, {"batch_size": 16}]
    assert [[size.run for size in scaling.sizes] for scaling in result.scaling] == [
        ["sizes-00", "sizes-02"],
        ["sizes-01", "sizes-03"],
    ]
    assert {scaling.target for scaling in result.scaling} == {0.8}
    page = seen(result)
    assert "Per doubling of the workers with batch-size=8/worker: images/s +70%" in page
    over_time, over_workers = sweep_figure(result).axes
    assert [label.split("  ")[:2] for label in labels(over_time.get_lines())] == [
        ["1 worker", "batch-size=8/worker"],
        ["2 workers", "batch-size=8/worker"],
        ["1 worker", "batch-size=16"],
        ["2 workers", "batch-size=16"],
    ]
    assert labels(over_workers.get_lines()) == [
        "linear scaling",
        "batch-size=8/worker (gain per doubling)",
        "batch-size=16 (gain per doubling)",
    ]


def test_a_resumed_sweep_trains_nothing_twice_and_compares_all(swept: Callable[..., SweepResult]) -> None:
    first = swept(Trainer(stop_in=2))
    assert (first.status, sorted((trial.name, trial.status) for trial in first.trials)) == (
        "stopped",
        [("sizes-00", "finished"), ("sizes-01", "stopped"), ("sizes-02", "waiting")],
    )
    assert [size.images_per_s for size in first.scaling[0].sizes] == [1000, None, None]
    assert "Per doubling" not in seen(first) and "raytrain sweep --name sizes" in seen(first)
    again = Trainer()
    result = swept(again, resume=True)
    assert [(name, resumes) for name, _, _, resumes in again.started] == [("sizes-01", True), ("sizes-02", False)]
    assert (result.status, result.scaling[0].images_per_s_gain) == ("finished", pytest.approx(0.7))
    nothing_left = Trainer()
    assert swept(nothing_left, resume=True).scaling == result.scaling
    assert nothing_left.started == []


def test_a_trial_that_was_finished_elsewhere_needs_no_room_here(
    swept: Callable[..., SweepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    swept(Trainer(stop_in=1), "workers=16,1")
    one_cpu = Hardware(num_nodes=1, cpus=1.0, gpus=0.0, object_store_bytes=10**9)
    monkeypatch.setattr(sweep_module, "open_machines", lambda _: nullcontext(lambda: one_cpu))
    trainer = Trainer()
    assert swept(trainer, resume=True).status == "finished"
    assert [name for name, *_ in trainer.started] == ["sizes-01"]


@pytest.mark.parametrize(
    ("vary", "more", "sentence"),
    [
        ("workers=1,65", {}, "--workers is 65, and this machine has 16 CPUs; ask for at most 64"),
        ("workers=0,1", {}, "--workers is 0"),
        ("workers=auto", {}, "'auto' is not a whole number"),
        ("workers=1,2", {"workers": 2}, "omit --workers and --worker-load"),
        ("workers=1,2", {"target": 95}, "--target is 95; it is a value of accuracy, above 0 and at most 1"),
        (
            "workers=1,2",
            {"target": float("inf"), "best": "loss"},
            "--target is inf; it is a value of loss, above 0 and f",
        ),
        ("seed=1,2", {"target": 0.5}, "--target is 0.5; .*such as --vary workers=1,2,4"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    swept: Callable[..., SweepResult], vary: str, more: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    trainer = Trainer()
    with pytest.raises(UsageError, match=sentence):
        swept(trainer, vary, **more)
    assert trainer.started == []
    assert not list((tmp_path / "runs").glob("sizes-*"))


def seen(result: SweepResult, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(sweep_page(result, small_config(Path("images"), Path("runs"), name="sizes"), "sizes.png"))
    return console.export_text()


def labels(lines: list[Line2D]) -> list[str]:
    return [label for line in lines if not (label := str(line.get_label())).startswith("_")]


def test_the_page_has_the_figures_of_each_size_and_what_a_doubling_gives(swept: Callable[..., SweepResult]) -> None:
    page = seen(swept(Trainer(), learning_rate="0.1/worker"))
    rows = [line.split() for line in page.splitlines()]
    assert ["1", "8", "0.1", "1,000", "–", "00:00:02", "–", "0.9000"] in rows
    assert ["2", "16", "0.2", "1,700", "+70%", "00:00:01", "-41%", "0.9000"] in rows
    assert "Per doubling of the workers: images/s +70%, time to an accuracy of 0.855 -41%." in page
    assert "The final accuracies lie within 0.0 percentage points." in page
    assert "━ on 1 0.900" in page and "━ on 4 0.900" in page and "● measured 2,890" in page


def test_the_picture_has_both_figures(swept: Callable[..., SweepResult]) -> None:
    over_time, over_workers = sweep_figure(swept(Trainer())).axes
    tested = [line for line in over_time.get_lines() if "worker" in str(line.get_label())]
    assert labels(tested) == ["1 worker   00:00:02", "2 workers   00:00:01", "4 workers   00:00:00"]
    assert list(tested[0].get_xdata()) == pytest.approx([1, 2, 3])  # pyright: ignore
    assert [list(line.get_ydata()) for line in tested] == [[0.5, 0.8, 0.9]] * 3  # pyright: ignore
    in_proportion, measured = over_workers.get_lines()
    assert list(measured.get_ydata()) == pytest.approx([1000, 1700, 2890])  # pyright: ignore
    assert list(in_proportion.get_ydata()) == pytest.approx([1000, 2000, 4000])  # pyright: ignore
    assert [text.get_text() for text in over_workers.texts] == ["1,000", "1,700 (+70%)", "2,890 (+70%)"]
    assert [panel.get_title(loc="right") for panel in (over_time, over_workers)] == [
        "-41% per doubling of the workers",
        "+70% per doubling of the workers",
    ]


def test_the_summary_has_the_scaling_and_not_the_histories(swept: Callable[..., SweepResult], tmp_path: Path) -> None:
    result = swept(Trainer())
    summary = read_json(run_store(str(tmp_path / "runs"), "sizes"), SUMMARY)
    assert summary == json.loads(json.dumps(result.summary()))
    assert [size["workers"] for size in summary["scaling"][0]["sizes"]] == [1, 2, 4]
    assert "histories" not in summary and dataclasses.replace(result, histories={}).summary() == result.summary()


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("sweep --vary workers=1,2 --vary seed=0,0", "seed=0 and workers=1 seed=0 result in the same options"),
        ("sweep --vary workers=1,2 batch-size=x/worker", "--batch-size is 'x/worker'; give a number of images"),
        ("sweep --vary workers=1,2 --workers 2", "omit --workers and --worker-load"),
        ("sweep --vary workers=1,2 --target 95", "--target is 95; it is a value of accuracy"),
        ("study --workers 1 2", "There is no command 'study'"),
    ],
)
def test_the_command_refuses_in_one_sentence(words: str, sentence: str, images: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "raytrain", *words.split(), "--data", str(images), "--image-size", "16"]
    if words.startswith("sweep"):
        command += ["--learning-rate", "0.1", "--backend", "local"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.glob("runs/*")) == []
