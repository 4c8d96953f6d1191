"""`raytrain look` in the terminal, as a figure, and in a notebook."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.diagnostics.look import LookResult, look_at
from raytrain.display.console import UNKNOWN, bar, class_table, format_count, key_value_table
from raytrain.display.curves import GREY, png_bytes, titled_figure
from raytrain.display.notebook import as_html, is_notebook
from raytrain.runs.redact import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raytrain.config import TrainConfig
    from raytrain.data.duplicates import Duplicate, Duplicates
    from raytrain.diagnostics.look import ClassCount, ImageSample, Range

_NUM_FILES_SHOWN = 5


def look_page(result: LookResult, picture: str | None = None) -> RenderableType:
    """The images, the classes from the smallest on, and the problems. ``picture`` is the file of the figure, if any."""
    sample = result.sample
    num_images = result.training_images + result.test_images
    shrunk = result.shrinking
    about = {
        "data": result.data,
        "test data": result.test_data,
        "training images": result.training_images,
        "test images": result.test_images,
        "other files": ", ".join(f"{count:,} {reason}" for reason, count in result.left_out.items()) or "none",
        "packed as": shrunk and f"JPEGs of quality {shrunk.quality}, shorter side {shrunk.shorter_side:,}, if larger",
        "bytes": _range(result.size_bytes),
        "width": _range(sample.width),
        "height": _range(sample.height),
        "formats": ", ".join(f"{name} {count:,}" for name, count in sample.formats.items()),
        "decoded": f"{sample.images:,} of {num_images:,} images, at random",
        "compared": f"{result.duplicates.compared:,} of {num_images:,} images, for duplicates",
        "picture": picture,
    }
    return Group(key_value_table(about), _class_table(result.classes), *_problems(sample, result.duplicates))


def _range(values: Range | None) -> str:
    return UNKNOWN if values is None else f"{values.min:,} to {values.max:,}, median {values.median:,}"


def _class_table(classes: Sequence[ClassCount]) -> RenderableType:
    largest = max(1, *(each.training for each in classes))
    smallest_first = sorted(classes, key=lambda each: each.training)
    rows = [(each.name, f"{each.training:,}", f"{each.test:,}", bar(each.training, largest)) for each in smallest_first]
    return class_table(("training", "test"), rows, "larger")


def _problems(sample: ImageSample, duplicates: Duplicates) -> Iterable[RenderableType]:
    """A sentence for each kind of problem, with the first files; one that there is none otherwise."""
    unreadable = [f"{one_line(image.key)}: {one_line(image.reason)}" for image in sample.unreadable]
    found = {
        f"{format_count(len(unreadable), 'image')} of {sample.images:,} cannot be read": unreadable,
        f"{format_count(len(duplicates.test), 'test image')} with the content of a training image": _pairs(
            duplicates.test
        ),
        f"{format_count(len(duplicates.contradicting), 'training image')} with the content of another class": _pairs(
            duplicates.contradicting
        ),
    }
    for sentence, files in found.items():
        if files:
            yield Text(f"{sentence}:", "bold yellow")
            yield Text("\n".join(f"  {file}" for file in files[:_NUM_FILES_SHOWN]))
            if len(files) > _NUM_FILES_SHOWN:
                yield Text(f"  and {len(files) - _NUM_FILES_SHOWN:,} more; --json lists them all", "dim")
    if not any(found.values()):
        yield Text("No image that cannot be read and no duplicate was found.", "dim")


def _pairs(duplicates: Iterable[Duplicate]) -> list[str]:
    pairs = (((each.key, each.label), (each.training_key, each.training_label)) for each in duplicates)
    return [" = ".join(f"{one_line(key)} ({one_line(label)})" for key, label in pair) for pair in pairs]


_COLUMNS = 8
_WIDTH, _HEADING, _ROW = 11.0, 0.5, 1.55  # inches
_MAX_LETTERS = 24  # of a label


def look_figure(result: LookResult) -> Figure:
    """A grid of images after augmentation, with the label of each above it."""
    shown = result.first_images
    num_rows = max(1, -(-len(shown.labels) // _COLUMNS))
    title = f"{result.title}    the first images of epoch 1, as the network sees them"
    figure = titled_figure(title, _WIDTH, _HEADING + _ROW * num_rows)
    cells = figure.subplots(num_rows, _COLUMNS, squeeze=False).ravel()
    for cell in cells:
        cell.set_axis_off()
    for cell, pixels, label in zip(cells, shown.pixels, shown.labels, strict=False):
        cell.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
        cell.set_title(_shortened(one_line(label)), fontsize=8, color=GREY, pad=3, parse_math=False)
    return figure


def _shortened(text: str) -> str:
    lines = [text] if len(text) <= _MAX_LETTERS else text.split(", ")  # a line for each of the classes that are mixed
    return "\n".join(line if len(line) <= _MAX_LETTERS else f"{line[: _MAX_LETTERS - 1]}…" for line in lines[:2])


def look(config: TrainConfig, *, limit_s: float = 30.0) -> LookResult:
    """Look at the images that a run with these options would be trained and tested on. Trains nothing.

    In a notebook, the first images as the network sees them and what was found are shown below the cell.

    Args:
        config: the options of the run.
        limit_s: seconds after which no more files are read; the result says how many were.

    Raises:
        UsageError, StorageError: the data cannot be read, or no run could start with it.
    """
    result = look_at(config, limit_s=limit_s)
    if is_notebook():
        from IPython.display import HTML, display

        display(HTML(look_html(result)))
    return result


def look_html(result: LookResult) -> str:
    """The figure and the tables as HTML."""
    picture = base64.b64encode(png_bytes(look_figure(result))).decode()
    return f'<img src="data:image/png;base64,{picture}">{as_html(look_page(result))}'
