"""A sweep as a figure: the accuracies of all trials, and each trial's best against every varied option."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raytrain.display.png import GREY, ORANGE, plain_axes
from raytrain.errors import UsageError, option_name
from raytrain.experiments.sweep.results import SweepResult, TrialResult
from raytrain.experiments.sweep.trials import as_typed, shown
from raytrain.runs.printable import one_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BEST, _OTHER = ORANGE, "#8fb7d9"
_PANELS_PER_ROW = 3
_FEW_VALUES = 5  # up to so many values, each one is labelled
_DECADES = 1.5  # values that span more have a logarithmic axis


def sweep_figure(result: SweepResult) -> Figure:
    """The curves of all trials, the best one in orange, and below them a plot for each varied option.

    Raises UsageError if no trial was evaluated.
    """
    from matplotlib.figure import Figure

    trials = [trial for trial in result.trials if trial.evaluations]
    if not trials:
        raise UsageError(
            f"No trial of sweep {result.name!r} was evaluated, so there is nothing to draw; trials are evaluated every "
            "--evaluate-every epochs."
        )
    names = list(trials[0].values)
    num_rows = math.ceil(len(names) / _PANELS_PER_ROW)
    figure = Figure(figsize=(9, 4.5 + 3 * num_rows), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(4.5, 3 * num_rows))
    above, below = parts
    _curves(above.add_subplot(), trials, result.best)
    for place, name in enumerate(names, start=1):
        _against(below.add_subplot(num_rows, min(len(names), _PANELS_PER_ROW), place), trials, name, result.best)
    best = [f"    best: {trial.name}, {as_typed(trial.values)}" for trial in trials if trial.name == result.best]
    figure.suptitle("".join([result.name, *best]), x=0.01, ha="left", weight="bold", fontsize=10, parse_math=False)
    return figure


def _curves(axes: Axes, trials: Sequence[TrialResult], best: str | None) -> None:
    """Accuracy over the epochs, a line for each trial with the trial's number at its end."""
    from matplotlib.ticker import MaxNLocator

    for trial in reversed(trials):  # the best is drawn last, on top of the others
        epochs, accuracies = zip(*trial.evaluations, strict=True)
        color, width = (_BEST, 2.0) if trial.name == best else (_OTHER, 1.2)
        axes.plot(epochs, accuracies, marker="o", markersize=3.5, color=color, linewidth=width)
        axes.annotate(
            trial.name.rpartition("-")[2],
            (epochs[-1], accuracies[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=_BEST if trial.name == best else GREY,
        )
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    plain_axes(axes)
    axes.set_ylabel("test accuracy")


def _against(axes: Axes, trials: Sequence[TrialResult], name: str, best: str | None) -> None:
    """The best accuracy of each trial against its value of one option."""
    values = [trial.values[name] for trial in trials]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    places = _number_axis(axes, numbers) if len(numbers) == len(values) else _name_axis(axes, list(map(shown, values)))
    colours = [_BEST if trial.name == best else _OTHER for trial in trials]
    axes.scatter(places, [trial.accuracy or 0.0 for trial in trials], c=colours, s=28, zorder=3)
    axes.set_xlabel(option_name(name))
    plain_axes(axes)
    axes.set_ylabel("best test accuracy")


def _number_axis(axes: Axes, numbers: Sequence[float]) -> Sequence[float]:
    """Prepare the x axis for numbers; gives the place of each."""
    if min(numbers) > 0 and math.log10(max(numbers) / min(numbers)) > _DECADES:
        axes.set_xscale("log")
    elif len(set(numbers)) <= _FEW_VALUES:
        axes.set_xticks(sorted(set(numbers)), [shown(number) for number in sorted(set(numbers))])
    return numbers


def _name_axis(axes: Axes, names: Sequence[str]) -> Sequence[float]:
    """Prepare the x axis for names; gives the place of each."""
    different = list(dict.fromkeys(names))
    axes.set_xticks(range(len(different)), list(map(one_line, different)), parse_math=False)
    axes.set_xlim(-0.5, len(different) - 0.5)
    return [different.index(name) for name in names]
