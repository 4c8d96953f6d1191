"""Training and test images of a run, with the classes that a label file or their folders say."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raytrain.config import TrainConfig
from raytrain.data.labels.folders import build_manifest, build_manifests, check_classes, report_alike, top_folders
from raytrain.data.labels.label_file import JOINED, LabelTable, own_label_table
from raytrain.data.labels.listing import first_names
from raytrain.data.labels.manifest import Manifest, list_images
from raytrain.data.labels.part_names import Part, is_test, is_training, parts_among, test_names
from raytrain.data.labels.train_test_split import check_can_split, train_test_split
from raytrain.errors import UsageError
from raytrain.storage.store import Store

_log = logging.getLogger("raytrain")
_NUM_SHOWN = 3
_SEPARATORS = re.compile(r"[\s|;,/+&]+")


def training_and_test_images(
    config: TrainConfig, table: LabelTable | None, test_table: LabelTable | None, train_store: Store, test_store: Store
) -> tuple[Manifest, Manifest]:
    """Return the images of a run, labelled by ``table``, or else by what lies beside them.

    With ``test_table``, this one labels those that are tested on, which are in a folder of their own. Otherwise the
    table's column ``split`` decides which images are held out; without one, ``--test-fraction`` of them are, in whole
    groups if ``--group-by`` is given. With ``--test-data``, all of those are test images, unless there are splits.
    """
    # Training and test images that are labelled apart from each other.
    if test_table is not None or (table is None and config.test_data):
        train = images_of_part(train_store, table, "train", config.max_bad_fraction)
        test = images_of_part(test_store, test_table, "test", config.max_bad_fraction, train.classes)
        _report_given_split(config, (table, train), (test_table, test))
        return train, test

    # Without a label file in the options, one beside the images says the classes, or else the folders do.
    is_own_table = table is None
    if table is None:
        table = own_label_table(train_store)
    if table is None:
        train, test = build_manifests(train_store)
        if test is not None:
            _report_given_split(config)
            return train, test
        check_can_split(train, config.test_fraction)
        return train_test_split(train, config.test_fraction, config.seed)

    # One label file for all images.
    training, tested = _split_names(table)
    train_images = list_images(train_store)
    test_images = list_images(test_store) if config.test_data else train_images
    listed = (train_images, test_images) if config.test_data else (train_images,)
    check_keys(table, listed, config.max_bad_fraction)
    train = labelled(train_images, table, training)
    if config.test_data or tested:
        test = labelled(test_images, table, tested, train.classes)
        _report_given_split(config, (table, train), (table, test))
    else:
        groups = table.groups[table.rows_of(train)] if config.group_by else None
        if groups is None and table.classes is None:
            check_can_split(train, config.test_fraction)
        train, test = train_test_split(train, config.test_fraction, config.seed, groups)
    if is_own_table:  # which a run that resumes does not read again, so that it cannot compare the digest
        return replace(train, labels_digest=""), replace(test, labels_digest="")
    return train, test


def _report_given_split(config: TrainConfig, *parts: tuple[LabelTable | None, Manifest]) -> None:
    """Log what the options ask of a split that was given: another fraction of test images, and undivided groups."""
    if config.test_fraction != type(config).test_fraction:
        _log.warning("--test-fraction %g is not used: the test images are given.", config.test_fraction)
    if config.group_by:
        train, test = (set(table.groups[table.rows_of(images)]) for table, images in parts if table is not None)
        if shared := sorted(train & test):
            _log.warning(
                "%s of %s values of --group-by %s, such as %s, have both training and test images: the split was given "
                "with the images, so that --group-by does not change it.",
                *(f"{len(shared):,}", f"{len(train | test):,}", config.group_by, first_names(shared)),
            )


def _split_names(table: LabelTable) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the values of the column ``split`` for training images, and for those to test on; none without one."""
    present = sorted(set(table.splits))
    if not any(present):
        return (), ()
    training, tested = tuple(filter(is_training, present)), test_names(present)
    if not training or not tested:
        shown = ", ".join(map(repr, present[:5]))
        raise UsageError(
            f"The column 'split' of {table.url} has the values {shown}; it must have train, and test or val."
        )
    if unused := Counter(split or "none" for split in table.splits if split not in (*training, *tested)):
        texts = ", ".join(f"{count:,} {split}" for split, count in unused.items())
        _log.warning("Rows of %s with other splits (%s) are not used.", table.url, texts)
    return training, tested


def images_of_part(
    store: Store, table: LabelTable | None, part: Part, max_bad_fraction: float, classes: tuple[str, ...] | None = None
) -> Manifest:
    """Return the images below ``store`` that the label file labels; those of its training or test split if it has any.

    Without one, it is the label file beside the images, or else their folders are the labels. ``classes`` are those
    that the labels index: for test images, those of the training images.
    """
    if table is None:
        own_table = own_label_table(store)
        if own_table is None:
            return build_manifest(store, classes, part)
        images = images_of_part(store, own_table, part, max_bad_fraction, classes)
        return replace(images, labels_digest="")  # the table is not read again
    images = list_images(store)
    check_keys(table, (images,), max_bad_fraction)
    is_wanted = is_training if part == "train" else is_test
    is_apart = all(map(is_wanted, set(table.splits)))  # the file is of these images alone
    return labelled(images, table, () if is_apart else _split_names(table)[part == "test"], classes)


def check_keys(table: LabelTable, listed: Sequence[Manifest], max_bad_fraction: float) -> None:
    """Warn of keys and images without the other; UsageError if more than ``max_bad_fraction`` have no image."""
    has_image = np.zeros(len(table.keys), bool)
    for images in listed:
        if not any(table.splits) and (parts := parts_among(top_folders(images.keys.to_pylist()))):
            sentence = "The folders %s below %s do not say which images are tested on; a column split in %s would."
            _log.warning(sentence, first_names(parts), images.url, table.url)
        rows = table.rows_of(images)

        # Keys such as C:/photos/cat/1.jpg were written elsewhere: people should know what they are taken for.
        first = int((rows >= 0).argmax()) if len(rows) else 0
        if len(rows) and rows[first] >= 0:
            key, path = table.keys[rows[first]], images.keys[first].as_py()
            if len(key) > len(path):
                sentence = "The images that %s names are elsewhere: %s is taken for %s below %s."
                _log.warning(sentence, table.url, key, path, images.url)

        has_image[rows[rows >= 0]] = True
        if num_again := int((np.bincount(rows[rows >= 0]) > 1).sum()):
            raise UsageError(
                f"{num_again:,} keys of {table.url} stand for several images below {images.url}, whose names differ "
                "in folder, suffix or Unicode form only; make them distinct, or give whole paths as keys."
            )
        if num_without := int((rows < 0).sum()):
            _log.warning(
                "%s images below %s are not in %s, and are not used.", f"{num_without:,}", images.url, table.url
            )

    # A key without an image is more often a wrong folder than a lost file.
    unknown = table.keys[~has_image]
    if not len(unknown):
        return
    shown = ", ".join(repr(key) for key in unknown[:_NUM_SHOWN])
    problem = (
        f"{len(unknown):,} of {len(table.keys):,} keys of {table.url} have no image below {listed[0].url}: {shown}"
    )
    if len(unknown) > max_bad_fraction * len(table.keys):
        raise UsageError(
            f"{problem}{', …' if len(unknown) > _NUM_SHOWN else ''}; keys are paths relative to it, such as "
            f"{listed[0].keys[0].as_py()!r}. Correct them, or allow more with --max-bad-fraction."
        )
    _log.warning("%s; they are not used.", problem)


def labelled(
    images: Manifest,
    table: LabelTable,
    splits: Sequence[str] = (),
    classes: tuple[str, ...] | None = None,
    *,
    are_joined: bool = False,
) -> Manifest:
    """Return the images that the table labels, of the given ``splits`` or of all.

    ``classes`` are those that the labels index, by default the names in the table, sorted. Raises UsageError if a label
    is none of them, or there is only one class. If an image may have several, the sets of them are those of all rows.
    ``are_joined`` says that each label is the names of all classes of an image, which is reported otherwise.
    """
    rows = table.rows_of(images)
    chosen = np.flatnonzero((rows >= 0) & ((table.labels[rows] != "") | (table.classes is not None)))
    if splits:
        chosen = chosen[np.isin(table.splits[rows[chosen]], splits)]
    if not len(chosen):
        in_split = f" and the split {' or '.join(splits)}" if splits else ""
        raise UsageError(f"None of the {len(images):,} images below {images.url} has a label{in_split} in {table.url}.")

    # The classes: those given, or those of these images, or all of the table if an image may have several.
    names = table.labels[rows[chosen]]
    present = tuple(sorted(set(names))) if table.classes is None else table.classes
    if not present:
        raise UsageError(f"No row of the label file {table.url} has a class.")
    if table.classes is None or classes is not None:
        check_classes(present, classes, images.url, len(images))
    if classes is None:
        report_alike(present, table.url)
        if not are_joined:
            _report_joined(present, table.url)
    classes = classes or present

    label_of = {name: label for label, name in enumerate(classes)}
    left_out = {**images.left_out, "images that the label file leaves out": len(images) - len(chosen)}
    about: dict[str, Any] = {"classes": classes, "left_out": left_out, "labels_digest": table.digest}
    if table.classes is None:
        labels = np.array([label_of[name] for name in names], np.int32)
        return replace(images.select(chosen), labels=labels, **about)

    # A label is the number of a set of classes: set_of_row is (rows,), label_sets is (K, C) for K sets of C classes.
    texts, set_of_row = np.unique(table.labels.astype(str), return_inverse=True)
    label_sets = np.zeros((len(texts), len(classes)), bool)
    for members, text in zip(label_sets, texts.tolist(), strict=True):
        members[[label_of[name] for name in text.split(JOINED) if name]] = True
    labels = set_of_row.astype(np.int32)[rows[chosen]]
    return replace(images.select(chosen), labels=labels, label_sets=label_sets, **about)


def _report_joined(classes: Sequence[str], url: str) -> None:
    """Log if classes look like several joined: one is a list or made of others, or half of them share parts."""
    words = {name: set(_SEPARATORS.split(name)) for name in classes}
    joined = (name for name in classes if len(words[name]) > 1 and (name[0] == "[" or words[name] <= words.keys()))
    if (name := next(joined, None)) is not None:
        sentence = "The label %r of %s is a class of its own; if it stands for several, give --label-separator."
        _log.warning(sentence, name, url)
        return

    # rose|bright, rose|dark and tulip|dark are made of parts that recur, unlike names that contain a comma.
    for separator in "|;,":
        parts = {name: {part.strip() for part in name.split(separator)} for name in classes if separator in name}
        counts = Counter(part for names in parts.values() for part in names)
        recurring = [name for name, names in parts.items() if any(counts[part] > 1 for part in names)]
        if recurring and 2 * len(recurring) >= len(classes):
            sentence = (
                "%s of %s classes of %s contain '%s', such as %r, and each is a class of its own; if they stand for "
                "several, give --label-separator '%s'."
            )
            _log.warning(sentence, f"{len(parts):,}", f"{len(classes):,}", url, separator, recurring[0], separator)
            return
