"""The output of a sweep: the live table, the plain lines, the results and the figure."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType
from torch import nn

from raytrain.display.sweep import SweepTerminalView, live_table, sweep_figure, sweep_page
from raytrain.experiments.sweep_result import SweepResult, SweepSnapshot
from raytrain.experiments.trial_results import TrialResult
from raytrain.recipes import custom
from tests.helpers.stored_runs import add_checkpoint, make_run


def statuses(*changed: TrialResult, dollars: float | None = None) -> SweepSnapshot:
    """How four trials stand: ``changed``, and the others wait."""
    points = [{"learning_rate": rate, "optimizer": name} for rate in (0.001, 0.1) for name in ("sgd", "adamw")]
    waiting = [TrialResult(name=f"rates-{number:02d}", values=point, run_dir="") for number, point in enumerate(points)]
    known = {status.name: status for status in changed}
    trials = tuple(replace(known.get(each.name, each), values=each.values) for each in waiting)
    return SweepSnapshot(trials=trials, dollars=dollars)


def some_started() -> SweepSnapshot:
    running = TrialResult(
        name="rates-00",
        values={},
        run_dir="",
        status="running",
        steps=30,
        epoch=2,
        num_epochs=3,
        loss=0.75,
        value=0.5,
        evaluations=((1, 0.5),),
    )
    failed = TrialResult(
        name="rates-02",
        values={},
        run_dir="",
        status="failed",
        epoch=1,
        num_epochs=3,
        reason="RuntimeError: out of memory",
    )
    return statuses(running, failed)


def text(renderable: RenderableType, width: int = 110) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(renderable)
    return console.export_text()


def test_the_table_shows_each_trial_with_its_values() -> None:
    seen = text(live_table(some_started(), 20))
    rows = {line.split()[0]: line.split() for line in seen.splitlines() if line.strip().startswith("rates-")}
    assert rows["rates-00"] == ["rates-00", "0.001", "sgd", "running", "2/3", "0.750", "0.5000", "–"]
    assert rows["rates-03"][:4] == ["rates-03", "0.1", "adamw", "waiting"]
    assert "1 running, 1 failed, 2 waiting" in seen


def test_dollars_of_each_trial_and_of_the_whole_are_shown_while_it_trains() -> None:
    running = TrialResult(name="rates-00", values={}, run_dir="", status="running", dollars=0.25)
    over = replace(running, name="rates-01", status="finished", dollars=1234.5)
    snapshot = statuses(running, over, dollars=1100.25)
    seen = text(live_table(snapshot, 20))
    costs = {line.split()[0]: line.split()[-1] for line in seen.splitlines() if line.strip().startswith("rates-")}
    assert costs == {"rates-00": "$0.2500", "rates-01": "$1,234.50", "rates-02": "–", "rates-03": "–"}
    assert "1 running, 1 finished, 2 waiting; $1,100.25 for the whole sweep" in seen
    assert "cost" not in text(live_table(some_started(), 20)) and "$" not in text(live_table(some_started(), 20))

    # Without a terminal, and in the end.
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with SweepTerminalView(console) as view:
        view.update(snapshot)
    assert console.file.getvalue().splitlines()[1].endswith("finished  $1,234.50")  # type: ignore[attr-defined]
    seen = text(sweep_page(replace(result(), trials=snapshot.trials, dollars=1100.25), custom()))
    assert "$1,234.50" in seen and "cost of the whole sweep $1,100.25" in seen


def test_a_short_screen_shows_the_trials_that_are_training() -> None:
    seen = text(live_table(statuses(TrialResult(name="rates-03", values={}, run_dir="", status="running")), 1))
    assert "rates-03" in seen and "rates-00" not in seen


def test_without_a_terminal_each_change_is_one_line() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=60)
    with SweepTerminalView(console) as view:
        for _ in range(3):
            view.update(some_started())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 2
    assert (
        lines[0] == "rates-00  learning-rate=0.001 optimizer=sgd  running  epoch 2/3  loss 0.750"
        "  best validation accuracy 0.5000"
    )
    assert lines[1].endswith("(RuntimeError: out of memory)")


def test_a_terminal_keeps_the_last_table_alone_without_how_to_stop() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=110, height=10, legacy_windows=False)
    with SweepTerminalView(console) as view:
        view.update(some_started())
        view.finish(result())
    *_, before, last = console.file.getvalue().split("rates-04")  # type: ignore[attr-defined]
    seen = before[before.rindex("rates-00") :] + last
    assert "rates-03" in seen and "4 finished, 1 failed" in seen
    assert "Ctrl-C" not in seen and "\x1b[2K" not in last, "it is not erased"


def result() -> SweepResult:
    done = [
        TrialResult(
            name=f"rates-{number:02d}",
            values={"learning_rate": 10.0**-number, "optimizer": ("sgd", "adamw")[number % 2], "epochs": 3 + number},
            status="finished",
            value=0.9 - number / 10,
            steps=90,
            seconds=12.0,
            reason=None,
            run_dir="",
            evaluations=tuple((epoch, 0.9 - number / 10 - 0.5 / epoch) for epoch in range(1, 4)),
        )
        for number in range(4)
    ]
    why = "Run 'rates-04' failed: boom. It has no checkpoint yet"
    failed = replace(done[0], name="rates-04", status="failed", value=None, reason=why, evaluations=())
    return SweepResult(
        name="rates", status="finished", best="rates-00", trials=(*done, failed), run_dir="", seconds=60.0
    )


def test_the_epoch_of_a_stopped_trial_is_that_of_its_last_evaluation() -> None:
    stopped = replace(result().trials[0], status="stopped", epoch=3, evaluations=((2, 0.9),))
    seen = text(sweep_page(replace(result(), trials=(stopped,)), custom()))
    assert " evaluated " in seen and " to epoch " in seen
    row = next(line.split() for line in seen.splitlines() if line.startswith(" rates-00"))
    assert row[row.index("stopped") + 1] == "2"


def test_the_results_start_with_the_best_trial_and_show_the_error_of_a_failed_one() -> None:
    seen = text(sweep_page(result(), custom()))
    names = [line.split()[0] for line in seen.splitlines() if line.startswith(" rates-") and ":" not in line]
    assert names == ["rates-00", "rates-01", "rates-02", "rates-03", "rates-04"]
    assert "rates-04 failed: boom" in seen
    assert "The best is rates-00: learning-rate=1 optimizer=sgd epochs=3" in seen


@pytest.mark.parametrize(
    ("options", "trusted"), [({}, False), ({"loop": "mine.py:train"}, True), ({"model": "mine.py:net"}, True)]
)
def test_the_commands_for_the_best_trial_trust_the_code_that_the_user_has_just_run(
    options: dict[str, Any], trusted: bool, tmp_path: Path
) -> None:
    best = custom(storage=str(tmp_path), name="rates-00", mean=(0.5,) * 3, std=(0.5,) * 3, **options)
    make_run(tmp_path, best, "rates-00")
    lines = text(sweep_page(result(), best), width=200).splitlines()
    commands = [line for line in lines if "raytrain " in line and " rates-00 " in line]
    needs_it = ["evaluate", "predict", "export", "serve"] if trusted else []
    assert len(commands) == 5
    assert [line.split("raytrain ")[1].split()[0] for line in commands if " --trust" in line] == needs_it


def test_a_best_checkpoint_that_is_also_the_last_one_is_named_once(tmp_path: Path) -> None:
    best = custom(storage=str(tmp_path), name="rates-00", mean=(0.5,) * 3, std=(0.5,) * 3)
    add_checkpoint(make_run(tmp_path, best, "rates-00"), nn.Linear(2, 2), best)
    seen = text(sweep_page(result(), best), width=400)
    assert seen.count("step-000000001.pt") == 1 and "; it is also its last one." in seen


def test_the_command_that_shows_all_curves_can_be_copied_from_a_narrow_screen() -> None:
    seen = text(sweep_page(result(), custom(), "/home/me/runs/rates/sweep.png"), width=60)
    commands = [line.rstrip() for line in seen.splitlines() if line.startswith("  ")]
    assert any(line.endswith("raytrain compare rates") for line in commands)


def test_no_value_is_cut_on_a_narrow_screen() -> None:
    lines = text(sweep_page(result(), custom()), width=80).splitlines()
    rows = {words[0]: words[1:4] for words in map(str.split, lines) if words and words[0].startswith("rates-0")}
    assert rows["rates-03"] == ["0.001", "adamw", "6"]
    assert "…" not in "".join(lines)


def test_long_names_and_values_are_wrapped_and_numbers_stay_whole() -> None:
    values: dict[str, Any] = {"model": "timm:convnext_tiny.fb_in22k_ft_in1k_384", "learning_rate": 0.0001}
    trained = TrialResult(name="resnet50-imagenet-subset-cosine-mixup-00", values=values, run_dir="", value=0.7512)
    seen = text(live_table(SweepSnapshot(trials=(trained,)), 10), width=80)
    _, _, rows = seen.partition("─\n")
    words = [line.split() for line in rows.splitlines() if len(line.split()) > 1][:-1]
    assert "".join(row[0] for row in words) == trained.name
    assert "".join(row[1] for row in words) == values["model"]
    assert words[-1][2] == "0.0001" and "0.7512" in words[-1] and "…" not in seen


def test_the_figure_has_the_curves_of_all_trials_and_a_panel_for_each_varied_option(tmp_path: Path) -> None:
    figure = sweep_figure(result())
    file = tmp_path / "sweep.png"
    figure.savefig(file, format="png")
    assert file.stat().st_size > 10_000
    curves, *panels = [axes for part in figure.subfigs for axes in part.axes]
    assert len(curves.lines) == 4
    assert [panel.get_xlabel() for panel in panels] == ["learning-rate", "optimizer", "epochs"]
    assert [panel.get_xscale() for panel in panels] == ["log", "linear", "linear"]
    assert np.asarray(panels[0].collections[0].get_offsets()).shape == (4, 2)


def test_the_values_below_a_panel_of_the_figure_do_not_overlap() -> None:
    rates, sizes = (0.1099, 0.1053, 0.4885, 0.8622), (64, 128, 192, 256)
    points = [{"learning_rate": rate, "batch_size": size} for rate, size in zip(rates, sizes, strict=True)]
    trials = [replace(trial, values=point) for trial, point in zip(result().trials, points, strict=False)]
    figure = sweep_figure(replace(result(), trials=tuple(trials)))
    figure.draw_without_rendering()
    _, *panels = [axes for part in figure.subfigs for axes in part.axes]
    for panel in panels:
        boxes = [label.get_window_extent() for label in panel.get_xticklabels()]
        assert all(before.x1 < after.x0 for before, after in pairwise(boxes))
    assert [label.get_text() for label in panels[1].get_xticklabels()] == ["64", "128", "192", "256"]
