"""Images with the labels of a label file, and the split into training and test images."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from raytrain.config import TrainConfig
from raytrain.data.labels.folders import (
    Part,
    check_classes,
    first_names,
    is_test,
    is_training,
    parts_among,
    tell_alike,
    test_names,
    top_folders,
)
from raytrain.data.labels.label_columns import JOINED, Texts
from raytrain.data.labels.label_file import LabelTable, own_label_table
from raytrain.data.labels.manifest import Manifest, build_manifest, build_manifests, list_images
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.storage.store import Store

Mask = npt.NDArray[np.bool_]

_log = logging.getLogger("raytrain")
_NUM_SHOWN = 3
_SEPARATORS = re.compile(r"[\s|;,/+&]+")


def training_and_test_images(
    config: TrainConfig, table: LabelTable | None, test_table: LabelTable | None, train_store: Store, test_store: Store
) -> tuple[Manifest, Manifest]:
    """The images of a run, labelled by ``table``, or else by what lies beside them.

    With ``test_table``, this one labels those that are tested on, which are in a place of their own.
    """
    if test_table is not None or (table is None and config.test_data):
        train = images_of_part(train_store, table, "train", config.max_bad_fraction)
        test = images_of_part(test_store, test_table, "test", config.max_bad_fraction, train.classes)
        _tell_given_split(config, (table, train), (test_table, test))
        return train, test
    if table is not None:
        return _images_of_table(config, table, train_store, test_store)
    return _self_described_images(config, train_store)


def _self_described_images(config: TrainConfig, store: Store) -> tuple[Manifest, Manifest]:
    """The images of a run without ``--test-data``, labelled by the label file beside them, or else by their folders."""
    if table := own_label_table(store):
        train, test = _images_of_table(config, table, store, store)
        return replace(train, labels_digest=""), replace(test, labels_digest="")  # not read again
    train, test = build_manifests(store)
    if test is not None:
        _tell_given_split(config)
        return train, test
    check_can_split(train, config.test_fraction)
    return train_test_split(train, config.test_fraction, config.seed)


def _images_of_table(
    config: TrainConfig, table: LabelTable, train_store: Store, test_store: Store
) -> tuple[Manifest, Manifest]:
    """The images of a run that the label file ``table`` labels.

    Its column ``split`` decides which images are held out; without one, ``--test-fraction`` of them are, in whole
    groups if ``--group-by`` is given. With ``--test-data``, all of those are test images, unless there are splits.
    """
    training, tested = _split_names(table)
    train_images = list_images(train_store)
    test_images = list_images(test_store) if config.test_data else train_images
    listed = (train_images, test_images) if config.test_data else (train_images,)
    check_keys(table, listed, config.max_bad_fraction)
    train = labelled(train_images, table, training)
    if config.test_data or tested:
        test = labelled(test_images, table, tested, train.classes)
        _tell_given_split(config, (table, train), (table, test))
        return train, test
    if config.group_by:
        return train_test_split(train, config.test_fraction, config.seed, table.groups[table.rows_of(train)])
    if table.classes is None:
        check_can_split(train, config.test_fraction)
    return train_test_split(train, config.test_fraction, config.seed)


def _tell_given_split(config: TrainConfig, *parts: tuple[LabelTable | None, Manifest]) -> None:
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


def images_of_part(
    store: Store, table: LabelTable | None, part: Part, max_bad_fraction: float, classes: tuple[str, ...] | None = None
) -> Manifest:
    """The images below ``store`` that the label file labels; those of its training or test split if it has splits.

    Without one, it is the label file beside the images, or else their folders are the labels.
    """
    if table is None:
        own = own_label_table(store)
        if own is None:
            return build_manifest(store, classes, part)
        return replace(images_of_part(store, own, part, max_bad_fraction, classes), labels_digest="")  # not read again
    images = list_images(store)
    check_keys(table, (images,), max_bad_fraction)
    is_wanted = is_training if part == "train" else is_test
    is_apart = all(map(is_wanted, set(table.splits)))  # the file is of these images alone
    return labelled(images, table, () if is_apart else _split_names(table)[part == "test"], classes)


def labelled(
    images: Manifest, table: LabelTable, splits: Sequence[str] = (), classes: tuple[str, ...] | None = None
) -> Manifest:
    """The images that the table labels, of the given ``splits`` or of all.

    ``classes`` are those that the labels index, by default the names in the table, sorted. Raises UsageError if a label
    is none of them, or there is only one class. If an image may have several, the sets of them are those of all rows.
    """
    rows = table.rows_of(images)
    chosen = np.flatnonzero((rows >= 0) & ((table.labels[rows] != "") | (table.classes is not None)))
    if splits:
        chosen = chosen[np.isin(table.splits[rows[chosen]], splits)]
    if not len(chosen):
        in_split = f" and the split {' or '.join(splits)}" if splits else ""
        raise UsageError(f"None of the {len(images):,} images below {images.url} has a label{in_split} in {table.url}.")
    names = table.labels[rows[chosen]]
    classes = _checked_classes(images, table, names, classes)
    index = {name: label for label, name in enumerate(classes)}
    left_out = {**images.left_out, "images that the label file leaves out": len(images) - len(chosen)}
    about = {"classes": classes, "left_out": left_out, "labels_digest": table.digest}
    if table.classes is None:
        labels = np.array([index[name] for name in names], np.int32)
        return replace(images.select(chosen), labels=labels, **about)
    set_of_row, label_sets = _label_sets(table, index)
    return replace(images.select(chosen), labels=set_of_row[rows[chosen]], label_sets=label_sets, **about)


def _checked_classes(
    images: Manifest, table: LabelTable, names: Texts, classes: tuple[str, ...] | None
) -> tuple[str, ...]:
    """The classes that labels index: ``classes``, or those in ``names``, or all if an image may have several."""
    found = tuple(sorted(set(names))) if table.classes is None else table.classes
    if not found:
        raise UsageError(f"No row of the label file {table.url} has a class.")
    if table.classes is None or classes is not None:
        check_classes(found, classes, images.url, len(images))
    if classes is None:
        _tell_names(found, table.url)
    return classes or found


def _label_sets(table: LabelTable, index: dict[str, int]) -> tuple[npt.NDArray[np.int32], Mask]:
    """The number of each row's set of classes, (rows,), and which of the C classes in ``index`` each has, (K, C)."""
    texts, set_of_row = np.unique(table.labels.astype(str), return_inverse=True)
    label_sets = np.zeros((len(texts), len(index)), bool)
    for members, text in zip(label_sets, texts.tolist(), strict=True):
        members[[index[name] for name in text.split(JOINED) if name]] = True
    return set_of_row.astype(np.int32), label_sets


def _tell_names(classes: Sequence[str], url: str) -> None:
    """Log which classes are called nearly alike, and one that looks like several others, or like a list."""
    tell_alike(classes, url)
    parts = {name: set(_SEPARATORS.split(name)) for name in classes}
    joined = (name for name in classes if len(parts[name]) > 1 and (name[0] == "[" or parts[name] <= parts.keys()))
    if (name := next(joined, None)) is not None:
        sentence = "The label %r of %s is a class of its own; if it stands for several, give --label-separator."
        _log.warning(sentence, name, url)


def _tell_elsewhere(table: LabelTable, images: Manifest, rows: Int64s) -> None:
    """Log that keys are of another place, such as C:/photos/cat/1.jpg, and lead through a folder of the same name."""
    place = int((rows >= 0).argmax()) if len(rows) else 0
    if len(rows) and rows[place] >= 0 and len(key := table.keys[rows[place]]) > len(own := images.keys[place].as_py()):
        sentence = "The images that %s names are elsewhere: %s is taken for %s below %s."
        _log.warning(sentence, table.url, key, own, images.url)


def check_keys(table: LabelTable, listed: Sequence[Manifest], max_bad_fraction: float) -> None:
    """Warn of keys and images without the other; UsageError if more than ``max_bad_fraction`` have no image."""
    has_image = np.zeros(len(table.keys), bool)
    for images in listed:
        if not any(table.splits) and (parts := parts_among(top_folders(images.keys.to_pylist()))):
            sentence = "The folders %s below %s do not say which images are tested on; a column split in %s would."
            _log.warning(sentence, first_names(parts), images.url, table.url)
        rows = table.rows_of(images)
        _tell_elsewhere(table, images, rows)
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


def train_test_split(
    manifest: Manifest, test_fraction: float, seed: int, groups: npt.NDArray[np.object_] | None = None
) -> tuple[Manifest, Manifest]:
    """Hold out about ``test_fraction`` of each class at random; the same seed and images give the same split.

    Of a class of two or more images, at least one is on each side; the only image of a class is a training image.
    With ``groups``, the name of each image's group (N,), every group is on one side as a whole, and a class may lack
    test images. So it is if an image may have several classes. Returns the training and the test images, each in the
    manifest's order.

    Raises UsageError if no group can be held out.
    """
    if manifest.label_sets is not None and groups is None:
        groups = np.arange(len(manifest)).astype(object)  # each image is a group of its own
    if groups is None:
        held_out = _held_out(manifest, test_fraction, seed)
    else:
        held_out = _held_out_groups(manifest, groups, test_fraction, seed)
    return manifest.select(np.flatnonzero(~held_out)), manifest.select(np.flatnonzero(held_out))


def check_can_split(manifest: Manifest, test_fraction: float) -> None:
    """Raise UsageError if a class has only one image, so that none of it can be held out."""
    if few := [name for name, count in zip(manifest.classes, manifest.class_counts(), strict=True) if count < 2]:
        needed = math.ceil(1 / test_fraction)
        raise UsageError(
            f"{first_names(few)} in {manifest.url} {'have' if len(few) > 1 else 'has'} only one image, so that none "
            f"can be held out for testing; add images ({needed} per class make --test-fraction {test_fraction} exact), "
            "remove the class, or set --test-data."
        )


def _split_names(table: LabelTable) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values of the column ``split`` for training images, and for those to test on; none without such a column."""
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


def _held_out(manifest: Manifest, fraction: float, seed: int) -> Mask:
    held_out = np.zeros(len(manifest), bool)
    for label in range(len(manifest.classes)):
        members = np.flatnonzero(manifest.labels == label)
        num_held_out = min(max(1, round(len(members) * fraction)), len(members) - 1)
        shuffled = np.random.default_rng((abs(seed), label)).permutation(members)
        held_out[shuffled[:num_held_out]] = True
    return held_out


def _held_out_groups(manifest: Manifest, groups: npt.NDArray[np.object_], fraction: float, seed: int) -> Mask:
    """Hold out each group, the largest first, that brings the held-out share of the classes closer to ``fraction``."""
    names, group = np.unique(groups.astype(str), return_inverse=True)
    counts, sizes = _class_counts(manifest, group), np.bincount(group)
    shares = counts / counts.sum(axis=0).clip(min=1)  # (G, C), of each class
    shuffled = np.random.default_rng(abs(seed)).permutation(len(names))
    chosen, distance = np.zeros(len(names), bool), np.full(counts.shape[1], -fraction)
    for number in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        if ((distance + shares[number]) ** 2).sum() < (distance**2).sum():
            chosen[number] = True
            distance += shares[number]
    if not chosen.any():
        raise UsageError(
            f"None of {len(names):,} groups is small enough for --test-fraction {fraction}: the smallest has "
            f"{int(sizes.min()):,} of {len(manifest):,} images; raise it, or set --test-data."
        )
    return chosen[group]


def _class_counts(manifest: Manifest, group: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """How many images of each class each group has, (G, C), and one more column of all if they are sets."""
    num_groups = int(group.max()) + 1
    if manifest.label_sets is None:
        counts = np.zeros((num_groups, len(manifest.classes)))
        np.add.at(counts, (group, manifest.labels), 1)
        return counts
    counts = np.zeros((num_groups, len(manifest.classes) + 1))
    np.add.at(counts, group, np.pad(manifest.label_sets, ((0, 0), (0, 1)), constant_values=True)[manifest.labels])
    return counts
