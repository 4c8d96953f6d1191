"""Comparing runs: the options that differ, and the results of each run, even if it only has a history."""

from __future__ import annotations

from typing import Any

import pytest

import raytrain
from raytrain.errors import UsageError
from raytrain.experiments.scaling import images_per_s
from raytrain.recipes import cifar10
from raytrain.runs.documents import (
    METRICS,
    SKIPPED,
    SWEEP,
    UNUSED_OPTIONS,
    encode_lines,
    run_store,
    write_config,
    write_json,
)
from raytrain.runs.metric_row import MetricRow, steps_per_epoch
from raytrain.runs.records import read_run
from raytrain.runs.status import RunStatus, write_status

ROWS = [
    {"kind": "step", "step": 10, "epoch": 1, "loss": 2.0, "accuracy": 0.2, "images_per_s": 900.0, "elapsed_s": 3.0},
    {"kind": "evaluation", "step": 16, "epoch": 1, "loss": 1.5, "accuracy": 0.5, "elapsed_s": 5.0},
    {"kind": "step", "step": 20, "epoch": 2, "loss": 1.0, "accuracy": 0.6, "images_per_s": 1000.0, "elapsed_s": 6.0},
    {"kind": "step", "step": 24, "epoch": 2, "loss": None, "accuracy": 0.7, "images_per_s": 1300.0, "elapsed_s": 7.0},
]


def make_run(storage: str, name: str, rows: list[dict[str, Any]], **options: Any) -> None:
    store = run_store(storage, name)
    write_config(store, cifar10(name=name, data="d", **options).scaled_to(2))
    store.put(METRICS, encode_lines(rows))


@pytest.fixture
def storage(tmp_path: Any) -> str:
    storage = str(tmp_path)
    make_run(storage, "first", ROWS)
    make_run(storage, "second", ROWS[:1], learning_rate=0.05, translate=0)
    run_store(storage, "second").put(SKIPPED, b'{"key": "cat/a.jpg", "reason": "truncated"}\n')
    make_run(storage, "third", [])
    return storage


def test_only_the_options_that_differ_are_compared(storage: str) -> None:
    first, second = raytrain.compare(["first", "second"], storage=storage)
    assert first.options == {"learning_rate": 0.2, "translate": 4}
    assert second.options == {"learning_rate": 0.05, "translate": 0}
    assert [run.options for run in raytrain.compare(["first", "third"], storage=storage)] == [{}, {}]


def test_options_that_a_loop_does_not_use_are_no_difference(storage: str) -> None:
    # The second run has a loop of its own, which builds another optimizer: the rate of its recipe changes nothing.
    write_json(run_store(storage, "second"), UNUSED_OPTIONS, {"options": ["learning_rate", "momentum"]})
    first, second = raytrain.compare(["first", "second"], storage=storage)
    assert (first.options, second.options) == ({"translate": 4}, {"translate": 0})

    # Of three runs, the two that use it differ; a document of another version is left out.
    make_run(storage, "fourth", ROWS, learning_rate=0.3)
    options = [
        run.options.get("learning_rate") for run in raytrain.compare(["first", "second", "fourth"], storage=storage)
    ]
    assert options == [0.2, None, 0.3]
    write_json(run_store(storage, "second"), UNUSED_OPTIONS, {"options": 7})
    assert "learning_rate" in raytrain.compare(["first", "second"], storage=storage)[0].options


def test_the_results_come_from_the_history(storage: str) -> None:
    first, second, third = raytrain.compare(["first", "second", "third"], storage=storage)
    assert {name: vars(first)[name] for name in ("name", "steps", "epochs", "seconds", "images_per_s", "skipped")} == {
        "name": "first",
        "steps": 24,
        "epochs": 1.5,
        "seconds": 7.0,
        "images_per_s": 1000.0,
        "skipped": 0,
    }
    assert (first.validation_accuracy, first.validation_loss, first.loss) == (0.5, 1.5, None)
    assert (second.validation_accuracy, second.loss, second.skipped) == (None, 2.0, 1)
    assert (third.steps, third.epochs, third.seconds, third.status) == (0, 0, None, "interrupted")


def test_the_speed_of_the_first_steps_counts_in_no_table(storage: str) -> None:
    rows = [
        {"kind": "step", "step": step, "epoch": 1, "elapsed_s": 1.0 * step, "images_per_s": 10.0 if step < 2 else 500.0}
        for step in (1, 10)
    ]
    make_run(storage, "slow-start", rows)
    _, slow_start = raytrain.compare(["first", "slow-start"], storage=storage)
    assert slow_start.images_per_s == images_per_s(read_run(storage, "slow-start").metrics) == 500.0


def test_a_run_that_stopped_after_its_last_row_has_the_steps_and_the_time_of_its_status(storage: str) -> None:
    write_status(run_store(storage, "first"), RunStatus(status="stopped", step=27, num_steps=64, elapsed_s=9.5))
    first, _ = raytrain.compare(["first", "second"], storage=storage)
    assert (first.steps, first.epochs, first.seconds) == (27, 1.69, 9.5)


def test_a_run_that_stopped_in_its_first_epoch_has_a_part_of_an_epoch(storage: str) -> None:
    make_run(storage, "early", [{"kind": "step", "step": 1, "epoch": 1, "elapsed_s": 1.0, "loss": 2.0}])
    write_status(run_store(storage, "early"), RunStatus(status="stopped", step=6, num_steps=24, num_epochs=2))
    _, early = raytrain.compare(["first", "early"], storage=storage)
    assert (early.steps, early.epochs) == (6, 0.5)


def test_a_run_that_was_evaluated_before_its_first_step_is_compared(storage: str) -> None:
    make_run(storage, "before", [{"kind": "evaluation", "step": 0, "epoch": 1, "accuracy": 0.1, "elapsed_s": 1.0}])
    _, before = raytrain.compare("first", "before", storage=storage)
    assert (before.steps, before.epochs, before.validation_accuracy) == (0, 0.0, 0.1)


def test_fewer_than_two_runs_are_refused(storage: str) -> None:
    with pytest.raises(UsageError, match="two runs or more, or a sweep, each named once"):
        raytrain.compare(["first"], storage=storage)
    with pytest.raises(UsageError, match=r"no run 'frist' .*did you mean first"):
        raytrain.compare(["first", "frist"], storage=storage)
    with pytest.raises(UsageError, match=r"of type ComparedRun; give their names, as in raytrain\.compare"):
        raytrain.compare(raytrain.compare(["first", "second"], storage=storage)[0], storage=storage)  # pyright: ignore[reportArgumentType]


def test_a_sweep_is_named_alone(storage: str) -> None:
    for name in ("rates", "rates-00", "rates-01"):
        make_run(storage, name, ROWS)
    write_json(run_store(storage, "rates"), SWEEP, {"vary": ["seed=1,2"], "points": [{"seed": 1}, {"seed": 2}]})
    assert [run.name for run in raytrain.compare("rates", storage=storage)] == ["rates-00", "rates-01"]
    with pytest.raises(UsageError, match=r"no run 'ratse' .*did you mean rates"):
        raytrain.compare("ratse", storage=storage)


@pytest.mark.parametrize(("steps", "log_every", "last"), [(7, 1, 20), (7, 10, 42), (195, 10, 9750), (1, 1, 3)])
def test_the_steps_per_epoch_are_derived_from_the_history(steps: int, log_every: int, last: int) -> None:
    rows = [
        MetricRow(kind="step", step=step, epoch=-(-step // steps)) for step in range(log_every, last + 1, log_every)
    ]
    rows += [MetricRow(kind="evaluation", step=steps * epoch, epoch=epoch) for epoch in range(1, last // steps + 1)]
    assert steps_per_epoch(rows) == steps
