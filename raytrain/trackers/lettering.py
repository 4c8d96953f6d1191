"""Letters of pictures and figures: fonts that have those of any language, and names cut to the room that they have."""

# matplotlib is typed in parts only.
# pyright: basic
from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont


def font_files(texts: Iterable[str]) -> list[str]:
    """Return the files of fonts of this machine that together have the letters of ``texts``.

    The first is matplotlib's own, which has Latin, Greek, Cyrillic, Hebrew and Arabic letters. Names of classes may be
    Chinese, Japanese, Korean or Thai: fonts that have these are looked for only if they are needed. A letter that no
    font has is drawn as a box.
    """
    from matplotlib.font_manager import findfont, findSystemFonts

    files = [str(findfont("DejaVu Sans"))]
    missing = {ord(letter) for text in texts for letter in text if letter.isprintable()} - _letters(files[0])
    installed = findSystemFonts() if missing else []
    while missing:
        best = max(sorted(installed), key=lambda file: len(missing & _letters(file)), default=files[0])
        if not missing & _letters(best):
            break
        files.append(best)
        missing -= _letters(best)
    return files


def font_families(texts: Iterable[str]) -> list[str]:
    """Return the families of :func:`font_files`, in which matplotlib looks for each letter, one after the other."""
    from matplotlib.font_manager import FontProperties, fontManager

    files = font_files(texts)
    for file in files[1:]:
        fontManager.addfont(file)  # what matplotlib knows of this machine may be older than the font
    return [FontProperties(fname=file).get_name() for file in files]


@cache
def _letters(file: str) -> frozenset[int]:
    """Return the letters of a font; none if it cannot be used."""
    from matplotlib.ft2font import FT2Font

    with suppress(Exception):  # a damaged font may raise anything
        return frozenset(FT2Font(file).get_charmap())
    return frozenset()


def cut_to_width(text: str, width: int, font: FreeTypeFont) -> str:
    """Return ``text``, or as much of its ends as fits into ``width`` pixels with an ellipsis between them."""
    lengths = range(len(text), 0, -1)
    return next((cut for cut in (cut_middle(text, length) for length in lengths) if font.getlength(cut) <= width), "…")


def cut_middle(name: str, length: int) -> str:
    """Return ``name`` with "…" in place of its middle if it is longer than ``length``.

    Names of classes often have a common start.

    Example:
        >>> cut_middle("species_of_bird_001", 9)
        'spec…_001'
    """
    if len(name) <= length:
        return name
    end = (length - 1) // 2
    return f"{name[: length - 1 - end]}…{name[len(name) - end :]}"
