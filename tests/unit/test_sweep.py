"""A sweep from start to end: which trials it starts, stops and resumes. Stand-ins train, so that no process starts."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import TrainConfig, UsageError
from raytrain.data.dataset import open_dataset
from raytrain.errors import TrainingFailed
from raytrain.experiments import sweep as sweep_module
from raytrain.experiments import trial_run
from raytrain.experiments.sweep_result import SweepSnapshot
from raytrain.launch.placement import Hardware
from raytrain.launch.prepare import TrainRequest
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.snapshot import View
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import (
    CLASSES,
    IMAGES,
    MANIFEST,
    METRICS,
    SUMMARY,
    VALIDATION_MANIFEST,
    read_config,
    read_json,
    run_store,
    write_config,
)
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import StopReason, TrainResult
from raytrain.runs.records import tag_run
from raytrain.runs.status import read_status
from tests.helpers.run_records import write_summary
from tests.helpers.small_runs import config as small_config
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.timeout(120)
EPOCHS = 8
Accuracy = Callable[[TrainConfig, int], float]


class Trainer:
    """Trains nothing: measures ``accuracy`` after each epoch, until the trial is over or is asked to stop."""

    def __init__(self, accuracy: Accuracy) -> None:
        self.accuracy = accuracy
        self.started: list[tuple[str | None, bool]] = []
        self.devices: list[str] = []
        self.shared: list[object] = []  # the images that each trial was given
        self.lock = threading.Lock()  # one trial after the other, so that the order is known

    def __call__(self, config: TrainConfig, start: TrainRequest) -> TrainResult:
        assert start.group and start.view
        with self.lock:
            self.shared.append(start.group.images.cache)
            return self.train(config, start.view, start.signals)

    def train(self, config: TrainConfig, view: View, signals: StopSignals) -> TrainResult:
        name = config.name or ""
        self.started.append((name, config.resume))
        self.devices.append(config.device)
        store = run_store(config.storage, name)
        write_config(store, config)
        monitor = RunMonitor(name, EPOCHS, 1, History(store))
        monitor.note_start(1, 0)
        for epoch in range(1, EPOCHS + 1):
            accuracy = self.accuracy(config, epoch)
            measured = {"accuracy": accuracy, "loss": accuracy}  # so that the lowest loss is another trial's
            row = MetricRow(kind="evaluation", step=epoch, epoch=epoch, metrics=measured)
            monitor.record(row)
            view(monitor.snapshot())
            if signals.stop_request is not None:
                break
        request = signals.stop_request
        result = write_summary(store, name, epoch, epoch, stop_reason=request)
        monitor.finish("stopped" if result.stop_reason else "finished", result)
        view(monitor.snapshot())
        return result


@pytest.fixture
def train_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Accuracy], Trainer]:
    """Has trials measure certain accuracies instead of training."""

    def use(accuracy: Accuracy) -> Trainer:
        trainer = Trainer(accuracy)
        monkeypatch.setattr(trial_run, "start_run", trainer)
        return trainer

    return use


def options(images: Path, storage: Path, **more: Any) -> TrainConfig:
    measured = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}  # so that no process decodes images to measure them
    base = {"name": "tried", "backend": "local", "workers": 1, "epochs": EPOCHS}
    return small_config(images, storage, **{**base, **measured, **more})


def by_seed(config: TrainConfig, epoch: int) -> float:
    return config.seed / 10 + epoch / 100


def test_trials_below_the_median_stop_early_and_the_best_comes_first(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer]
) -> None:
    train_with(by_seed)
    result = raytrain.sweep(options(images, tmp_path), vary=["seed=3,5,1"])
    assert [(trial.name, trial.status, trial.steps) for trial in result.trials] == [
        ("tried-01", "finished", 8),
        ("tried-00", "finished", 8),
        ("tried-02", "stopped", 1),
    ]
    assert result.trials[2].reason == StopReason("early_stopping", metric="accuracy", value=0.11, count=1)
    assert (result.status, result.best, result.trials[0].accuracy) == ("finished", "tried-01", pytest.approx(0.58))
    summary = read_json(run_store(str(tmp_path), "tried"), SUMMARY)
    assert (summary["best"], len(summary["trials"])) == ("tried-01", 3)
    assert read_status(run_store(str(tmp_path), "tried")).status == "finished"


def test_trials_are_compared_by_the_metric_of_best(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer]
) -> None:
    train_with(by_seed)
    result = raytrain.sweep(options(images, tmp_path, best="loss"), vary=["seed=3,5,1"])
    assert [(trial.name, trial.status, trial.steps) for trial in result.trials] == [
        ("tried-02", "finished", 8),
        ("tried-00", "finished", 8),
        ("tried-01", "stopped", 1),
    ]
    best = result.trials[0]
    assert (best.metric, best.value, best.accuracy) == ("loss", pytest.approx(0.11), pytest.approx(0.18))
    reason = StopReason("early_stopping", metric="loss", value=0.51, count=1)
    assert (result.best, result.trials[2].reason) == ("tried-02", reason)


def test_without_early_stopping_each_trial_trains_to_its_end(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer]
) -> None:
    train_with(by_seed)
    result = raytrain.sweep(options(images, tmp_path), vary=["seed=3,1"], early_stopping=False)
    assert {trial.status for trial in result.trials} == {"finished"}


def test_a_trial_that_cannot_even_start_fails_alone_and_says_why(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer]
) -> None:
    def accuracy(config: TrainConfig, epoch: int) -> float:
        if config.seed == 1:
            raise UsageError("The weights do not fit.")
        return 0.5

    train_with(accuracy)
    result = raytrain.sweep(options(images, tmp_path), vary=["seed=0,1"])
    assert [(trial.status, trial.reason) for trial in result.trials] == [
        ("finished", None),
        ("failed", "The weights do not fit."),
    ]
    assert result.status == "finished"


def test_a_trial_that_begins_once_its_sweep_resumes_has_a_list_of_its_images(images: Path, tmp_path: Path) -> None:
    config = options(images, tmp_path, mean=(0.5,) * 3, std=(0.2,) * 3)
    sweep, trial = (run_store(str(tmp_path), name) for name in ("tried", "tried-02"))
    open_dataset(config, sweep).write(sweep)
    resumed = open_dataset(config, sweep)  # with the images that the sweep has stored
    resumed.write(trial)
    for name in (CLASSES, IMAGES, MANIFEST, VALIDATION_MANIFEST):
        assert trial.get(name) == sweep.get(name)
    trial.put(IMAGES, b"{}")
    resumed.write(trial)
    assert trial.get(IMAGES) == b"{}", "it is written once"


@pytest.mark.not_quick
def test_a_stopped_sweep_starts_no_further_trial_and_a_resumed_one_those_that_are_not_over(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer]
) -> None:
    trainer = train_with(by_seed)
    signals = StopSignals()

    def accuracy(config: TrainConfig, epoch: int) -> float:
        if config.seed == 1:
            signals.request_stop(StopReason("caller", "enough"))
            stopped.wait(60)
        return 0.5

    stopped = threading.Event()

    def view(snapshot: SweepSnapshot) -> None:
        if signals.stop_request is not None:
            asked.append(snapshot)
            if len(asked) > 1:  # the trials were told after the first look
                stopped.set()

    asked: list[SweepSnapshot] = []
    trainer.accuracy = accuracy
    described: dict[str, Any] = {"tag": ("mine",), "note": "all"}
    first = raytrain.sweep(options(images, tmp_path, **described), vary=["seed=0,1,2"], view=view, signals=signals)
    assert {trial.name: trial.status for trial in first.trials} == {
        "tried-00": "finished",
        "tried-01": "stopped",
        "tried-02": "waiting",
    }
    assert (first.status, first.stop_reason) == ("stopped", StopReason("caller", "enough"))
    again = train_with(lambda config, epoch: 0.5)
    # What somebody has said of a trial meanwhile stays; what is new in the sweep is new in each trial.
    tag_run(str(tmp_path), "tried-01", add=["odd"], remove=["mine"], note="looks good")
    result = raytrain.sweep(options(images, tmp_path, resume=True, tag=("mine", "late"), note="all"))
    assert again.started == [("tried-01", True), ("tried-02", False)]
    assert {trial.status for trial in result.trials} == {"finished"}
    found = [(run.tag, run.note) for run in (read_config(run_store(str(tmp_path), f"tried-0{n}")) for n in (1, 2))]
    assert found == [(("odd", "late"), "looks good"), (("mine", "late"), "all")]


@pytest.mark.parametrize("more", [{"random_resized_crop": True}, {"cache": "none"}])
def test_trials_read_images_themselves_that_cannot_be_shared(
    more: dict[str, Any], images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer]
) -> None:
    trainer = train_with(by_seed)
    assert raytrain.sweep(options(images, tmp_path, **more), vary=["seed=0,1"]).status == "finished"
    assert trainer.shared == [None, None]


def test_trials_share_images_that_fit_into_memory(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer]
) -> None:
    trainer = train_with(by_seed)
    raytrain.sweep(options(images, tmp_path), vary=["seed=0,1"])
    assert trainer.shared[0] is not None and trainer.shared[0] is trainer.shared[1]


def test_each_trial_that_trains_at_the_same_time_has_a_gpu_of_its_own(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus = Hardware(num_nodes=1, cpus=4.0, gpus=2.0, object_store_bytes=10**9)
    monkeypatch.setattr(sweep_module, "open_machines", lambda _: nullcontext(lambda: two_gpus))
    both_train = threading.Barrier(2, timeout=60)

    trainer = train_with(by_seed)

    def wait_for_the_other(config: TrainConfig, start: TrainRequest) -> TrainResult:
        both_train.wait()
        return trainer(config, start)

    monkeypatch.setattr(trial_run, "start_run", wait_for_the_other)
    raytrain.sweep(options(images, tmp_path, device="cuda:2,5", workers="auto"), vary=["seed=0,1"])
    assert sorted(trainer.devices) == ["cuda:2", "cuda:5"]


def test_a_sweep_of_which_all_trials_fail_has_failed(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer]
) -> None:
    def accuracy(config: TrainConfig, epoch: int) -> float:
        raise TrainingFailed("The loss is not finite.", {})

    train_with(accuracy)
    result = raytrain.sweep(options(images, tmp_path), vary=["seed=0,1"])
    assert (result.status, result.best) == ("failed", None)
    assert not run_store(str(tmp_path), "tried-00").exists(METRICS)


@pytest.mark.not_quick
def test_a_sweep_stops_when_all_of_its_trials_together_have_cost_the_limit(
    images: Path, tmp_path: Path, train_with: Callable[[Accuracy], Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, limits, both_train = train_with(by_seed), list[float | None](), threading.Barrier(2, timeout=60)
    worker = MachineUse(rank=0, node="here", images_per_s=1.0, data_wait_fraction=0.0, gpu="NVIDIA L4")

    def train_until_it_is_stopped(config: TrainConfig, start: TrainRequest) -> TrainResult:
        assert start.view
        limits.append(config.max_cost)
        monitor = RunMonitor(config.name or "", EPOCHS, 1, History(run_store(config.storage, config.name or "")))
        both_train.wait()
        start.view(dataclasses.replace(monitor.snapshot(), machines=(worker,)))  # until then, nothing is paid for
        wait_for(lambda: start.signals.stop_request is not None)
        return trainer.train(config, start.view, start.signals)

    hardware = Hardware(num_nodes=1, cpus=4.0, gpus=2.0, object_store_bytes=10**9)
    monkeypatch.setattr(sweep_module, "open_machines", lambda _: nullcontext(lambda: hardware))
    monkeypatch.setattr(trial_run, "start_run", train_until_it_is_stopped)
    more: dict[str, Any] = {"device": "cuda:2,5", "workers": "auto", "max_cost": 1500.0}
    priced = options(images, tmp_path, price=("L4=3600000",), **more)  # a thousand dollars a second
    result = raytrain.sweep(priced, vary=["seed=0,1,2"])
    assert [trial.status for trial in sorted(result.trials, key=lambda trial: trial.name)] == [
        "stopped",
        "stopped",
        "waiting",
    ]
    assert result.stop_reason and (result.status, result.stop_reason.kind) == ("stopped", "cost")
    assert limits == [None, None], "the limit is the sweep's"
    assert result.dollars and 1500 <= result.dollars <= 2000 * (result.seconds + 0.01)
    assert read_status(run_store(str(tmp_path), "tried")).dollars == pytest.approx(result.dollars, rel=0.5)

    # What is spent is spent. With a higher limit, the same trials go on.
    with pytest.raises(UsageError, match=r"Sweep 'tried' has cost \$.* already, and --max-cost is 1500; give"):
        raytrain.sweep(dataclasses.replace(priced, resume=True))
    again = train_with(by_seed)
    finished = raytrain.sweep(dataclasses.replace(priced, resume=True, max_cost=1e9))
    assert sorted(again.started) == [("tried-00", True), ("tried-01", True), ("tried-02", False)]
    assert finished.dollars == result.dollars, "what is spent is counted, and no machine was seen since"
