"""`raytrain look` in the terminal, as a figure, and in a notebook."""

from __future__ import annotations

import base64
import os
import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.config.option_calls import takes_config
from raytrain.data.labels.listing import counted
from raytrain.diagnostics.look import LookResult, look_at
from raytrain.diagnostics.suspicious_labels import LABEL_FILE_SUFFIXES
from raytrain.display.console import UNKNOWN, bar, class_table, headed_table, key_value_table
from raytrain.display.curves import GREY, png_bytes, titled_figure
from raytrain.display.notebook import as_html, is_notebook
from raytrain.errors import format_count
from raytrain.runs.metric_row import NUM_SUSPICIOUS_SHOWN
from raytrain.runs.redact import one_line
from raytrain.storage.open import check_output
from raytrain.trackers.lettering import cut_middle, font_families

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

    from raytrain.config import TrainConfig
    from raytrain.config.option_values import Location
    from raytrain.data.duplicates import Duplicate, Duplicates
    from raytrain.data.images.crop_box import Pixels
    from raytrain.diagnostics.look import ImageSample, MinMedianMax

_NUM_FILES_SHOWN = 5  # of each kind of problem
_COLUMNS = 8  # of the grid of images
_WIDTH, _HEADING, _ROW = 11.0, 0.5, 1.55  # inches: the figure's width, and the heights of a heading and a row of images
_MAX_LETTERS = 20  # in a line of a label, which has the width of an image


@takes_config
def look(config: TrainConfig, *, limit_s: float = 30.0, write_labels: Location | None = None) -> LookResult:
    """Look at the images that a run with these options would be trained and evaluated on. Trains nothing.

    Returns what was found. In a notebook, it is shown below the cell, too, with the first images as the network sees
    them.

    Args:
        config: the options of the run.
        limit_s: seconds after which no more files are read; the result says how many were.
        write_labels: with ``config.resume`` and ``config.name``, a label file to write, .csv or .parquet: the run's
            training images, the one whose label looks the most wrong first, to correct and train with ``labels``.

    Raises:
        UsageError, StorageError: the data cannot be read, or no run could start with it.

    Example::

        raytrain.look(raytrain.recipes.custom(data="photos"))
    """
    output = None if write_labels is None else os.fspath(write_labels)
    check_output(output, LABEL_FILE_SUFFIXES, "--write-labels")
    result = look_at(config, limit_s=limit_s, write_labels=output)
    if is_notebook():
        from IPython.display import HTML, display

        display(HTML(look_html(result)))
    return result


def look_html(result: LookResult) -> str:
    """Return the figure and the tables as HTML."""
    picture = base64.b64encode(png_bytes(look_figure(result))).decode()
    return f'<img src="data:image/png;base64,{picture}">{as_html(look_page(result))}'


def look_page(result: LookResult, picture: str | None = None) -> RenderableType:
    """Return the page: facts about the images, the classes, the smallest first, and the problems.

    ``picture`` is the file of the figure.
    """
    # The data set, and how much of it was read.
    sample = result.sample
    num_images = result.training_images + result.validation_images + result.test_images
    shrinking = result.shrinking
    packed_as = None
    if shrinking is not None:
        packed_as = f"JPEGs of quality {shrinking.quality}, shorter side {shrinking.shorter_side:,}, if larger"
    facts = {
        "data": result.data,
        "validation data": result.validation_data,
        "test data": result.test_data,
        "training images": result.training_images,
        "validation images": result.validation_images,
        "test images": result.test_images or None,
        "other files": ", ".join(counted(count, reason) for reason, count in result.left_out.items()) or "none",
        "packed as": packed_as,
        "bytes": _range_text(result.size_bytes),
        "width": _range_text(sample.width),
        "height": _range_text(sample.height),
        "formats": ", ".join(f"{name} {count:,}" for name, count in sample.formats.items()),
        "decoded": f"{sample.images:,} of {num_images:,} images, at random",
        "compared": f"{result.duplicates.compared:,} of {num_images:,} images, for duplicates",
        "picture": picture,
    }

    # The classes, with bars for their sizes.
    parts = ("training", "validation", "test") if result.test_images else ("training", "validation")
    largest = max(1, *(count.training for count in result.classes))
    rows = [
        (
            count.name,
            *(f"{number:,}" for number in (count.training, count.validation, count.test)[: len(parts)]),
            bar(count.training, largest),
        )
        for count in sorted(result.classes, key=lambda count: count.training)
    ]
    classes = class_table(parts, rows, "larger")
    return Group(key_value_table(facts), classes, *_problems(sample, result.duplicates), *_suspicious(result))


def _range_text(values: MinMedianMax | None) -> str:
    """Return the range and the median of some numbers; a dash if there are none."""
    return UNKNOWN if values is None else f"{values.min:,} to {values.max:,}, median {values.median:,}"


def _problems(sample: ImageSample, duplicates: Duplicates) -> Iterable[RenderableType]:
    """Yield a sentence for each kind of problem, with the first files, or one sentence that nothing was found."""
    num_unreadable = format_count(len(sample.unreadable), "image")
    num_held_out = format_count(len(duplicates.held_out), "held-out image")
    num_contradicting = format_count(len(duplicates.contradicting), "training image")
    files_by_problem = {
        f"{num_unreadable} of {sample.images:,} cannot be read": [
            f"{one_line(image.key)}: {one_line(image.reason)}" for image in sample.unreadable
        ],
        f"{num_held_out} with the content of a training image": list(map(_pair_text, duplicates.held_out)),
        f"{num_contradicting} with the content of another class": list(map(_pair_text, duplicates.contradicting)),
    }

    # Problems that no image has are left out.
    for problem, files in files_by_problem.items():
        if files:
            yield Text(f"{problem}:", "bold yellow")
            yield Text("\n".join(f"  {file}" for file in files[:_NUM_FILES_SHOWN]))
            if len(files) > _NUM_FILES_SHOWN:
                yield Text(f"  and {len(files) - _NUM_FILES_SHOWN:,} more; --json lists them all", "dim")
    if not any(files_by_problem.values()):
        yield Text("No image that cannot be read and no duplicate was found.", "dim")


def _suspicious(result: LookResult) -> Iterable[RenderableType]:
    """Yield the images whose labels look wrong, and how to train with the label files that were written.

    Yields nothing if they were not looked for, as for a run that has not been trained.
    """
    images = result.suspicious
    if images is None:
        return
    yield Text("\nTraining images whose labels look the most wrong, by the mean margin of the label over all epochs:")
    rows = [
        [row["path"], row["label"], row["suggested"], f"{row['margin']:.2f}"]
        for row in images.rows[:NUM_SUSPICIOUS_SHOWN]
    ]
    yield headed_table(["image", "label", "or", "margin"], [], rows)
    if images.label_files:
        options = " ".join(f"{option} {shlex.quote(file)}" for option, file in images.label_files.items())
        if images.replaces_pattern:  # a run that starts from this run's config.json would have the pattern again
            options = f"--label-pattern none {options}"
        yield Text(f"Correct the labels in the file, from its first row on, and train again with {options}")


def _pair_text(pair: Duplicate) -> str:
    """Return an image and the training image with the same content, each with its class."""
    images = ((pair.key, pair.label), (pair.training_key, pair.training_label))
    return " = ".join(f"{one_line(key)} ({one_line(label)})" for key, label in images)


def look_figure(result: LookResult) -> Figure:
    """Return a grid of images after augmentation, with the label of each above it.

    Below it are images whose labels look wrong, if they were looked for.
    """
    images = result.first_images
    title = f"{result.title}    the first images of epoch 1, as the network sees them"
    num_rows = _num_rows(images.labels)
    suspicious = result.suspicious
    if suspicious is None:
        figure = titled_figure(title, _WIDTH, _HEADING + _ROW * num_rows)
        _draw_images(figure, images.pixels, images.labels)
        return figure

    # Below them, images whose labels look wrong.
    labels = [f"{row['label']}, or {row['suggested']}?" for row in suspicious.rows[: len(suspicious.pixels)]]
    num_below = _num_rows(labels)
    figure = titled_figure(title, _WIDTH, 2 * _HEADING + _ROW * (num_rows + num_below))
    parts: Any = figure.subfigures(2, 1, squeeze=False, height_ratios=[num_rows, num_below])  # (2, 1)
    above, below = parts.ravel()
    _draw_images(above, images.pixels, images.labels)
    below.suptitle("labels that may be wrong", x=0.01, ha="left", weight="bold", fontsize=10)
    _draw_images(below, suspicious.pixels, labels)
    return figure


def _num_rows(labels: Sequence[str]) -> int:
    """Return the number of rows of the grid of images with these labels, at least one."""
    return max(1, -(-len(labels) // _COLUMNS))  # rounded up


def _draw_images(figure: Figure | SubFigure, images: Iterable[Pixels | None], labels: Sequence[str]) -> None:
    """Draw images in a grid, each below its label; None, an image that cannot be read, leaves its cell empty."""
    cells = figure.subplots(_num_rows(labels), _COLUMNS, squeeze=False).ravel()
    for cell in cells:
        cell.set_axis_off()
    for cell, pixels, label in zip(cells, images, labels, strict=False):
        if pixels is None:
            continue
        cell.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")

        # A long label of two mixed classes gets a line for each class; one that is still too long is cut in its middle.
        text = one_line(label)
        lines = [text] if len(text) <= _MAX_LETTERS else text.split(", ")
        cut = [cut_middle(line, _MAX_LETTERS) for line in lines[:2]]
        cell.set_title("\n".join(cut), fontsize=8, fontfamily=font_families(cut), color=GREY, pad=3, parse_math=False)
