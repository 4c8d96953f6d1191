"""Images with the labels of a label file; counts those left over on either side."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from raytrain.config import TrainConfig
from raytrain.data.labels.folders import check_classes
from raytrain.data.labels.label_file import JOINED, Int64s, LabelTable
from raytrain.data.labels.manifest import Manifest, list_images
from raytrain.data.labels.split import check_can_split, split_names, train_test_split
from raytrain.errors import UsageError
from raytrain.storage.store import Store

_log = logging.getLogger("raytrain")

_NUM_SHOWN = 3


def training_and_test_images(
    config: TrainConfig, table: LabelTable, train_store: Store, test_store: Store
) -> tuple[Manifest, Manifest]:
    """The images of a run that the label file ``table`` labels.

    Its column ``split`` decides which images are held out; without one, ``--test-fraction`` of them are, in whole
    groups if ``--group-by`` is given. With ``--test-data``, all of those are test images, unless there are splits.
    """
    training, tested = split_names(table.splits, table.url) if table.has_splits else ((), ())
    train_images = list_images(train_store)
    test_images = list_images(test_store) if config.test_data else train_images
    listed = (train_images, test_images) if config.test_data else (train_images,)
    check_keys(table, listed, config.max_bad_fraction)
    train, rows = labelled(train_images, table, training)
    if config.test_data or table.has_splits:
        return train, labelled(test_images, table, tested, train.classes)[0]
    if config.group_by:
        return train_test_split(train, config.test_fraction, config.seed, table.groups[rows])
    if table.classes is None:
        check_can_split(train, config.test_fraction)
    return train_test_split(train, config.test_fraction, config.seed)


def evaluated_images(store: Store, table: LabelTable, classes: tuple[str, ...], max_bad_fraction: float) -> Manifest:
    """The images below ``store`` that the label file labels; those of its test split if it has splits."""
    images = list_images(store)
    check_keys(table, (images,), max_bad_fraction)
    tested = split_names(table.splits, table.url)[1] if table.has_splits else ()
    return labelled(images, table, tested, classes)[0]


def labelled(
    images: Manifest, table: LabelTable, splits: Sequence[str] = (), classes: tuple[str, ...] | None = None
) -> tuple[Manifest, Int64s]:
    """The images that the table labels, of the given ``splits`` or of all, and the table's row of each, (n,).

    ``classes`` are those that the labels index, by default the names in the table, sorted. Raises UsageError if a label
    is none of them, or there is only one class.
    """
    rows = table.rows_of(images)
    chosen = np.flatnonzero((rows >= 0) & ((table.labels[rows] != "") | (table.classes is not None)))
    if splits:
        chosen = chosen[np.isin(table.splits[rows[chosen]], splits)]
    names = table.labels[rows[chosen]]
    if table.classes is not None and len(chosen):
        return _with_several_classes(images, table, chosen, classes), rows[chosen]
    found = tuple(sorted(set(names)))
    if not found:
        raise UsageError(f"None of the {len(images):,} images below {images.url} has a label in {table.url}.")
    check_classes(found, classes, images.url, len(images))
    index = {name: label for label, name in enumerate(classes or found)}
    labels = np.array([index[name] for name in names], np.int32)
    manifest = replace(images.select(chosen), labels=labels, classes=classes or found, labels_digest=table.digest)
    return replace(manifest, left_out=_left_out(images, len(chosen))), rows[chosen]


def _left_out(images: Manifest, num_chosen: int) -> dict[str, int]:
    """The files that are not used, with those images that the label file does not name for this purpose."""
    return {**images.left_out, "images that the label file leaves out": len(images) - num_chosen}


def _with_several_classes(
    images: Manifest, table: LabelTable, chosen: Int64s, classes: tuple[str, ...] | None
) -> Manifest:
    """The images at ``chosen``, which may have several classes each; the sets of classes are those of all rows."""
    if not table.classes:
        raise UsageError(f"No row of the label file {table.url} has a class.")
    if classes is not None:
        check_classes(table.classes, classes, table.url, len(images))
    index = {name: label for label, name in enumerate(classes or table.classes)}
    texts, set_of_row = np.unique(table.labels.astype(str), return_inverse=True)
    label_sets = np.zeros((len(texts), len(index)), bool)
    for members, text in zip(label_sets, texts.tolist(), strict=True):
        members[[index[name] for name in text.split(JOINED) if name]] = True
    return replace(
        images.select(chosen),
        labels=set_of_row[table.rows_of(images)[chosen]].astype(np.int32),
        label_sets=label_sets,
        classes=tuple(index),
        left_out=_left_out(images, len(chosen)),
        labels_digest=table.digest,
    )


def check_keys(table: LabelTable, listed: Sequence[Manifest], max_bad_fraction: float) -> None:
    """Warn of keys and images without the other; UsageError if more than ``max_bad_fraction`` have no image."""
    has_image = np.zeros(len(table.keys), bool)
    for images in listed:
        rows = table.rows_of(images)
        has_image[rows[rows >= 0]] = True
        if num_without := int((rows < 0).sum()):
            _log.warning(
                "%s images below %s are not in %s, and are not used.", f"{num_without:,}", images.url, table.url
            )
    unknown = table.keys[~has_image]
    if not len(unknown):
        return
    first = ", ".join(repr(key) for key in unknown[:_NUM_SHOWN])
    what = f"{len(unknown):,} of {len(table.keys):,} keys of {table.url} have no image below {listed[0].url}: {first}"
    if len(unknown) > max_bad_fraction * len(table.keys):
        raise UsageError(
            f"{what}{', …' if len(unknown) > _NUM_SHOWN else ''}; keys are paths relative to it, such as "
            f"{listed[0].keys[0].as_py()!r}. Correct them, or allow more with --max-bad-fraction."
        )
    _log.warning("%s; they are not used.", what)
