"""The trials of a sweep in storage, and how a sweep is resumed. Through Ray: tests/integration/test_sweep.py."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import raytrain
from raytrain import TrainConfig, UsageError
from raytrain.backends.train import train
from raytrain.cli.commands import COMMANDS
from raytrain.experiments.sweep.results import collect
from raytrain.experiments.sweep.sweep import sweep
from raytrain.experiments.sweep.trials import Trial, check_names_free, is_over, plan_sweep, write_sweep
from raytrain.runs.documents import run_store, write_config, write_json
from raytrain.runs.layout import SUMMARY
from raytrain.runs.trial_status import EARLY_STOPPING
from raytrain.storage.open import open_store
from tests.unit.test_sweep_tables import VARY, config, trials


def write_trial(trial: Trial, accuracies: list[float], **summary: object) -> None:
    """Write the documents of a trial."""
    store = run_store(trial.config.storage, trial.name)
    write_config(store, trial.config)
    rows = [{"kind": "evaluation", "step": n, "epoch": n, "accuracy": a} for n, a in enumerate(accuracies, start=1)]
    store.put("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    if summary:
        write_json(store, SUMMARY, dict(summary))


def test_results_come_from_storage_the_best_first(tmp_path: Path) -> None:
    four = trials(tmp_path)
    write_trial(four[0], [0.2, 0.6, 0.4], status="finished", steps=9)
    write_trial(four[1], [0.5, 0.7], status="stopped", stop_reason="Ctrl-C")
    write_trial(four[2], [], status="failed", error="boom")
    collected = collect(four)
    assert [(each.name[-2:], each.status, each.accuracy, each.reason) for each in collected] == [
        ("01", "stopped", 0.7, "Ctrl-C"),
        ("00", "finished", 0.6, None),
        ("02", "failed", None, "boom"),
        ("03", "waiting", None, None),
    ]


@pytest.mark.parametrize(
    ("summary", "over"),
    [
        ({"status": "finished"}, True),
        ({"status": "stopped", "stop_reason": f"{EARLY_STOPPING}: test accuracy 0.1"}, True),
        ({"status": "stopped", "stop_reason": "Ctrl-C"}, False),
        ({"status": "failed", "error": "boom"}, False),
        ({}, False),
    ],
)
def test_what_was_stopped_or_failed_is_resumed(summary: dict[str, object], over: bool, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    if summary:
        write_json(store, SUMMARY, summary)
    assert is_over(store) is over


def started(storage: Path) -> TrainConfig:
    """The options that resume a sweep that was started."""
    options = config(storage)
    store = run_store(str(storage), "rates")
    write_config(store, options)
    write_sweep(store, plan_sweep(options, VARY, None))
    return config(storage, resume=True)


def test_a_sweep_is_resumed_as_it_was_started(tmp_path: Path) -> None:
    options = started(tmp_path)
    before = plan_sweep(config(tmp_path), VARY, None)
    assert plan_sweep(options, [], None) == plan_sweep(options, VARY, None) == before
    with pytest.raises(
        UsageError, match=r"started with --vary learning-rate=0\.001,0\.1 optimizer=sgd,adamw and 4 trials"
    ):
        plan_sweep(options, ["epochs=1,2"], None)


def test_a_sweep_and_a_run_are_not_taken_for_each_other(tmp_path: Path) -> None:
    options = started(tmp_path)
    write_trial(trials(tmp_path)[0], [])
    with pytest.raises(UsageError, match="'rates-00' is not a sweep"):
        plan_sweep(config(tmp_path, name="rates-00", resume=True), [], None)
    with pytest.raises(UsageError, match=r"'rates-00' is in .* already"):
        check_names_free(trials(tmp_path))
    with pytest.raises(UsageError, match="'rates' is a sweep"):
        train(options)


@pytest.mark.parametrize(("accuracy", "stops"), [(0.5, [4]), (0.65, [])])
def test_trials_that_were_over_before_still_judge_the_others(
    accuracy: float, stops: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytrain.experiments.sweep import tuner

    stopped: list[int] = []
    coordinator = SimpleNamespace(end_early=SimpleNamespace(remote=lambda number, reason: stopped.append(number)))
    monkeypatch.setattr(tuner.ray, "get", lambda reference: reference)
    judge = tuner.EarlyStopping(coordinator, num_epochs=8)
    judge.remember("before", [(1, 0.6), (2, 0.7)])
    trial = SimpleNamespace(trial_id="now", config={"trial": 4})
    judge.on_trial_add(None, trial)  # type: ignore[arg-type]
    assert judge.on_trial_result(None, trial, {"epoch": 1, "accuracy": accuracy}) == judge.CONTINUE
    assert stopped == stops


def test_in_python_it_has_the_options_of_the_command(tmp_path: Path) -> None:
    of_command = set(inspect.signature(COMMANDS["sweep"]).parameters) - {"options", "png"}
    of_function = inspect.signature(raytrain.sweep).parameters
    assert of_command == {"vary", "trials", "early_stopping"} and of_command < set(of_function)
    assert of_function["early_stopping"].default is True
    with pytest.raises(raytrain.UsageError, match="--trials is 0"):
        raytrain.sweep(config(tmp_path), vary=["learning-rate=log:0.001..0.1"], trials=0, early_stopping=False)


def test_a_learning_rate_is_asked_for_before_anything_starts(tmp_path: Path) -> None:
    options = TrainConfig(data="images", storage=str(tmp_path), batch_size=8)
    with pytest.raises(UsageError, match="Give either --learning-rate or --learning-rate-per-worker"):
        sweep(options, vary=["epochs=1,2"])
    assert list(tmp_path.iterdir()) == []
