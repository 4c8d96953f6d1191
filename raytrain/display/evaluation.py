"""Accuracy, classes and confusions, as tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.display.console import bar, class_table, format_optional, headed_table, key_value_table
from raytrain.display.curves import GREY
from raytrain.errors import format_count
from raytrain.trackers.confusion_matrix import matrix_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raytrain.inference.classification_metrics import LabelEvaluation
    from raytrain.inference.evaluate import EvaluationResult

_MAX_CLASSES_SCORED = 30  # up to as many classes have their accuracy in the figure


def evaluation_page(result: EvaluationResult, picture: str | None = None) -> RenderableType:
    """Return tables of the metrics, of the classes (the worst first), and of the most frequent confusions.

    ``picture`` is the path of the figure, which is named if it is given.
    """
    # Classes, the worst first; those without images have no accuracy and come last.
    rows: list[list[RenderableType]] = []
    for score in sorted(result.per_class, key=lambda score: _known_first(score.accuracy)):
        accuracy = format_optional(score.accuracy, ".4f")
        rows.append([score.name, f"{score.images:,}", f"{score.right:,}", accuracy, bar(score.accuracy or 0, 1)])
    classes = class_table(("images", "correct", "accuracy"), rows, "better")

    # Confusions, beside the classes.
    confusions: RenderableType = Text("\nNo image was misclassified.")
    if result.confusions:
        num_images = {score.name: score.images for score in result.per_class}
        pairs = [
            (pair.truth, pair.answer, f"{pair.images:,}", f"{pair.images / num_images[pair.truth]:.1%}")
            for pair in result.confusions
        ]
        confusions = headed_table(("true class", "predicted"), ("images", "of the class"), pairs)

    tables = Columns([classes, confusions], padding=(0, 4))

    # The metrics and what was evaluated, above both; the accuracy has its interval beside it.
    facts = {**_summary(result), **result.metrics, "picture": picture}
    del facts["interval_groups"], facts["all_compared"]  # shown with the interval, and as a warning
    if result.accuracy is not None and result.accuracy_interval is not None:
        low, high = result.accuracy_interval
        groups = "" if result.interval_groups is None else f" over {result.interval_groups:,} groups"
        facts["accuracy"] = f"{result.accuracy:.4f} (95 % interval{groups}: {low:.4f} to {high:.4f})"
    return Group(key_value_table(facts), *_warnings(result), Text(), tables)


def label_evaluation_page(result: LabelEvaluation) -> RenderableType:
    """Return the metrics and the classes, the worst first, for images that may have several classes each."""
    # Classes, the worst first; those without images have no average precision and come last.
    rows: list[list[RenderableType]] = []
    for score in sorted(result.per_class, key=lambda score: _known_first(score.average_precision)):
        values = (score.average_precision, score.threshold, score.precision, score.recall)
        rows.append([score.name, f"{score.images:,}", *(format_optional(value, ".4f") for value in values)])
    table = class_table(("images", "average precision", "threshold", "precision", "recall"), rows, "better")
    facts = {**_summary(result), **result.metrics}
    del facts["all_compared"]  # shown as a warning
    return Group(key_value_table(facts), *_warnings(result), table)


def _summary(result: EvaluationResult | LabelEvaluation) -> dict[str, Any]:
    """Return the summary of an evaluation, in which the images are named: a run's own are a part of its folder."""
    facts = result.summary()
    part = facts.pop("part")
    return facts if part is None else {**facts, "data": f"{part} images of the run, in {result.data}"}


def _known_first(value: float | None) -> tuple[bool, float]:
    """Return a key by which known values are sorted, the lowest first, before unknown ones."""
    return value is None, value or 0.0


def _warnings(result: EvaluationResult | LabelEvaluation) -> Iterable[RenderableType]:
    """Yield a warning if the network was, or may have been, trained on some images, so that metrics are too good."""
    if result.trained_on:
        at_least = "" if result.all_compared else "At least "
        total = format_count(result.images + result.skipped, "image")
        text = f"{at_least}{result.trained_on:,} of these {total} are training images of the run; new ones are harder."
        yield Text(f"\n{text}", style="yellow")
    elif result.all_compared is False:
        text = "Some of these images may be training images of the run: not all files could be compared with those."
        yield Text(f"\n{text}", style="yellow")


def confusion_figure(result: EvaluationResult) -> Figure:
    """Return the confusion matrix as trackers show it; up to 30 classes have their accuracy on the right.

    Example: ``confusion_figure(raytrain.evaluate("first")).savefig("confusion.png")``
    """
    figure = matrix_figure(result.confusion, result.classes)
    axes = figure.axes[0]

    # A second axis on the right, whose labels are the accuracies of the rows.
    if len(result.classes) <= _MAX_CLASSES_SCORED:
        accuracies = [format_optional(score.accuracy, ".1%") for score in result.per_class]
        right_axis = axes.secondary_yaxis("right")
        right_axis.set_yticks(range(len(accuracies)), accuracies, fontsize=9)
        right_axis.tick_params(length=0, colors=GREY)
        right_axis.spines["right"].set_visible(False)
        right_axis.set_ylabel("accuracy", color=GREY, labelpad=8)

    correct = "" if result.accuracy is None else f"{result.accuracy:.2%} of "
    axes.set_title(f"{result.run}    {correct}{result.images:,} images", loc="left", weight="bold", pad=12)
    return figure
