"""Names of classes: their form in Unicode, which are probably one class, and whether a run can train on them."""

from __future__ import annotations

import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa

from raytrain.data.labels.listing import first_names
from raytrain.errors import UsageError, format_count

BOOLEANS = ("true", "True", "TRUE", "false", "False", "FALSE")

_log = logging.getLogger("raytrain")
_PUNCTUATION = re.compile(r"(?:(?!^-|-$|[+#])[\W_])+")  # but signs of which -inf, A- and C++ consist, too
_COPY = re.compile(r"([ _-]+(copy|kopie|copie|copia)( ?\d+)?)?( ?\(\d+\))?$")  # behind the name of a copied folder
_DECIMAL = re.compile(r"[+-]?[0-9]{1,15}([.,][0-9]+)?(e[+-]?[0-9]{1,2})?")


def composed(text: str) -> str:
    """Return a name in Unicode's composed form (NFC), in which names are compared: a Mac writes é as two characters.

    >>> len(composed("e\\u0301"))
    1
    """
    return unicodedata.normalize("NFC", text)


def plain_booleans(labels: Sequence[str]) -> Sequence[str]:
    """Return labels in lower case if all are booleans, which programs write as True, TRUE or true; else unchanged.

    >>> plain_booleans(["True", "FALSE", ""])
    ['true', 'false', '']
    """
    return [label.lower() for label in labels] if set(labels) <= {*BOOLEANS, ""} else labels


def names_in_metadata(schema: pa.Schema, field: pa.Field) -> list[str]:
    """Return the names of the classes whose numbers a column of a Parquet file holds; none for any other column.

    Hugging Face's datasets writes them into the metadata of the file's ``schema``.
    """
    if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
        with suppress(KeyError, TypeError, ValueError):
            metadata = json.loads((schema.metadata or {})[b"huggingface"])
            return [str(name) for name in metadata["info"]["features"][field.name]["names"]]
    return []


def names_of_numbers(numbers: Sequence[float | None], names: Sequence[str], owner: str) -> list[str]:
    """Return the name in ``names`` of each number, empty for a missing one and for -1, as of hidden test labels.

    Raises UsageError, a sentence about the ``owner`` of the numbers, if one has no name.

    >>> names_of_numbers([1, -1, None], ["cat", "dog"], "labels.parquet")
    ['dog', '', '']
    """
    name_of = dict(enumerate(names)) | {-1: "", None: ""}
    labels = [name_of.get(None if number != number else number) for number in numbers]  # NaN is unequal to itself
    if None in labels:
        raise UsageError(
            f"{owner} has the label {numbers[labels.index(None)]}, and names of {format_count(len(names), 'class')}; "
            "correct it."
        )
    return [label for label in labels if label is not None]


def check_classes(present: tuple[str, ...], classes: tuple[str, ...] | None, url: str, num_images: int) -> None:
    """Raise UsageError unless ``present`` are at least two classes, or all among ``classes`` if these are given.

    ``url`` and ``num_images`` are those of the images that have them, for the sentence.
    """
    if not present:
        raise UsageError(
            f"There are no class folders below {url}, only {format_count(num_images, 'image')}; put each class into a "
            f"folder of its name, such as {url.rstrip('/')}/cat/, or give a label file with --labels, or "
            "--label-pattern if the names of the files say the classes."
        )
    if classes is None and len(present) == 1:
        raise UsageError(
            f"{url} has one class only, {present[0]!r}, with {format_count(num_images, 'image')}; a classifier needs "
            "at least two classes: put each into a folder of its name, or give a label file with --labels."
        )
    if unknown := sorted(set(present) - set(classes or present)):
        raise UsageError(
            f"{url} has {format_count(len(unknown), 'class')} that the training images lack: {first_names(unknown)} "
            f"(those have {first_names(classes or ())}); rename or remove them."
        )


def report_alike(classes: Sequence[str], url: str) -> None:
    """Log classes that are probably the same: their names differ in nothing that a reader sees, or are equal numbers.

    That is case, punctuation, wide letters, invisible signs and what file managers write behind copies; or 1, 01, 1.0
    and 1,00.
    """
    plain = {name: _plain_name(name) for name in classes}
    counts = Counter(plain.values())
    if alike := [repr(name) for name in classes if counts[plain[name]] > 1]:
        _log.warning("The classes %s of %s are called nearly alike.", first_names(alike), url)


def _plain_name(name: str) -> str:
    """Return the form of a class's name by which classes that are called nearly alike are found.

    It has no capitals, punctuation and invisible signs, and no ending as of a copied folder. 1.50 and 1,5 are both 1.5.
    """
    # The compatible form (NFKC) has usual letters in place of wide ones. Signs of the category Cf are invisible.
    text = unicodedata.normalize("NFKC", name.casefold())
    text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf").strip()
    if _DECIMAL.fullmatch(text):
        return repr(float(text.replace(",", ".")))
    return _PUNCTUATION.sub(" ", _COPY.sub("", text)).strip() or name
