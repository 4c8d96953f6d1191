"""Accuracy, classes and confusions, as tables and as a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.bar import Bar
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.console import format_count, format_optional, key_value_table
from raytrain.display.curves import GREY
from raytrain.runs.redact import one_line
from raytrain.trackers.pictures import matrix_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from raytrain.inference.classification_metrics import ClassScore
    from raytrain.inference.evaluate import EvaluationResult
    from raytrain.inference.label_predictions import LabelEvaluation

_NUM_CLASSES_SHOWN = 20
_BAR_WIDTH = 16


def evaluation_page(result: EvaluationResult, picture: str | None = None) -> RenderableType:
    """The metrics, the classes from the worst on, the most frequent confusions, and the file ``picture``."""
    tables = Columns([_classes(result.per_class), _confusions(result)], padding=(0, 4))
    return Group(key_value_table({**result.summary(), "picture": picture}), *_trained_on(result), Text(), tables)


def label_evaluation_page(result: LabelEvaluation) -> RenderableType:
    """The metrics and the classes, from the worst on, of images that may have several classes each."""
    table = Table("class", box=box.SIMPLE_HEAD)
    for name in ("images", "average precision", "threshold", "precision", "recall"):
        table.add_column(name, justify="right")
    worst_first = sorted(result.per_class, key=lambda score: _or_infinite(score.average_precision))
    for score in worst_first[:_NUM_CLASSES_SHOWN]:
        values = (score.average_precision, score.threshold, score.precision, score.recall)
        cells = [format_optional(value, ".4f") for value in values]
        table.add_row(Text(one_line(score.name)), f"{score.images:,}", *cells)
    return Group(key_value_table(result.summary()), *_trained_on(result), table, *_more(len(result.per_class)))


def _trained_on(result: EvaluationResult | LabelEvaluation) -> Iterable[RenderableType]:
    """A warning if the images are not new to the network."""
    if result.trained_on:
        least = "" if result.all_compared else "At least "
        total = format_count(result.images + result.skipped, "image")
        text = f"{least}{result.trained_on:,} of these {total} are training images of the run; new ones are harder."
        yield Text(f"\n{text}", style="yellow")


def _classes(scores: Sequence[ClassScore]) -> RenderableType:
    table = Table("class", box=box.SIMPLE_HEAD)
    for name in ("images", "correct", "accuracy"):
        table.add_column(name, justify="right")
    table.add_column(width=_BAR_WIDTH)
    worst_first = sorted(scores, key=lambda score: _or_infinite(score.accuracy))
    for score in worst_first[:_NUM_CLASSES_SHOWN]:
        bar = Bar(1, 0, score.accuracy or 0, width=_BAR_WIDTH, color="cyan")
        table.add_row(
            Text(one_line(score.name)),
            f"{score.images:,}",
            f"{score.right:,}",
            format_optional(score.accuracy, ".4f"),
            bar,
        )
    return Group(table, *_more(len(scores)))


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None else value


def _more(num_classes: int) -> list[RenderableType]:
    num_more = num_classes - _NUM_CLASSES_SHOWN
    return [Text(f" and {num_more:,} better classes; --json lists them all", style="dim")] if num_more > 0 else []


def _confusions(result: EvaluationResult) -> RenderableType:
    if not result.confusions:
        return Text("\nNo image was misclassified.")
    table = Table("true class", "predicted", box=box.SIMPLE_HEAD)
    table.add_column("images", justify="right")
    table.add_column("of the class", justify="right")
    sizes = {score.name: score.images for score in result.per_class}
    for confusion in result.confusions:
        fraction = confusion.images / sizes[confusion.truth]
        table.add_row(
            Text(one_line(confusion.truth)),
            Text(one_line(confusion.answer)),
            f"{confusion.images:,}",
            f"{fraction:.1%}",
        )
    return table


_MAX_CLASSES_SCORED = 30


def confusion_figure(result: EvaluationResult) -> Figure:
    """The confusion matrix as trackers show it, and up to 30 classes the accuracy of each class on the right."""
    figure = matrix_figure(result.confusion_matrix, result.classes)
    axes = figure.axes[0]
    if len(result.classes) <= _MAX_CLASSES_SCORED:
        _write_accuracies(axes, [score.accuracy for score in result.per_class])
    correct = "" if result.accuracy is None else f"{result.accuracy:.2%} of "
    title = f"{result.run}    {correct}{result.images:,} images"
    axes.set_title(title, loc="left", weight="bold", pad=12)
    return figure


def _write_accuracies(axes: Axes, accuracies: Sequence[float | None]) -> None:
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(accuracies)), [format_optional(value, ".1%") for value in accuracies], fontsize=9)
    right.tick_params(length=0, colors=GREY)
    right.spines["right"].set_visible(False)
    right.set_ylabel("accuracy", color=GREY, labelpad=8)
