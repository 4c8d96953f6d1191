"""The trials of a sweep: planning, resuming, refused options, results, and early stopping."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raytrain
from raytrain import TrainConfig, UsageError, recipes
from raytrain.backends.train import train
from raytrain.cli.commands import COMMANDS
from raytrain.experiments.sweep.results import collect
from raytrain.experiments.sweep.sweep import sweep
from raytrain.experiments.sweep.sweep_recorder import write_summaries_of_dead_trials
from raytrain.experiments.sweep.trials import Trial, check_names_free, is_over, plan_sweep, trials_of, write_sweep
from raytrain.runs.documents import read_json, run_store, write_config, write_json
from raytrain.runs.layout import METRICS, SUMMARY
from raytrain.runs.outcome import StopReason
from raytrain.runs.status import RunStatus, read_status, write_status
from raytrain.runs.trial_status import TrialStatus
from raytrain.storage.open import open_store

VARY = ["learning-rate=0.001,0.1", "optimizer=sgd,adamw"]


def config(storage: Path, **options: object) -> TrainConfig:
    return recipes.digits(**{"name": "rates", "data": "images", "storage": str(storage), **options})


def trials(storage: Path) -> list[Trial]:
    options = config(storage)
    return trials_of(plan_sweep(options, VARY, None), options, "rates")


def write_trial(trial: Trial, accuracies: list[float], **summary: object) -> None:
    """Write the documents that a trial writes."""
    write_config(trial.store, trial.config)
    rows = [{"kind": "evaluation", "step": n, "epoch": n, "accuracy": a} for n, a in enumerate(accuracies, start=1)]
    trial.store.put(METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())
    if summary:
        write_json(trial.store, SUMMARY, dict(summary))


def test_results_are_read_from_storage_best_first(tmp_path: Path) -> None:
    four = trials(tmp_path)
    write_trial(four[0], [0.2, 0.6, 0.4], status="finished", steps=9)
    write_trial(four[1], [0.5, 0.7], status="stopped", stop_reason={"kind": "signal", "detail": "SIGINT"})
    write_trial(four[2], [], status="failed", error="boom")
    collected = collect(four)
    assert [(each.name[-2:], each.status, each.accuracy, each.reason) for each in collected] == [
        ("01", "stopped", 0.7, StopReason("signal", "SIGINT")),
        ("00", "finished", 0.6, None),
        ("02", "failed", None, "boom"),
        ("03", "waiting", None, None),
    ]
    assert collected[0].evaluations == ((1, 0.5), (2, 0.7))


@pytest.mark.parametrize(
    ("summary", "over"),
    [
        ({"status": "finished"}, True),
        ({"status": "stopped", "stop_reason": {"kind": "early_stopping", "value": 0.1}}, True),
        ({"status": "stopped", "stop_reason": {"kind": "signal", "detail": "SIGINT"}}, False),
        ({"status": "failed", "error": "boom"}, False),
        ({}, False),
    ],
)
def test_stopped_and_failed_trials_are_resumed(summary: dict[str, Any], over: bool, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    if summary:
        write_json(store, SUMMARY, summary)
    assert is_over(store) is over


def started(storage: Path) -> TrainConfig:
    """Start a sweep in storage, and return the options that resume it."""
    options = config(storage)
    store = run_store(str(storage), "rates")
    write_config(store, options)
    write_sweep(store, plan_sweep(options, VARY, None))
    return config(storage, resume=True)


def test_a_sweep_is_resumed_with_its_original_points(tmp_path: Path) -> None:
    options = started(tmp_path)
    before = plan_sweep(config(tmp_path), VARY, None)
    assert plan_sweep(options, [], None) == plan_sweep(options, VARY, None) == before
    with pytest.raises(UsageError, match=r"started with --vary learning-rate=0\.001,0\.1 optimizer=sgd,adamw and 4 tr"):
        plan_sweep(options, ["epochs=1,2"], None)


def test_a_sweep_cannot_be_used_as_a_run_nor_a_run_as_a_sweep(tmp_path: Path) -> None:
    options = started(tmp_path)
    write_trial(trials(tmp_path)[0], [])
    with pytest.raises(UsageError, match="'rates-00' is not a sweep"):
        plan_sweep(config(tmp_path, name="rates-00", resume=True), [], None)
    with pytest.raises(UsageError, match=r"'rates-00' is in .* already"):
        check_names_free(trials(tmp_path))
    with pytest.raises(UsageError, match="'rates' is a sweep"):
        train(options)


@pytest.mark.parametrize(("accuracy", "stops"), [(0.5, True), (0.65, False)])
def test_trials_are_compared_with_trials_finished_before_the_resume(accuracy: float, stops: bool) -> None:
    from raytrain.backends.ray.trials.early_stopping import EarlyStopping

    requests: dict[int, StopReason] = {}
    scheduler: Any = EarlyStopping(num_epochs=8, request_stop=requests.__setitem__)
    scheduler.add_finished("before", [(1, 0.6), (2, 0.7)])
    trial = SimpleNamespace(trial_id="now", config={"trial": 4})
    scheduler.on_trial_add(None, trial)
    assert scheduler.on_trial_result(None, trial, {"epoch": 1, "accuracy": accuracy}) == scheduler.CONTINUE
    reason = StopReason("early_stopping", metric="accuracy", value=0.5, count=1)
    assert requests == ({4: reason} if stops else {})


def test_a_trial_whose_process_died_gets_a_summary(tmp_path: Path) -> None:
    dead, finished, waiting, _ = trials(tmp_path)
    write_trial(dead, [])
    write_status(dead.store, RunStatus(status="running", step=7))
    write_trial(finished, [0.5], status="finished")
    write_status(finished.store, RunStatus(status="finished"))
    lost = TrialStatus(status="failed", reason="its process died")
    write_summaries_of_dead_trials(
        [dead, finished, waiting], {dead.name: lost, finished.name: TrialStatus(status="finished")}
    )
    assert read_json(dead.store, SUMMARY)["error"] == "its process died"
    assert read_status(dead.store).status == "failed"
    assert read_json(finished.store, SUMMARY) == {"status": "finished"}
    assert not waiting.store.exists(SUMMARY)


def test_the_python_function_has_the_options_of_the_command() -> None:
    of_command = set(inspect.signature(COMMANDS["sweep"]).parameters) - {"options", "png"}
    of_function = inspect.signature(raytrain.sweep).parameters
    assert of_command == {"vary", "trials", "early_stopping", "trust"} and of_command < set(of_function)
    assert of_function["early_stopping"].default is True


def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(raytrain.UsageError, match="--trials is 0"):
        raytrain.sweep(config(tmp_path), vary=["learning-rate=log:0.001..0.1"], trials=0, early_stopping=False)
    options = TrainConfig(data="images", storage=str(tmp_path), batch_size=8)
    with pytest.raises(UsageError, match="--learning-rate is not given"):
        sweep(options, vary=["epochs=1,2"])
    assert list(tmp_path.iterdir()) == []
