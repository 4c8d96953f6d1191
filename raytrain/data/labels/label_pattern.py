"""Labels in the names of files, such as cat_17.jpg, which ``--label-pattern`` finds: a regular expression.

Its group ``label`` is the class of an image, or its first group if none is called so. Other named groups are what
columns of a label file would be: ``split``, and the one that --group-by names. The pattern is searched in the name of
the file or, if it has a slash, in the whole path below the folder of the images.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.config.data import check_label_pattern
from raytrain.data.labels.label_columns import LabelColumns
from raytrain.data.labels.label_file import LabelTable, label_table
from raytrain.data.labels.manifest import list_images
from raytrain.errors import UsageError
from raytrain.storage.store import Store

LABEL = "label"

_log = logging.getLogger("raytrain")
_KEY = "key"  # name of the column of paths, which no group of the pattern replaces
_NUM_SHOWN = 3  # files that do not match


def table_by_pattern(store: Store, pattern: str, columns: LabelColumns, max_bad_fraction: float) -> LabelTable:
    """Return the labels that ``pattern`` finds in the names of the images below ``store``, which are listed.

    Of ``columns``, only the group and the separator are used. Images whose names do not match are counted and not used.
    Raises UsageError if these are more than ``max_bad_fraction``, or there are no images.

    Example: ``table_by_pattern(store, r"(?P<label>.+)_\\d+\\.jpg", LabelColumns(), 0.01).labels``
    """
    images = list_images(store)
    keys: list[str] = images.keys.to_pylist()
    expression = check_label_pattern(pattern)
    matches = _matches(keys, pattern)

    # A pattern that misses many files is a wrong one.
    missed = [key for key, match in zip(keys, matches, strict=True) if match is None]
    if missed:
        problem = (
            f"{len(missed):,} of {len(keys):,} images below {store.url} do not match --label-pattern {pattern}: "
            f"{', '.join(map(repr, missed[:_NUM_SHOWN]))}{', …' if len(missed) > _NUM_SHOWN else ''}"
        )
        if len(missed) > max_bad_fraction * len(keys):
            where = "the path" if "/" in pattern else "the name of the file, or in its path if it has a slash"
            raise UsageError(
                f"{problem}; it is searched in {where}. Correct it, or allow more with --max-bad-fraction."
            )
        _log.warning("%s; they are not used.", problem)

    # From here on, the names are like a label file with a column for each group of the pattern.
    chosen = [index for index, match in enumerate(matches) if match is not None]
    matched = [match for match in matches if match is not None]
    names = [name for name in expression.groupindex if name not in (_KEY, LABEL)]
    label = LABEL if LABEL in expression.groupindex else 1
    table = pa.table(
        {
            _KEY: [keys[index] for index in chosen],
            LABEL: [match[label] or "" for match in matched],
            **{name: [match[name] or "" for match in matched] for name in names},
        }
    )
    columns_of_table = LabelColumns(_KEY, (LABEL,), columns.group, columns.separator)
    left_out = {**images.left_out, "images that do not match --label-pattern": len(missed)}
    return replace(
        label_table(table, f"--label-pattern {pattern}", columns_of_table, []),
        images=replace(images.select(np.array(chosen, np.int64)), left_out=left_out),
        pattern_digest=digest_of_pattern(pattern),
    )


def digest_of_pattern(pattern: str) -> str:
    """Return a digest that stands for the labels of a pattern: a resume can compare it without listing the files."""
    return hashlib.sha256(f"--label-pattern {pattern}".encode()).hexdigest()


def groups_in_names(keys: Sequence[str], pattern: str, group_by: str) -> npt.NDArray[np.object_] | None:
    """Return the text that the group ``group_by`` of ``pattern`` matches in the name of each image, (n,).

    Return None if a name does not match: the images may come from elsewhere.

    Example: ``groups_in_names(["p1_cat_3.jpg"], r"(?P<patient>p\\d+)_(?P<label>.+)_", "patient")``
    """
    groups: list[str] = []
    for match in _matches(keys, pattern):
        if match is None:
            return None
        groups.append(match[group_by] or "")  # a group that is optional in the pattern may match nothing
    return np.array(groups, object)


def _matches(keys: Sequence[str], pattern: str) -> list[re.Match[str] | None]:
    """Return the match of ``pattern`` in the name of each file or, if the pattern has a slash, in its whole path."""
    expression = check_label_pattern(pattern)
    return [expression.search(key if "/" in pattern else key.rpartition("/")[2]) for key in keys]
