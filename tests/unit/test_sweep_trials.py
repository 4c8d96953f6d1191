"""The trials of a sweep: planning, resuming, refused options, results, and early stopping."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import TrainConfig, UsageError, recipes
from raytrain.cli.commands import COMMANDS
from raytrain.experiments.best_metric import BestMetric
from raytrain.experiments.sweep import sweep
from raytrain.experiments.sweep_options import SweepOptions
from raytrain.experiments.sweep_plan import plan_sweep, write_sweep
from raytrain.experiments.trial_results import best_first, is_over, stored_result
from raytrain.experiments.trial_stopping import EarlyStopping, Judge
from raytrain.experiments.trials import Trial, check_names_free, trials_of
from raytrain.launch.train import train
from raytrain.runs.documents import METRICS, SUMMARY, run_store, write_config, write_json
from raytrain.runs.outcome import StopReason

VARY = ["learning-rate=0.001,0.1", "optimizer=sgd,adamw"]


def config(storage: Path, **options: object) -> TrainConfig:
    return recipes.digits(**{"name": "rates", "data": "images", "storage": str(storage), **options})


def trials(storage: Path) -> list[Trial]:
    options = config(storage)
    return trials_of(plan_sweep(options, VARY, SweepOptions()), options, "rates")


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
    collected = best_first(map(stored_result, four))
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
        ({"status": "stopped", "stop_reason": {"kind": "patience", "metric": "accuracy", "count": 3}}, True),
        ({"status": "stopped", "stop_reason": {"kind": "target", "detail": "accuracy=0.9"}}, True),
        ({"status": "stopped", "stop_reason": {"kind": "time", "detail": "1h"}}, True),
        ({"status": "stopped", "stop_reason": {"kind": "cost", "detail": "5"}}, False),
        ({"status": "stopped", "stop_reason": {"kind": "tracker", "detail": "wandb"}}, False),
        ({"status": "stopped", "stop_reason": {"kind": "signal", "detail": "SIGINT"}}, False),
        ({"status": "failed", "error": "boom"}, False),
        ({}, False),
    ],
)
def test_stopped_and_failed_trials_are_resumed(summary: dict[str, Any], over: bool, tmp_path: Path) -> None:
    trial = trials(tmp_path)[0]
    write_trial(trial, [], **summary)
    assert is_over(stored_result(trial)) is over


def started(storage: Path) -> TrainConfig:
    """Start a sweep in storage, and return the options that resume it."""
    options = config(storage)
    store = run_store(str(storage), "rates")
    write_config(store, options)
    write_sweep(store, plan_sweep(options, VARY, SweepOptions()))
    return config(storage, resume=True)


def test_a_sweep_is_resumed_with_its_original_points(tmp_path: Path) -> None:
    options = started(tmp_path)
    before = plan_sweep(config(tmp_path), VARY, SweepOptions())
    assert plan_sweep(options, [], SweepOptions()) == plan_sweep(options, VARY, SweepOptions()) == before
    with pytest.raises(UsageError, match=r"started with --vary learning-rate=0\.001,0\.1 optimizer=sgd,adamw and 4 tr"):
        plan_sweep(options, ["epochs=1,2"], SweepOptions())


def test_a_sweep_cannot_be_used_as_a_run_nor_a_run_as_a_sweep(tmp_path: Path) -> None:
    options = started(tmp_path)
    write_trial(trials(tmp_path)[0], [])
    with pytest.raises(UsageError, match="'rates-00' is not a sweep"):
        plan_sweep(config(tmp_path, name="rates-00", resume=True), [], SweepOptions())
    with pytest.raises(UsageError, match=r"'rates-00' is in .* already"):
        check_names_free(plan_sweep(config(tmp_path), VARY, SweepOptions()), str(tmp_path), "rates")
    with pytest.raises(UsageError, match="'rates' is a sweep"):
        train(options)


def test_the_upper_half_passes_each_rung_whoever_comes_first() -> None:
    early = EarlyStopping(num_epochs=16)  # compares after epochs 2, 4 and 8
    assert not early.judge_score("first", 1, 0.1)
    assert not early.judge_score("first", 2, 0.5)
    assert not early.judge_score("better", 2, 0.6)
    assert early.judge_score("worse", 2, 0.54)
    assert not early.judge_score("worse", 3, 0.1), "it was compared there already"
    assert not early.judge_score("median", 3, 0.54)
    assert not early.judge_score("better", 4, 0.6)
    assert early.judge_score("first", 5, 0.5)
    assert not early.judge_score("better", 8, 0.1), "nobody came as far before"


def test_no_trial_is_compared_after_half_of_the_epochs() -> None:
    early = EarlyStopping(num_epochs=50)  # compares after epochs 6, 12 and 24
    for name in ("good", "late"):
        assert not early.judge_score(name, 25, 0.9)
    assert not early.judge_score("good", 49, 0.9)
    assert not early.judge_score("late", 49, 0.1), "one epoch before its end, it may end"


def test_a_trial_whose_metric_is_nan_is_worse_than_any_other_and_no_measure_for_it() -> None:
    judge = Judge(BestMetric("loss", is_lower_better=True), EarlyStopping(num_epochs=16), study=None)
    assert not judge.judge_value(0, "nan", 2, math.nan), "it is the first"
    assert not judge.judge_value(1, "poor", 2, 9.0)
    assert judge.judge_value(2, "nan too", 2, math.nan)
    assert judge.judge_value(3, "poorer", 2, 10.0)


def test_chance_tries_each_point_on_all_folds(tmp_path: Path) -> None:
    vary = ["learning-rate=log:0.01..1", "validation-fold=1/3,2/3,3/3"]
    planned = plan_sweep(config(tmp_path), vary, SweepOptions(trials=2))
    rates, folds = zip(*(point.values() for point in planned.points), strict=True)
    assert folds == ("1/3", "2/3", "3/3") * 2 and len(set(rates[:3])) == len(set(rates[3:])) == 1

    store = run_store(str(tmp_path), "rates")
    write_config(store, config(tmp_path))
    write_sweep(store, planned)
    assert plan_sweep(config(tmp_path, resume=True), vary, SweepOptions(trials=2)) == planned, (
        "the same words resume it"
    )


@pytest.mark.parametrize("num_epochs", [0, 1, 2, 3])
def test_a_short_sweep_compares_from_its_first_epoch_on(num_epochs: int) -> None:
    early = EarlyStopping(num_epochs)
    assert not early.judge_score("good", 1, 0.9)
    assert early.judge_score("bad", 1, 0.1) is (num_epochs > 1)


def test_the_python_function_has_the_options_of_the_command() -> None:
    of_command = set(inspect.signature(COMMANDS["sweep"]).parameters) - {"config", "sweeping", "png"}
    of_function = inspect.signature(raytrain.sweep).parameters
    assert of_command == {"vary", "trust"}
    defaults = {field.name: field.default for field in dataclasses.fields(SweepOptions)}
    assert {name: of_function[name].default for name in defaults} == defaults
    assert {*of_command, *defaults} < set(of_function)


def test_wrong_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(raytrain.UsageError, match="--trials is 0"):
        raytrain.sweep(config(tmp_path), vary=["learning-rate=log:0.001..0.1"], trials=0, early_stopping=False)
    options = TrainConfig(data="images", storage=str(tmp_path), batch_size=8)
    with pytest.raises(UsageError, match="--learning-rate is not given"):
        sweep(options, ["epochs=1,2"], SweepOptions())
    (tmp_path / "mine.py").write_text("train = 5")
    for more, sentence in (
        ({"warmup_epochs": 2}, "--warmup-epochs is 2 and --epochs 1"),
        ({"model": "resnet19"}, "--model resnet19"),
        ({"loop": f"{tmp_path}/mine.py:train"}, "mine.py:train is no function"),
    ):
        with pytest.raises(UsageError, match=sentence):
            sweep(dataclasses.replace(options, learning_rate=0.1, **more), ["epochs=1,2"], SweepOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]
