"""What a data set has: its files, its classes, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raytrain.display.formatting import UNKNOWN, format_count
from raytrain.display.key_value_table import key_value_table
from raytrain.runs.printable import one_line

if TYPE_CHECKING:
    from raytrain.diagnostics.duplicates import Duplicate, Duplicates
    from raytrain.diagnostics.image_sample import ImageSample, Range
    from raytrain.diagnostics.look import ClassCount, LookResult

_NUM_CLASSES_SHOWN = 20
_NUM_FILES_SHOWN = 5
_BAR_WIDTH = 16


def look_page(result: LookResult, picture: str | None = None) -> RenderableType:
    """The images, the classes from the smallest on, and the problems. ``picture`` is the file of the figure, if any."""
    sample = result.sample
    num_images = result.training_images + result.test_images
    about = {
        "data": result.data,
        "test data": result.test_data,
        "training images": result.training_images,
        "test images": result.test_images,
        "other files": result.ignored_files,
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
    table = Table("class", box=box.SIMPLE_HEAD)
    for heading in ("training", "test"):
        table.add_column(heading, justify="right")
    table.add_column(width=_BAR_WIDTH)
    largest = max(1, *(each.training for each in classes))
    for each in sorted(classes, key=lambda each: each.training)[:_NUM_CLASSES_SHOWN]:
        bar = Bar(largest, 0, each.training, width=_BAR_WIDTH, color="cyan")
        table.add_row(Text(one_line(each.name)), f"{each.training:,}", f"{each.test:,}", bar)
    num_more = len(classes) - _NUM_CLASSES_SHOWN
    if num_more <= 0:
        return table
    return Group(table, Text(f" and {num_more:,} larger classes; --json lists them all", style="dim"))


def _problems(sample: ImageSample, duplicates: Duplicates) -> Iterable[RenderableType]:
    """A sentence for each kind of problem, with the first files; one that there is none otherwise."""
    unreadable = [f"{one_line(key)}: {one_line(reason)}" for key, reason in sample.unreadable]
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
