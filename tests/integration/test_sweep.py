"""Sweeps on Ray and without it: a trial that fails, one that is worse than the others, a stop, and a resume."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import TrainConfig
from raytrain.experiments.sweep_result import SweepSnapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import run_store
from raytrain.runs.metrics_history import read_metrics
from raytrain.runs.outcome import StopReason, stop_reason_of
from raytrain.runs.records import RunRecord, read_run
from tests.helpers.free_cluster import wait_until_free
from tests.helpers.small_runs import config, loop_with
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(params=["local", "ray"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each of the backends, with a Ray cluster if it needs one."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


def at_once(images: Path, storage: Path, **options: Any) -> TrainConfig:
    return config(images, storage, name="tried", **options)


def documents(storage: Path, name: str) -> RunRecord:
    return read_run(str(storage), name)


def fail(run: raytrain.Run, batch: raytrain.Batch) -> None:
    if run.config.seed == 1 and batch.step == 6:
        raise RuntimeError("something broke")


def test_a_trial_that_fails_ends_alone_and_the_others_are_runs_like_any(
    backend: str, images: Path, tmp_path: Path
) -> None:
    loop = partial(loop_with, before_step=fail)
    options: dict[str, Any] = {"test_data": str(images), "backend": backend, "max_failures": 0}  # none held out by seed
    result = raytrain.sweep(at_once(images, tmp_path, **options), vary=["seed=0,1,2"], loop=loop, early_stopping=False)
    assert result.status == "finished"
    assert {trial.name: trial.status for trial in result.trials} == {
        "tried-00": "finished",
        "tried-01": "failed",
        "tried-02": "finished",
    }
    assert [trial.accuracy for trial in result.trials[:2]] == sorted(
        (trial.accuracy or 0 for trial in result.trials[:2]), reverse=True
    )
    assert "something broke" in documents(tmp_path, "tried-01").summary["error"]
    alone = raytrain.train(config(images, tmp_path, name="alone", seed=2, workers=1, **options), loop=loop)
    trial = documents(tmp_path, "tried-02")
    assert trial.status.status == "finished" and trial.summary["samples_seen"] == alone.samples_seen
    losses = [
        [row.loss for row in documents(tmp_path, name).metrics if row.kind == "step"] for name in ("tried-02", "alone")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    evaluated = raytrain.evaluate("tried-02", str(images), storage=str(tmp_path), trust=True)
    assert evaluated.images == 90


def never_right(run: raytrain.Run) -> None:
    """A loop whose trials are as good as their seeds are high, and that learns nothing."""
    from torch.nn import functional

    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs(evaluate=lambda: {"accuracy": run.config.seed / 10}):
        for batch in epoch:
            wait_in_epoch_2(run, batch)
            optimizer.zero_grad()
            functional.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()


def wait_in_epoch_2(run: raytrain.Run, batch: raytrain.Batch) -> None:
    """In the first step, until the better trial was measured; in the eighth, until this one is asked to stop."""
    if run.config.seed == 1 and batch.step == 0:
        better = run_store(run.config.storage, "tried-00")
        wait_for(lambda: any(row.kind == "evaluation" for row in read_metrics(better)))
    if run.config.seed == 1 and batch.step == 7:
        wait_for(run.reporter.stop_requested)


def test_a_bad_trial_is_stopped_early_with_a_checkpoint(backend: str, images: Path, tmp_path: Path) -> None:
    result = raytrain.sweep(at_once(images, tmp_path, workers=1, backend=backend), vary=["seed=3,1"], loop=never_right)
    best, worse = result.trials
    assert (best.name, best.status, best.reason) == ("tried-00", "finished", None)
    assert (worse.status, worse.accuracy) == ("stopped", 0.1)
    assert worse.reason == StopReason("early_stopping", metric="accuracy", value=0.1, count=1)
    assert 6 <= worse.steps <= 9  # asked after epoch 1 at the earliest, and a step after it was asked at the latest
    record = documents(tmp_path, "tried-01")
    assert record.checkpoints[-1].path.endswith(f"step-{worse.steps:09d}.pt")
    assert (stop_reason_of(record.summary), record.status.status) == (worse.reason, "stopped")


def of_one_rate(run: raytrain.Run) -> None:
    """A loop that uses no learning rate of the options."""
    run.prepare(run.build_model())
    for epoch in run.epochs(evaluate=lambda: {"accuracy": 0.5}):
        for _ in epoch:
            pass


def test_an_option_that_the_loop_does_not_use_is_said_once(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = at_once(images, tmp_path, workers=1, epochs=1, backend="local")
    raytrain.sweep(options, vary="learning-rate=0.5,0.6", loop=of_one_rate)
    (said,) = [record.getMessage() for record in caplog.records if "build_optimizer" in record.getMessage()]
    assert said.startswith("tried-0") and "--learning-rate takes effect in run.build_optimizer" in said


def die(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    """The process of seed 0 dies once, that of seed 1 each time."""
    died = folder / f"died-{run.config.seed}"
    if batch.step == 8 and not (run.config.seed == 0 and died.exists()):
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_trial_whose_process_dies_resumes_and_one_that_dies_again_ends_alone(images: Path, tmp_path: Path) -> None:
    loop = partial(loop_with, before_step=partial(die, folder=tmp_path))
    options = at_once(images, tmp_path / "runs", max_failures=1, checkpoint_every=("1ep", "3st"), backend="local")
    result = raytrain.sweep(options, vary=["seed=0,1"], early_stopping=False, loop=loop)
    resumed, failed = result.trials
    assert (result.status, resumed.name, resumed.status) == ("finished", "tried-00", "finished")
    steps = [row.step for row in documents(tmp_path / "runs", "tried-00").metrics if row.kind == "step"]
    assert steps == list(range(1, 21))
    assert (failed.name, failed.status) == ("tried-01", "failed") and failed.steps >= 6
    assert failed.reason is not None and documents(tmp_path / "runs", "tried-01").status.status == "failed"


def test_an_aborted_sweep_leaves_no_trial_in_the_cluster(ray_cluster: None, images: Path, tmp_path: Path) -> None:
    def abort(snapshot: SweepSnapshot) -> None:
        if any(trial.evaluations for trial in snapshot.trials):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raytrain.sweep(at_once(images, tmp_path, epochs=5000), vary=["seed=0,1,2"], view=abort)
    assert documents(tmp_path, "tried").status.status == "interrupted"
    wait_until_free()


class StopOnceTraining(StopSignals):
    """Asks for a stop, as Ctrl-C does, once a trial was evaluated."""

    def view(self, snapshot: SweepSnapshot) -> None:
        if any(trial.evaluations for trial in snapshot.trials):
            self.request_stop(StopReason("signal", "SIGINT"))


def test_a_stop_stops_all_with_checkpoints_and_resume_finishes_them(backend: str, images: Path, tmp_path: Path) -> None:
    signals = StopOnceTraining()
    endless = at_once(images, tmp_path, epochs=500, backend=backend)
    stopped = raytrain.sweep(endless, vary=["seed=0,1,2"], early_stopping=False, view=signals.view, signals=signals)
    assert (stopped.status, stopped.stop_reason) == ("stopped", StopReason("signal", "SIGINT"))
    begun = [trial for trial in stopped.trials if trial.status == "stopped"]
    assert all(trial.reason == StopReason("signal", "SIGINT") for trial in begun)
    trained = [trial for trial in begun if trial.steps]  # one that was still starting has nothing to keep
    assert trained and all(documents(tmp_path, trial.name).checkpoints for trial in trained)
    assert any(trial.status == "waiting" for trial in stopped.trials)

    steps = max(trial.steps for trial in begun) + 10
    more = at_once(images, tmp_path, epochs=500, max_steps=steps, resume=True, backend=backend)
    again = raytrain.sweep(more, early_stopping=False)
    assert again.status == "finished"
    assert {trial.status for trial in again.trials} == {"finished"}
    for trial in again.trials:
        record = documents(tmp_path, trial.name)
        assert [row.step for row in record.metrics if row.kind == "step"] == list(range(1, steps + 1))
        assert record.images == documents(tmp_path, "tried").images != {}, "also of one that has begun after the stop"


def wait_for_stop_on_two_workers(run: raytrain.Run) -> None:
    def wait(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if run.world_size == 2 and run.rank == 0 and batch.step == 7:
            wait_for(run.reporter.stop_requested)

    loop_with(run, before_step=wait)


class StopOnTwoWorkers(StopSignals):
    """Asks for a stop once the trial on two workers has trained some steps."""

    def view(self, snapshot: SweepSnapshot) -> None:
        trials = snapshot.trials
        if any(trial.name == "tried-01" and trial.status == "running" and trial.steps >= 6 for trial in trials):
            self.request_stop(StopReason("caller", "enough"))


def test_trials_on_more_and_more_workers_train_in_turn_and_resume(backend: str, images: Path, tmp_path: Path) -> None:
    signals, loop = StopOnTwoWorkers(), wait_for_stop_on_two_workers
    options: dict[str, Any] = {"workers": "auto", "backend": backend}
    stopped = raytrain.sweep(
        at_once(images, tmp_path, **options), vary="workers=1,2", loop=loop, view=signals.view, signals=signals
    )
    assert {trial.name: trial.status for trial in stopped.trials} == {"tried-00": "finished", "tried-01": "stopped"}
    assert 8 <= documents(tmp_path, "tried-01").status.step <= 9

    again = raytrain.sweep(at_once(images, tmp_path, resume=True, **options), loop=loop)
    assert again.status == "finished" and again.histories["tried-00"] == stopped.histories["tried-00"]
    assert [row.step for row in again.histories["tried-01"] if row.kind == "step"] == list(range(1, 21))
    assert documents(tmp_path, "tried-01").summary["samples_seen"] == 324
    (scaling,) = again.scaling
    assert [(size.workers, size.status) for size in scaling.sizes] == [(1, "finished"), (2, "finished")]
    for size in scaling.sizes:
        assert size.images_per_s and size.seconds and size.value is not None and size.value >= 0.8
