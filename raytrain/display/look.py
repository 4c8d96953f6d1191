"""`raytrain look` in the terminal, as a figure, and in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.data.labels.listing import counted
from raytrain.diagnostics.look import LookResult, look_at
from raytrain.display.console import UNKNOWN, bar, class_table, format_count, key_value_table
from raytrain.display.curves import GREY, png_bytes, titled_figure
from raytrain.display.notebook import as_html, is_notebook
from raytrain.runs.redact import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raytrain.config import TrainConfig
    from raytrain.data.duplicates import Duplicate, Duplicates
    from raytrain.diagnostics.look import ImageSample, MinMedianMax

_NUM_FILES_SHOWN = 5
_COLUMNS = 8
_WIDTH, _HEADING, _ROW = 11.0, 0.5, 1.55  # of the figure, in inches
_MAX_LETTERS = 24  # in a line of a label


def look(config: TrainConfig, *, limit_s: float = 30.0) -> LookResult:
    """Look at the images that a run with these options would be trained and tested on. Trains nothing.

    In a notebook, the first images as the network sees them and what was found are shown below the cell.

    Args:
        config: the options of the run.
        limit_s: seconds after which no more files are read; the result says how many were.

    Raises:
        UsageError, StorageError: the data cannot be read, or no run could start with it.

    Example::

        raytrain.look(raytrain.recipes.custom(data="photos"))
    """
    result = look_at(config, limit_s=limit_s)
    if is_notebook():
        from IPython.display import HTML, display

        display(HTML(look_html(result)))
    return result


def look_html(result: LookResult) -> str:
    """Return the figure and the tables as HTML."""
    picture = base64.b64encode(png_bytes(look_figure(result))).decode()
    return f'<img src="data:image/png;base64,{picture}">{as_html(look_page(result))}'


def look_page(result: LookResult, picture: str | None = None) -> RenderableType:
    """Return the images, the classes from the smallest on, and the problems. ``picture`` is the file of the figure."""
    # What there is, and how much of it was read.
    sample = result.sample
    num_images = result.training_images + result.test_images
    shrunk = result.shrinking
    about = {
        "data": result.data,
        "test data": result.test_data,
        "training images": result.training_images,
        "test images": result.test_images,
        "other files": ", ".join(counted(count, reason) for reason, count in result.left_out.items()) or "none",
        "packed as": shrunk and f"JPEGs of quality {shrunk.quality}, shorter side {shrunk.shorter_side:,}, if larger",
        "bytes": _range_text(result.size_bytes),
        "width": _range_text(sample.width),
        "height": _range_text(sample.height),
        "formats": ", ".join(f"{name} {count:,}" for name, count in sample.formats.items()),
        "decoded": f"{sample.images:,} of {num_images:,} images, at random",
        "compared": f"{result.duplicates.compared:,} of {num_images:,} images, for duplicates",
        "picture": picture,
    }

    # The classes, with the size of each as a bar beside the largest one's.
    largest = max(1, *(count.training for count in result.classes))
    rows = [
        (count.name, f"{count.training:,}", f"{count.test:,}", bar(count.training, largest))
        for count in sorted(result.classes, key=lambda count: count.training)
    ]
    classes = class_table(("training", "test"), rows, "larger")
    return Group(key_value_table(about), classes, *_problems(sample, result.duplicates))


def _range_text(values: MinMedianMax | None) -> str:
    return UNKNOWN if values is None else f"{values.min:,} to {values.max:,}, median {values.median:,}"


def _problems(sample: ImageSample, duplicates: Duplicates) -> Iterable[RenderableType]:
    """Yield a sentence for each kind of problem, with the first files; or one that there is none."""
    num_unreadable = format_count(len(sample.unreadable), "image")
    num_test = format_count(len(duplicates.test), "test image")
    num_contradicting = format_count(len(duplicates.contradicting), "training image")
    files_by_problem = {
        f"{num_unreadable} of {sample.images:,} cannot be read": [
            f"{one_line(image.key)}: {one_line(image.reason)}" for image in sample.unreadable
        ],
        f"{num_test} with the content of a training image": list(map(_pair_text, duplicates.test)),
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


def _pair_text(pair: Duplicate) -> str:
    """Return an image and the training image with the same content, each with its class."""
    images = ((pair.key, pair.label), (pair.training_key, pair.training_label))
    return " = ".join(f"{one_line(key)} ({one_line(label)})" for key, label in images)


def look_figure(result: LookResult) -> Figure:
    """Return a grid of images after augmentation, with the label of each above it."""
    images = result.first_images
    num_rows = max(1, -(-len(images.labels) // _COLUMNS))  # rounded up
    title = f"{result.title}    the first images of epoch 1, as the network sees them"
    figure = titled_figure(title, _WIDTH, _HEADING + _ROW * num_rows)
    cells = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    for cell in cells:
        cell.set_axis_off()
    for cell, pixels, label in zip(cells, images.pixels, images.labels, strict=False):
        cell.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")

        # A long label of classes that are mixed has a line for each of them; a line that is still too long is cut.
        text = one_line(label)
        lines = [text] if len(text) <= _MAX_LETTERS else text.split(", ")
        cut = [line if len(line) <= _MAX_LETTERS else f"{line[: _MAX_LETTERS - 1]}…" for line in lines[:2]]
        cell.set_title("\n".join(cut), fontsize=8, color=GREY, pad=3, parse_math=False)
    return figure
