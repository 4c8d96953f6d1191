"""The PNG figures of runs and evaluations: their contents and their files."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from raytrain.display.curves import comparison_figure, curve_figure, save_png
from raytrain.display.evaluation import confusion_figure
from raytrain.errors import UsageError
from raytrain.inference.classification_metrics import EvaluationResult, Int64s, score
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.records import RunRecord
from raytrain.storage.open import check_output, open_store
from tests.helpers.run_records import finished

pytestmark = pytest.mark.not_quick  # matplotlib takes a second a figure


def record(name: str, num_epochs: int = 4, steps_per_epoch: int = 20) -> RunRecord:
    """Make the record of a run that is evaluated after each epoch and logs every fifth step."""
    rows: list[MetricRow] = []
    for step in range(5, num_epochs * steps_per_epoch + 1, 5):
        row = MetricRow(
            kind="step",
            step=step,
            epoch=-(-step // steps_per_epoch),
            elapsed_s=step / 2,
            learning_rate=0.1,
            metrics={"loss": 2 / step, "accuracy": 1 - 2 / step},
        )
        rows.append(row)
        if step % steps_per_epoch == 0:
            rows.append(replace(row, kind="evaluation", learning_rate=None))
    return finished(name, rows)


def evaluation(num_classes: int, seed: int = 0) -> EvaluationResult:
    random = np.random.default_rng(seed)
    truth = random.integers(0, num_classes, 40 * num_classes)
    answers = np.where(random.random(len(truth)) < 0.7, truth, random.integers(0, num_classes, len(truth)))
    classes = [f"class {label}" for label in range(num_classes)]
    return result(truth, answers, classes)


def result(truth: Int64s, answers: Int64s, classes: list[str]) -> EvaluationResult:
    about = {"run": "first", "data": "images", "checkpoint": "step-1.pt", "skipped": 0}
    return score(truth, answers, np.ones(len(truth)), classes, **about)


def drawn(axes: Axes) -> list[tuple[str, list[float], list[float]]]:
    return [(str(line.get_label()), list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]  # pyright: ignore


def test_the_curves_of_a_run_show_its_history() -> None:
    figure = curve_figure(record("first"))
    losses, accuracies, rates = figure.axes[:3]
    (train, test) = drawn(losses)
    assert train[:2] == ("train 0.025", list(range(5, 81, 5)))
    assert test == ("validation 0.025", [20, 40, 60, 80], [0.1, 0.05, 2 / 60, 0.025])
    assert [label for label, _, _ in drawn(accuracies)] == ["train 0.975", "validation 0.975"]
    assert [ys for _, _, ys in drawn(rates)] == [[0.1] * 16]
    assert figure.get_suptitle() == "first    Epoch: 4, Elapsed: 00:00:40"


def test_steps_are_labelled_by_whole_numbers() -> None:
    for figure in (curve_figure(record("a", 4, 5)), comparison_figure([record("a", 1, 5), record("b", 5, 5)])):
        figure.canvas.draw()
        ticks = [float(tick) for tick in figure.axes[0].get_xticks()]
        assert len(ticks) > 2 and all(tick.is_integer() for tick in ticks)


@pytest.mark.parametrize(("num_epochs", "marks"), [(1, [1]), (4, [1, 2, 3, 4]), (90, list(range(5, 91, 5)))])
def test_only_as_many_epochs_are_marked_as_can_be_distinguished(num_epochs: int, marks: list[int]) -> None:
    losses = curve_figure(record("first", num_epochs)).axes[0]
    (epochs,) = losses.child_axes
    assert list(epochs.get_xticks()) == marks
    assert losses.get_xlim() == (0, 20 * num_epochs)
    assert len(losses.patches) == len(marks) // 2


def test_a_run_with_an_incomplete_history_can_be_drawn(tmp_path: Path) -> None:
    short = record("first")
    without_loss = replace(short.metrics[0], metrics={"loss": None, "accuracy": 0.5})
    for rows in (short.metrics[:1], [without_loss], [row for row in short.metrics if row.kind == "step"]):
        save_png(curve_figure(replace(short, metrics=rows)), str(tmp_path / "run.png"))
    with pytest.raises(UsageError, match="'first' has no history yet"):
        curve_figure(replace(short, metrics=[]))


def test_points_at_the_edge_of_the_axes_are_drawn_whole() -> None:
    short = record("first")
    figure = curve_figure(replace(short, metrics=short.metrics[:4]))
    figure.canvas.draw()
    (line,) = figure.axes[0].get_lines()[:1]
    assert line.get_xdata()[-1] == figure.axes[0].get_xlim()[1]  # pyright: ignore
    assert not line.get_clip_on()


def test_the_legend_of_a_loss_that_has_diverged_has_no_last_value() -> None:
    short = record("first")
    lost = replace(short.metrics[-2], step=81, metrics={"loss": None, "accuracy": 0.5})
    figure = curve_figure(replace(short, metrics=[*short.metrics, lost]))
    assert [drawn(axes)[0][0] for axes in figure.axes[:2]] == ["train –", "train 0.500"]


def test_a_run_that_was_only_evaluated_before_its_first_step_can_be_drawn(tmp_path: Path) -> None:
    row = MetricRow(kind="evaluation", step=0, epoch=1, elapsed_s=1.0, metrics={"accuracy": 0.1})
    figure = curve_figure(finished("first", [row]))
    assert drawn(figure.axes[1])[0][2] == [0.1]
    save_png(figure, str(tmp_path / "first.png"))


def test_several_runs_are_drawn_in_the_same_axes_with_their_names() -> None:
    figure = comparison_figure([record("first"), finished("failed", []), record("second", num_epochs=2)])
    losses, accuracies = figure.axes
    assert [(label, xs[-1]) for label, xs, _ in drawn(losses)] == [("first", 80), ("second", 40)]
    assert [xs for _, xs, _ in drawn(accuracies)] == [[20, 40, 60, 80], [20, 40]]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["first", "second"]
    assert len({line.get_color() for line in losses.get_lines()}) == 2


def test_a_long_noisy_run_is_a_line_of_means_before_a_pale_band_and_hides_no_other() -> None:
    losses = [1.0 + (-1) ** step for step in range(1, 10_001)]
    losses[5_000] = 50.0
    rows = [
        MetricRow(kind="step", step=step, epoch=1, metrics={"loss": loss}) for step, loss in enumerate(losses, start=1)
    ]
    panel = curve_figure(finished("long", rows)).axes[0]
    [(_, steps, values)] = drawn(panel)
    assert len(steps) == 500 and values[0] == pytest.approx(1.0) and max(values) < 5
    [band] = panel.collections
    assert band.get_alpha() == 0.2 and band.get_datalim(panel.transData).ymax == 50.0  # no extreme value is lost
    colours = [line.get_color() for line in comparison_figure([finished(name, rows) for name in "ab"]).axes[0].lines]
    assert len(set(colours)) == 2


def test_the_confusion_matrix_of_few_classes_shows_counts_and_accuracies() -> None:
    found = evaluation(5)
    axes = confusion_figure(found).axes[0]
    counts = np.zeros((5, 5), dtype=int)
    for text in axes.texts:
        column, row = text.get_position()
        counts[int(row), int(column)] = int(text.get_text().replace(",", ""))
    assert counts.tolist() == found.confusion_matrix.tolist()
    assert [label.get_text() for label in axes.get_yticklabels()] == list(found.classes)
    (right,) = axes.child_axes
    assert [label.get_text() for label in right.get_yticklabels()] == [
        f"{each.accuracy:.1%}" for each in found.per_class
    ]
    assert axes.get_title(loc="left").startswith(f"first    {found.accuracy:.2%} of 200 images")


def test_the_confusion_matrix_of_many_classes_labels_only_as_many_as_are_legible() -> None:
    hundred = confusion_figure(evaluation(100)).axes[0]
    assert (len(hundred.texts), len(hundred.get_yticklabels())) == (0, 100)
    thousand = confusion_figure(evaluation(1000)).axes[0]
    assert 50 < len(thousand.get_yticklabels()) < 200


def test_the_confusion_matrix_of_very_many_classes_shows_the_darkest_of_neighbouring_cells() -> None:
    classes = [f"class {number}" for number in range(6000)]
    found = result(np.array([0, 1, 3000, 5999]), np.array([0, 1, 1, 5999]), classes)
    figure = confusion_figure(found)
    shades: list[np.ma.MaskedArray[Any, Any]] = [image.get_array() for image in figure.axes[0].images]  # pyright: ignore
    assert [shade.shape for shade in shades] == [(1000, 1000)] * 2
    assert [np.argwhere(shade.filled(0)).tolist() for shade in shades] == [[[0, 0], [999, 999]], [[500, 0]]]


def test_an_evaluation_without_images_has_a_confusion_matrix(tmp_path: Path) -> None:
    nothing = np.array([], np.int64)
    found = result(nothing, nothing, ["cat", "dog"])
    save_png(confusion_figure(found), str(tmp_path / "confusion.png"))


@pytest.mark.parametrize("num_classes", [2, 10, 100])
def test_a_figure_is_a_png_of_a_useful_size(num_classes: int, tmp_path: Path) -> None:
    path = tmp_path / "confusion.png"
    save_png(confusion_figure(evaluation(num_classes)), str(path))
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert 400 <= min(image.size) <= max(image.size) <= 2000


def test_a_figure_can_be_written_to_s3(s3_url: str) -> None:
    save_png(curve_figure(record("first")), f"{s3_url}/first.png")
    assert Image.open(io.BytesIO(open_store(s3_url).get("first.png"))).format == "PNG"


def test_a_figure_must_be_a_png_in_an_existing_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--png is 'curves.jpg'; its name must end in \.png\."):
        check_output("curves.jpg", (".png",), "--png")
    with pytest.raises(UsageError, match="there is no folder"):
        check_output(str(tmp_path / "nowhere" / "curves.png"), (".png",), "--png")
