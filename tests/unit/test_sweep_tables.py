"""What a person sees of a sweep, and how it is gone on with. Through Ray: tests/integration/test_sweep.py."""

from __future__ import annotations

import inspect
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console, RenderableType

import raytrain
from raytrain import TrainConfig, UsageError, recipes
from raytrain.backends.train import train
from raytrain.cli.commands import COMMANDS
from raytrain.display.sweep_figure import sweep_figure
from raytrain.display.sweep_tables import live_table, results_table
from raytrain.display.sweep_terminal import SweepTerminalView
from raytrain.experiments.sweep.results import SweepResult, TrialResult, collect
from raytrain.experiments.sweep.sweep import sweep
from raytrain.experiments.sweep.trials import (
    EARLY,
    Trial,
    check_names_free,
    is_over,
    plan_sweep,
    trials_of,
    write_sweep,
)
from raytrain.runs import records
from raytrain.runs.layout import SUMMARY
from raytrain.runs.trial_status import TrialStatus
from raytrain.storage.open import open_store

VARY = ["learning-rate=0.001,0.1", "optimizer=sgd,adamw"]


def config(storage: Path, **options: object) -> TrainConfig:
    return recipes.digits(**{"name": "rates", "data": "images", "storage": str(storage), **options})


def trials(storage: Path, **options: object) -> list[Trial]:
    options = config(storage, **options)  # type: ignore[assignment]
    return trials_of(plan_sweep(options, VARY, None), options, "rates")  # type: ignore[arg-type]


def statuses() -> dict[str, TrialStatus]:
    running = TrialStatus(
        status="running", step=30, num_steps=90, epoch=2, num_epochs=3, loss=0.75, accuracy=0.5, num_evaluations=1
    )
    failed = TrialStatus(status="failed", epoch=1, num_epochs=3, reason="RuntimeError: out of memory")
    return {"rates-00": running, "rates-02": failed}


def text(renderable: RenderableType, width: int = 110) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def test_the_table_shows_each_trial_with_its_values(tmp_path: Path) -> None:
    seen = text(live_table(trials(tmp_path), statuses(), 20))
    rows = {line.split()[0]: line.split() for line in seen.splitlines() if line.strip().startswith("rates-")}
    assert rows["rates-00"] == ["rates-00", "0.001", "sgd", "running", "2/3", "0.750", "0.5000", "–"]
    assert rows["rates-03"][:4] == ["rates-03", "0.1", "adamw", "waiting"]
    assert "1 running, 1 failed, 2 waiting" in seen


def test_a_short_screen_shows_those_that_train(tmp_path: Path) -> None:
    seen = text(live_table(trials(tmp_path), {"rates-03": TrialStatus(status="running")}, 1))
    assert "rates-03" in seen and "rates-00" not in seen


def test_without_a_terminal_each_change_is_one_line(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=60)
    with SweepTerminalView(console) as view:
        for _ in range(3):
            view.update(trials(tmp_path), statuses())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2
    assert (
        lines[0]
        == "rates-00  learning-rate=0.001 optimizer=sgd  running  epoch 2/3  loss 0.750  best test accuracy 0.5000"
    )
    assert lines[1].endswith("(RuntimeError: out of memory)")


def result() -> SweepResult:
    done = [
        TrialResult(
            name=f"rates-{number:02d}",
            values={"learning_rate": 10.0**-number, "optimizer": ("sgd", "adamw")[number % 2], "epochs": 3 + number},
            status="finished",
            accuracy=0.9 - number / 10,
            steps=90,
            seconds=12.0,
            reason=None,
            run_dir="",
            evaluations=tuple((epoch, 0.9 - number / 10 - 0.5 / epoch) for epoch in range(1, 4)),
        )
        for number in range(4)
    ]
    failed = replace(done[0], name="rates-04", status="failed", accuracy=None, reason="boom", evaluations=())
    return SweepResult(
        name="rates", status="finished", best="rates-00", trials=(*done, failed), run_dir="", seconds=60.0
    )


def test_the_results_begin_with_the_best_and_say_why_one_failed() -> None:
    seen = text(results_table(result()))
    names = [line.split()[0] for line in seen.splitlines() if line.startswith(" rates-") and ":" not in line]
    assert names == ["rates-00", "rates-01", "rates-02", "rates-03", "rates-04"]
    assert "rates-04 failed: boom" in seen
    assert "The best is rates-00: learning-rate=1 optimizer=sgd epochs=3" in seen


def test_on_a_narrow_screen_no_value_is_cut() -> None:
    lines = text(results_table(result()), width=80).splitlines()
    rows = {words[0]: words[1:4] for words in map(str.split, lines) if words and words[0].startswith("rates-0")}
    assert rows["rates-03"] == ["0.001", "adamw", "6"]
    assert "…" not in "".join(lines)


def test_the_picture_has_the_curves_of_all_and_a_panel_for_each_varied_option(tmp_path: Path) -> None:
    figure = sweep_figure(result())
    file = tmp_path / "sweep.png"
    figure.savefig(file, format="png")
    assert file.stat().st_size > 10_000
    curves, *panels = [axes for part in figure.subfigs for axes in part.axes]
    assert len(curves.lines) == 4
    assert [panel.get_xlabel() for panel in panels] == ["learning-rate", "optimizer", "epochs"]
    assert [panel.get_xscale() for panel in panels] == ["log", "linear", "linear"]
    assert np.asarray(panels[0].collections[0].get_offsets()).shape == (4, 2)


def leave(trial: Trial, accuracies: list[float], **summary: object) -> None:
    """The documents that a trial leaves."""
    store = records.run_store(trial.config.storage, trial.name)
    records.write_config(store, trial.config)
    rows = [{"kind": "evaluation", "step": n, "epoch": n, "accuracy": a} for n, a in enumerate(accuracies, start=1)]
    store.put("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    if summary:
        records.write_json(store, SUMMARY, dict(summary))


def test_results_come_from_storage_the_best_first(tmp_path: Path) -> None:
    four = trials(tmp_path)
    leave(four[0], [0.2, 0.6, 0.4], status="finished", steps=9)
    leave(four[1], [0.5, 0.7], status="stopped", stop_reason="Ctrl-C")
    leave(four[2], [], status="failed", error="boom")
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
        ({"status": "stopped", "stop_reason": f"{EARLY}: test accuracy 0.1"}, True),
        ({"status": "stopped", "stop_reason": "Ctrl-C"}, False),
        ({"status": "failed", "error": "boom"}, False),
        ({}, False),
    ],
)
def test_what_was_stopped_or_failed_is_gone_on_with(summary: dict[str, object], over: bool, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    if summary:
        records.write_json(store, SUMMARY, summary)
    assert is_over(store) is over


def begun(storage: Path) -> TrainConfig:
    """A sweep that was begun, and is to be gone on with."""
    options = config(storage)
    store = records.run_store(str(storage), "rates")
    records.write_config(store, options)
    write_sweep(store, plan_sweep(options, VARY, None))
    return config(storage, resume=True)


def test_a_sweep_is_gone_on_with_as_it_was_begun(tmp_path: Path) -> None:
    options = begun(tmp_path)
    before = plan_sweep(config(tmp_path), VARY, None)
    assert plan_sweep(options, [], None) == plan_sweep(options, VARY, None) == before
    with pytest.raises(
        UsageError, match=r"begun with --vary learning-rate=0\.001,0\.1 optimizer=sgd,adamw and 4 trials"
    ):
        plan_sweep(options, ["epochs=1,2"], None)


def test_a_sweep_and_a_run_are_not_taken_for_each_other(tmp_path: Path) -> None:
    options = begun(tmp_path)
    leave(trials(tmp_path)[0], [])
    with pytest.raises(UsageError, match="'rates-00' is no sweep"):
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
