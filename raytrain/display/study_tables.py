"""What a study shows in the terminal: a table of its sizes, its two figures, and what a doubling of the workers gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.plots import Plot, Series
from raytrain.display.tables import RUN_STYLES
from raytrain.display.terminal import duration, side_by_side
from raytrain.experiments.scaling import curve
from raytrain.experiments.study import StudyResult

_HEIGHT = 10  # lines of a figure


def study_page(study: StudyResult) -> RenderableType:
    """The whole page; of a study that was stopped, what is known of the sizes that are finished, and how to go on."""
    compared = study.summary()
    parts: list[RenderableType] = [_table(compared)]
    if study.histories:
        parts += [_figures(study, compared), Text()]
    if len(study.histories) > 1:
        parts += [Text(line, style="bold") for line in (_gains(compared), _spread(compared)) if line]
    left = [f"{size['run']} is {size['status']}" for size in compared["sizes"] if size["status"] != "finished"]
    if left:
        parts += [Text(f"{', '.join(left)}; the same command goes on with the study.", style="yellow")]
    return Group(*parts)


def _table(compared: Mapping[str, Any]) -> RenderableType:
    target = compared["target_accuracy"]
    to_target = "time to\naccuracy" if target is None else f"time to\n{target:.3f}"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("workers", "batch", "rate", "images/s", "gain a\ndoubling", to_target, "gain a\ndoubling", "test\naccuracy"):
        table.add_column(heading, justify="right", vertical="bottom", no_wrap=True)
    for size in compared["sizes"]:
        table.add_row(
            str(size["workers"]),
            f"{size['batch_size']:,}",
            f"{size['learning_rate']:g}",
            _known(size["images_per_s"], ",.0f"),
            _known(size["images_per_s_gain"], "+.0%"),
            "–" if size["seconds_to_target"] is None else duration(size["seconds_to_target"]),
            _known(size["time_gain"], "+.0%"),
            _known(size["test_accuracy"], ".4f"),
        )
    return table


def _figures(study: StudyResult, compared: Mapping[str, Any]) -> RenderableType:
    """Accuracy over the time of training, a line for each size; images/s over the workers, beside what would be in proportion."""
    lines: list[Series] = []
    for number, (workers, rows) in enumerate(study.histories.items()):
        tested = curve(rows, "evaluation")
        lines.append(Series(f"on {workers}", RUN_STYLES[number % len(RUN_STYLES)], tested.seconds, tested.accuracies))
    sizes = [size for size in compared["sizes"] if size["images_per_s"]]
    workers, speeds = [size["workers"] for size in sizes], [size["images_per_s"] for size in sizes]
    linear = Series("linear", "dim", workers, [speeds[0] * size / workers[0] for size in workers])
    measured = Series("measured", "cyan", workers, speeds, mark="●")
    return side_by_side(
        Plot("accuracy", lines, _HEIGHT, last_x="{:,.0f} s of training"),
        Plot("images/s", [linear, measured], _HEIGHT, last_x="{:,.0f} workers"),
    )


def _gains(compared: Mapping[str, Any]) -> str:
    target = compared["target_accuracy"]
    found = {"images/s": compared["images_per_s_gain"], f"time to an accuracy of {target or 0:.3f}": compared["time_gain"]}
    told = [f"{name} {gain:+.0%}" for name, gain in found.items() if gain is not None]
    return f"A doubling of the workers: {', '.join(told)}." if told else ""


def _spread(compared: Mapping[str, Any]) -> str:
    spread = compared["accuracy_spread"]
    return "" if spread is None else f"The final accuracies lie within {100 * spread:.1f} percentage points."


def _known(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"
