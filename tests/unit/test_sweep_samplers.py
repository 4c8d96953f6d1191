"""A sweep whose points are chosen while it goes on, how much room its trials have, and whom it tells how it ended.

Stand-ins train, so that no process starts.
"""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import TrainConfig, TrainingFailed, UsageError
from raytrain.display.terminal import startup_lines
from raytrain.errors import shell_command
from raytrain.experiments import sweep as sweep_module
from raytrain.experiments import trial_run
from raytrain.experiments.optuna_study import SweepStudy
from raytrain.experiments.search_space import parse
from raytrain.experiments.sweep_options import SweepOptions
from raytrain.experiments.sweep_plan import PLAN, plan_sweep, read_sweep
from raytrain.experiments.sweep_result import SweepResult
from raytrain.experiments.trial_results import is_stopped_early
from raytrain.experiments.trials import names_of
from raytrain.launch.local.local_launch import SharedImages
from raytrain.launch.placement import Hardware
from raytrain.launch.prepare import TrainRequest
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import STUDY, run_store, write_config
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import StopReason, TrainResult
from tests.helpers.run_records import write_summary
from tests.helpers.small_runs import config as small_config

pytestmark = pytest.mark.timeout(300)
EPOCHS = 8
VARY = ["learning-rate=log:0.001..1", "optimizer=sgd,adamw"]


class Killed(BaseException):
    """The process ends without a word."""


class Trainer:
    """Trains nothing: measures a loss that is lowest at a rate of 0.1, each trial after the other.

    In the trial of the number ``killed_in`` the sweep is killed. ``untrained`` are losses of trials before their first
    step, by their names.
    """

    def __init__(self, killed_in: int | None = None, untrained: Mapping[str, float] | None = None) -> None:
        self.killed_in = killed_in
        self.untrained = untrained or {}
        self.started: list[str] = []
        self.requests: list[TrainRequest] = []
        self.configs: list[TrainConfig] = []
        self._lock = threading.Lock()

    def __call__(self, config: TrainConfig, request: TrainRequest) -> TrainResult:
        with self._lock:
            return self._train(config, request)

    def _train(self, config: TrainConfig, request: TrainRequest) -> TrainResult:
        name = config.name or ""
        self.started.append(name)
        self.requests.append(request)
        self.configs.append(config)
        store = run_store(config.storage, name)
        write_config(store, config)
        history = History(store)
        monitor = RunMonitor(name, EPOCHS, 1, history)
        monitor.note_start(1, 0)
        assert request.view is not None and isinstance(config.learning_rate, float)
        if name in self.untrained:
            monitor.record(MetricRow(kind="evaluation", step=0, epoch=1, metrics={"loss": self.untrained[name]}))
            request.view(monitor.snapshot())
        for epoch in range(1, EPOCHS + 1):
            loss = abs(config.learning_rate - 0.1) + 1 / epoch
            monitor.record(MetricRow(kind="evaluation", step=epoch, epoch=epoch, metrics={"loss": loss}))
            request.view(monitor.snapshot())
            if name.endswith(f"-{self.killed_in or -1:02d}") and epoch == 3:
                history.flush()
                raise Killed
            if request.signals.stop_request is not None:
                break
        result = write_summary(store, name, epoch, epoch, stop_reason=request.signals.stop_request)
        monitor.finish("stopped" if result.stop_reason else "finished", result)
        request.view(monitor.snapshot())
        return result


@pytest.fixture
def swept(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SweepResult]:
    """A sweep of a trainer below a folder of ``tmp_path``, on one machine, by the loss."""

    def sweep(trainer: Trainer, folder: str = "runs", hardware: Hardware | None = None, **more: Any) -> SweepResult:
        found = hardware or Hardware(num_nodes=1, cpus=1.0, gpus=0.0, object_store_bytes=10**9)
        monkeypatch.setattr(sweep_module, "open_machines", lambda _: nullcontext(lambda: found))
        monkeypatch.setattr(trial_run, "start_run", trainer)
        names = ("vary", "trials", "sampler", "pruner", "early_stopping", "notify_trials", "view", "signals")
        asked = {name: more.pop(name) for name in names if name in more}
        base: dict[str, Any] = {
            "name": "tried",
            "backend": "local",
            "workers": "auto",
            "epochs": EPOCHS,
            "best": "loss",
        }
        measured = {"mean": (0.5, 0.5, 0.5), "std": (0.2, 0.2, 0.2)}  # so that no process decodes images
        options = small_config(images, tmp_path / folder, **{**base, **measured, **more})
        return raytrain.sweep(options, **{"early_stopping": False, **asked})

    return sweep


def values(result: SweepResult) -> dict[str, Any]:
    return {trial.name: trial.values for trial in result.trials}


def test_a_killed_sweep_has_the_points_and_the_results_of_one_that_was_not(
    swept: Callable[..., SweepResult], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"vary": VARY, "trials": 10, "sampler": "tpe", "pruner": "median", "early_stopping": True}
    whole = swept(Trainer(), "whole", **asked)
    killed = Trainer(killed_in=3)
    with pytest.raises(Killed):
        swept(killed, "runs", **asked)
    stored = read_sweep(run_store(str(tmp_path / "runs"), "tried"))
    assert (stored.sampler, stored.pruner, stored.num_trials, len(stored.points)) == ("tpe", "median", 10, 4)

    again = Trainer()
    resumed = swept(again, "runs", resume=True, early_stopping=True)
    assert again.started == [f"tried-{number:02d}" for number in range(3, 10)], "the trial that trained goes on"
    assert again.configs[0].resume
    assert values(resumed) == values(whole)
    assert [(trial.name, trial.status, trial.value) for trial in resumed.trials] == [
        (trial.name, trial.status, trial.value) for trial in whole.trials
    ]
    assert any(is_stopped_early(trial) for trial in whole.trials), "Optuna has pruned some"


def test_optunas_pruners_stop_points_of_chance_too(swept: Callable[..., SweepResult]) -> None:
    result = swept(Trainer(), vary=VARY[0], trials=9, pruner="successive-halving", early_stopping=True)
    reasons = [trial.reason for trial in result.trials if trial.status == "stopped"]
    assert {(reason.metric, reason.detail) for reason in reasons if isinstance(reason, StopReason)} == {
        ("loss", "successive-halving")
    }


def test_what_a_trial_measures_before_its_first_step_is_not_compared(swept: Callable[..., SweepResult]) -> None:
    trainer = Trainer(untrained={"tried-00": 0.01, "tried-01": 9.0})
    result = swept(trainer, vary="learning-rate=0.2,0.1", early_stopping=True)
    assert [(trial.name, trial.status) for trial in result.trials] == [
        ("tried-01", "finished"),
        ("tried-00", "finished"),
    ]
    assert [len(trial.evaluations) for trial in result.trials] == [EPOCHS, EPOCHS]
    resumed = swept(Trainer(), resume=True, early_stopping=True)
    assert [trial.evaluations for trial in resumed.trials] == [trial.evaluations for trial in result.trials]


def test_as_many_trials_train_at_once_as_there_is_room_for_their_workers(
    swept: Callable[..., SweepResult],
) -> None:
    cpus = Hardware(num_nodes=1, cpus=16.0, gpus=0.0, object_store_bytes=10**9)
    trainer = Trainer()
    lines: list[str] = []
    with startup_lines(lines.append, PLAN):
        swept(trainer, hardware=cpus, vary=VARY[0], trials=5, workers=4, batch_size="8/worker")
    assert lines == ["5 trials, 3 at once, each on 4 CPUs; compared by loss, the smaller the better"]
    assert {request.group.placement.num_workers for request in trainer.requests if request.group} == {4}
    assert {(config.workers, config.batch_size) for config in trainer.configs} == {(4, 32)}


def test_each_trial_has_gpus_of_its_own(swept: Callable[..., SweepResult]) -> None:
    gpus = Hardware(num_nodes=1, cpus=16.0, gpus=5.0, object_store_bytes=10**9)
    both_train, trainer = threading.Barrier(2, timeout=60), Trainer()

    def wait_for_the_other(config: TrainConfig, request: TrainRequest) -> TrainResult:
        both_train.wait()
        return trainer(config, request)

    swept(wait_for_the_other, hardware=gpus, vary="seed=0,1", device="cuda:1,3,4,6,7", workers=2)  # type: ignore
    assert sorted(config.device for config in trainer.configs) == ["cuda:1,3", "cuda:4,6"]


def test_the_gpus_of_the_environment_are_divided_if_they_have_numbers(
    swept: Callable[..., SweepResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"vary": "seed=0,1", "device": "cuda", "batch_size": 8}
    asked["hardware"] = Hardware(num_nodes=1, cpus=16.0, gpus=2.0, object_store_bytes=10**9)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    trainer = Trainer()
    swept(trainer, **asked)
    assert {config.device for config in trainer.configs} <= {"cuda:2", "cuda:5"}
    assert {config.name for config in trainer.configs} == {"tried-00", "tried-01"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f6c0e5a,GPU-1b2d3c4e")
    swept(trainer := Trainer(), "one-at-a-time", workers=2, **asked)
    assert [config.device for config in trainer.configs] == ["cuda", "cuda"]
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES is GPU-8f6c0e5a,.* by --device, such as cuda:0,1"):
        swept(Trainer(), "named-by-uuid", **asked)


@pytest.mark.not_quick
def test_one_message_tells_how_the_sweep_ended_and_trials_are_told_of_if_asked(
    swept: Callable[..., SweepResult], tmp_path: Path
) -> None:
    told, trainer = tmp_path / "told", Trainer()
    notify = f'echo "$RAYTRAIN_TEXT|$RAYTRAIN_BEST|$RAYTRAIN_METRIC" >> {told}'
    swept(trainer, vary="learning-rate=0.1,0.2", notify=notify)
    [line] = told.read_text().splitlines()
    text = "Sweep tried finished: tried-00 is the best of 2, loss 0.1250 with learning-rate=0.1"
    assert line == f"{text}|tried-00|loss"
    assert [request.notifies for request in trainer.requests] == [False, False]
    assert {request.sweep for request in trainer.requests} == {"tried"}

    asked = Trainer()
    swept(asked, name="again", vary="workers=1,2", learning_rate=0.1, notify=notify, notify_trials=True)
    assert [request.notifies for request in asked.requests] == [True, True]


@pytest.mark.not_quick
def test_an_aborted_sweep_is_told_of(swept: Callable[..., SweepResult], tmp_path: Path) -> None:
    def abort(trials: Any) -> None:
        raise KeyboardInterrupt

    notify = f'echo "$RAYTRAIN_TEXT" >> {tmp_path}/told'
    with pytest.raises(KeyboardInterrupt):
        swept(Trainer(), vary=VARY[0], trials=2, sampler="tpe", notify=notify, view=abort)
    assert (tmp_path / "told").read_text() == "Sweep tried was interrupted\n"


def test_a_sweep_that_fails_names_the_command_that_resumes_it(
    swept: Callable[..., SweepResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = SharedImages.poll
    monkeypatch.setattr(SharedImages, "poll", lambda images: (poll(images)[0], "too many bad images."))
    with pytest.raises(TrainingFailed) as raised:
        swept(Trainer(), vary="seed=1")
    command = shell_command("sweep", "--name", "tried", storage=str(tmp_path / "runs"))
    assert str(raised.value).startswith(f"Sweep 'tried' failed: too many bad images. Resume it with {command} ")
    assert str(raised.value).endswith(" --resume")


def test_a_stopped_sweep_chooses_no_further_point(swept: Callable[..., SweepResult]) -> None:
    signals, trainer = StopSignals(), Trainer()
    asked = threading.Event()

    def stop(trials: Any) -> None:
        if signals.stop_request is not None:
            asked.set()
        elif trials:
            signals.request_stop(StopReason("caller", "enough"))

    def train(config: TrainConfig, request: TrainRequest) -> TrainResult:
        asked.wait(60)
        while request.signals.stop_request is None:
            asked.wait(0.05)
        return trainer(config, request)

    stopped = swept(train, vary=VARY[0], trials=5, sampler="tpe", view=stop, signals=signals)  # type: ignore
    assert (stopped.status, len(stopped.trials), stopped.trials[0].status) == ("stopped", 1, "stopped")
    resumed = swept(Trainer(), resume=True)
    assert (resumed.status, len(resumed.trials)) == ("finished", 5)


@pytest.mark.parametrize("asked", [9, 101])
def test_a_sampler_that_runs_out_of_points_changes_no_name_of_a_trial(
    asked: int, swept: Callable[..., SweepResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = SweepStudy.choose
    monkeypatch.setattr(
        SweepStudy, "choose", lambda study, accepts: choose(study, accepts) if len(study.points) < 2 else None
    )  # type: ignore
    first, again = Trainer(), Trainer()
    swept(first, vary=VARY[0], trials=asked, sampler="qmc")
    assert first.started == (["tried-00", "tried-01"] if asked == 9 else ["tried-000", "tried-001"])
    result = swept(again, sampler="qmc", resume=True)
    assert ([trial.name for trial in result.trials], again.started) == (first.started, [])
    assert names_of(str(tmp_path / "runs"), "tried") == first.started


def test_a_log_that_does_not_fit_the_trials_is_begun_anew(
    swept: Callable[..., SweepResult], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Killed):
        swept(Trainer(killed_in=2), vary=VARY, trials=4, sampler="tpe")
    log = tmp_path / "runs" / "tried" / STUDY
    log.write_text('{"event": "given", "values": {"learning_rate": 0.5, "optimizer": "sgd"}}\n')
    points = read_sweep(run_store(str(tmp_path / "runs"), "tried")).points
    resumed = swept(Trainer(), resume=True)
    assert "study.jsonl does not fit the trials of sweep 'tried'" in caplog.text
    assert (resumed.status, len(resumed.trials)) == ("finished", 4)
    assert read_sweep(run_store(str(tmp_path / "runs"), "tried")).points[:3] == points
    assert log.read_text().count("given") == 3 and log.read_text().count("ended") == 4


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"sampler": "tpe"}, "--sampler tpe chooses points; say how many with --trials"),
        ({"sampler": "random"}, "--sampler random chooses points; say how many with --trials"),
        ({"sampler": "grid", "trials": 3}, "--sampler grid trains every combination of values, and --trials is 3"),
        ({"sampler": "tpe", "trials": 0}, "--trials is 0; it must be at least 1"),
        ({"sampler": "tpe", "trials": 5, "vary": "optimizer=sgd,adamw"}, "2 different points only; ask for at most 2"),
        ({"trials": 4, "vary": "optimizer=sgd,adamw"}, "2 different points only; ask for at most 2"),
        ({"sampler": "tpe", "trials": 2, "vary": "workers=1,2"}, "how training scales is measured of all"),
        (
            {"pruner": "median", "vary": "workers=1,2", "early_stopping": True},
            "are measured to their end; omit --pruner",
        ),
        ({"pruner": "median", "vary": "seed=1,2"}, "--pruner median stops trials early, and --no-early-stopping does"),
        ({"sampler": "tpe", "trials": 2, "vary": "epochs=0..2"}, "--epochs is 0; it must be at least 1"),
        ({"vary": "seed=1,2", "workers": 65}, "--workers is 65, and this machine has 1 CPU; ask for at most 4"),
        ({"vary": {"seed": [[1, 2]]}}, 'vary is of type dict; give texts, as in vary=["learning-rate=0.1,0.01"'),
        ({"vary": ["seed=1,2", 3]}, "vary is of type list; give texts"),
        ({"vary": None}, "vary is of type NoneType; give texts"),
        ({"sampler": "TPE", "trials": 2}, "--sampler is 'TPE' (did you mean tpe?); give grid, random, tpe"),
        ({"pruner": "Median"}, "--pruner is 'Median' (did you mean median?); give median, successive-halving"),
        ({"trials": 2.5}, "--trials is 2.5; give a whole number"),
        ({"vary": "seed=1,2", "track": ("tensorbord",)}, "There is no tracker 'tensorbord'"),
        (
            {"vary": "best=loss,accuracy", "best": "auroc"},
            "--best auroc compares the trials, and those with best=loss do not measure it; add --metrics auroc",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    asked: dict[str, Any], sentence: str, swept: Callable[..., SweepResult], tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as raised:
        swept(Trainer(), **{"vary": VARY[0], **asked})
    assert sentence in str(raised.value)
    assert not list(tmp_path.glob("runs/tried*"))


def test_a_run_that_has_the_name_of_a_trial_is_not_taken_for_it(
    swept: Callable[..., SweepResult], tmp_path: Path
) -> None:
    write_config(run_store(str(tmp_path / "runs"), "tried-01"), TrainConfig(batch_size=1))
    trainer = Trainer()
    with pytest.raises(UsageError, match=r"A run called 'tried-01' is in .* already; choose another --name"):
        swept(trainer, vary=VARY[0], trials=2, sampler="tpe")
    assert trainer.started == []


def test_the_sampler_learns_of_trials_that_their_own_options_stop_and_none_trains_again(
    swept: Callable[..., SweepResult], tmp_path: Path
) -> None:
    class Patient(Trainer):
        def _train(self, config: TrainConfig, request: TrainRequest) -> TrainResult:
            request.signals.request_stop(StopReason("patience", metric="loss", count=1))
            return super()._train(config, request)

    swept(Patient(), vary=VARY[0], trials=3, sampler="tpe")
    assert (tmp_path / "runs" / "tried" / STUDY).read_text().count("ended") == 3
    again = Trainer()
    swept(again, resume=True)
    assert again.started == []


def test_the_study_knows_of_trials_that_diverged_also_after_a_resume(tmp_path: Path) -> None:
    def study(*, is_resumed: bool = False) -> SweepStudy:
        return SweepStudy(
            run_store(str(tmp_path), "tried"),
            parse(VARY[:1]),
            sampler="tpe",
            pruner="median",
            seed=0,
            is_lower_better=True,
            num_epochs=4,
            is_resumed=is_resumed,
        )

    first = study()
    for number, value in enumerate((math.inf, math.nan, 0.5)):
        assert first.choose(lambda point: True) is not None
        first.judge_value(number, 1, value)
    first.end(0, None, is_pruned=True)
    first.write(now=True)
    assert study(is_resumed=True).choose(lambda point: True) == first.choose(lambda point: True)
    log = (tmp_path / "tried" / STUDY).read_text()
    assert '"ended", "trial": 0, "value": null, "pruned": true' in log


def test_a_sweep_is_resumed_with_its_own_sampler(swept: Callable[..., SweepResult], tmp_path: Path) -> None:
    swept(Trainer(), vary=VARY[0], trials=2, sampler="tpe")
    for other in ({"sampler": "cmaes"}, {"pruner": "median"}):
        with pytest.raises(UsageError, match="was started with --sampler tpe and no --pruner; leave --sampler and"):
            swept(Trainer(), resume=True, early_stopping=True, **other)
    options = TrainConfig(
        data="images", storage=str(tmp_path / "runs"), name="tried", resume=True, batch_size=8, learning_rate=0.1
    )
    assert plan_sweep(options, VARY[:1], SweepOptions(trials=2, sampler="tpe")).num_trials == 2


@pytest.mark.not_quick
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--sampler tpe", "--sampler tpe chooses points; say how many with --trials"),
        ("--sampler tp --trials 3", "--sampler"),
        ("--pruner median --no-early-stopping --trials 3", "--pruner median stops trials early"),
        ("--trials 3 --workers 1..2", "--workers is how many workers each trial of a sweep trains on; give a number"),
    ],
)
def test_the_command_refuses_in_one_sentence(words: str, sentence: str, images: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "raytrain", "sweep", "custom", "--data", str(images), "--image-size", "16"]
    command += ["--learning-rate", "0.1", "--vary", "weight-decay=0.1..0.2", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and sentence in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.glob("runs/*")) == []
