"""Accuracy, classes and confusions, as tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.display.console import bar, class_table, format_count, format_optional, headed_table, key_value_table
from raytrain.display.curves import GREY
from raytrain.trackers.pictures import matrix_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from raytrain.inference.classification_metrics import ClassScore, LabelEvaluation
    from raytrain.inference.evaluate import EvaluationResult


def evaluation_page(result: EvaluationResult, picture: str | None = None) -> RenderableType:
    """The metrics, the classes from the worst on, the most frequent confusions, and the file ``picture``."""
    tables = Columns([_classes(result.per_class), _confusions(result)], padding=(0, 4))
    return Group(key_value_table({**result.summary(), "picture": picture}), *_trained_on(result), Text(), tables)


def label_evaluation_page(result: LabelEvaluation) -> RenderableType:
    """The metrics and the classes, from the worst on, of images that may have several classes each."""
    rows: list[list[RenderableType]] = []
    for score in sorted(result.per_class, key=lambda score: _known_first(score.average_precision)):
        values = (score.average_precision, score.threshold, score.precision, score.recall)
        rows.append([score.name, f"{score.images:,}", *(format_optional(value, ".4f") for value in values)])
    table = class_table(("images", "average precision", "threshold", "precision", "recall"), rows, "better")
    return Group(key_value_table(result.summary()), *_trained_on(result), table)


def _trained_on(result: EvaluationResult | LabelEvaluation) -> Iterable[RenderableType]:
    """A warning if the images are not new to the network."""
    if result.trained_on:
        least = "" if result.all_compared else "At least "
        total = format_count(result.images + result.skipped, "image")
        text = f"{least}{result.trained_on:,} of these {total} are training images of the run; new ones are harder."
        yield Text(f"\n{text}", style="yellow")


def _classes(scores: Sequence[ClassScore]) -> RenderableType:
    rows: list[list[RenderableType]] = []
    for score in sorted(scores, key=lambda score: _known_first(score.accuracy)):
        accuracy = format_optional(score.accuracy, ".4f")
        rows.append([score.name, f"{score.images:,}", f"{score.right:,}", accuracy, bar(score.accuracy or 0, 1)])
    return class_table(("images", "correct", "accuracy"), rows, "better")


def _known_first(value: float | None) -> tuple[bool, float]:
    return value is None, value or 0.0


def _confusions(result: EvaluationResult) -> RenderableType:
    if not result.confusions:
        return Text("\nNo image was misclassified.")
    sizes = {score.name: score.images for score in result.per_class}
    rows = [
        (each.truth, each.answer, f"{each.images:,}", f"{each.images / sizes[each.truth]:.1%}")
        for each in result.confusions
    ]
    return headed_table(("true class", "predicted"), ("images", "of the class"), rows)


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
