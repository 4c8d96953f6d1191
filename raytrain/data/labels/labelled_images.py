"""Training, validation and test images of a run, with the classes that a label file or their folders say."""

from __future__ import annotations

import logging
import posixpath
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raytrain.config import TrainConfig
from raytrain.data.labels.class_names import check_classes, report_alike
from raytrain.data.labels.folders import build_manifest, build_manifests, top_folders
from raytrain.data.labels.hold_out import HELD_OUT_FRACTION, check_can_split, hold_out, hold_out_fold
from raytrain.data.labels.label_columns import JOINED, ONE_CLASS_EACH, is_whole_number
from raytrain.data.labels.label_file import LabelTable, own_label_table
from raytrain.data.labels.listing import ends_like_image, first_names
from raytrain.data.labels.manifest import Manifest, list_images
from raytrain.data.labels.part_names import HELD_OUT, PARTS, Part, is_held_out, names_of_parts, part_like, parts_among
from raytrain.errors import UsageError, format_count
from raytrain.storage.store import Store

_log = logging.getLogger("raytrain")
_NUM_SHOWN = 3  # keys without an image
_LIKE_NO_LABEL = {"na", "n.a.", "nat", "nan", "null", "nil", "?", "-", "--", "."}
"""Names of classes, in lower case, that probably stand for no label, but may be one, as NA of Namibia is."""
_FRACTION = re.compile(r"[+-]?\d*[.,]\d+(e[+-]?\d+)?", re.IGNORECASE)
_SEPARATORS = re.compile(r"[\s|;,/+&]+")


def labelled_parts(
    config: TrainConfig, stores: Mapping[Part, Store], tables: Mapping[Part, LabelTable]
) -> dict[Part, Manifest]:
    """Return the training images, the validation images and, if there are three parts, the test images.

    ``stores`` are those that the options name, ``tables`` their label files. The images below ``--data`` may be divided
    into parts by their folders, or by a column of their label file. A held-out part with a store of its own is labelled
    separately, by its own label file or its folders, unless ``--labels`` labels all images. If no part is held out, or
    only test images are and ``--validation-fraction`` is given, that fraction of the training images is held out for
    validation, in whole groups with ``--group-by``.

    Raises UsageError if the part or the class of an image cannot be found out, or too few images are left, and
    StorageError if a store cannot be read.
    """
    parts, table_of_part = _parts_as_given(config, stores, tables)

    # Images that choose a checkpoint are no test of it: if test images are the only ones held out, they are for
    # validation, unless some of the training images are asked for.
    divides_training_images = config.fold is not None or config.validation_fraction is not None
    if "test" in parts and "validation" not in parts and not divides_training_images:
        parts["validation"], table_of_part["validation"] = parts.pop("test"), table_of_part.pop("test")

    # Validation images that are given are used; otherwise some of the training images are held out.
    if "validation" not in parts:
        parts["train"], parts["validation"] = _divided(config, parts["train"], table_of_part["train"])
    elif config.fold is not None:
        raise UsageError(
            "--validation-fold divides the training images, and validation images are given; move these to the "
            "training images, or omit it."
        )
    else:
        if config.validation_fraction is not None:
            sentence = "--validation-fraction %g is not used: the validation images are given."
            _log.warning(sentence, config.validation_fraction)
        if config.group_by:
            _report_divided_groups(config.group_by, [(table_of_part[part], images) for part, images in parts.items()])
    _report_missing_classes(parts)
    return {part: parts[part] for part in PARTS if part in parts}


def _parts_as_given(
    config: TrainConfig, stores: Mapping[Part, Store], tables: Mapping[Part, LabelTable]
) -> tuple[dict[Part, Manifest], dict[Part, LabelTable | None]]:
    """Return the images of each part that is given, and the table that labels each; None if their folders do.

    The arguments are those of :func:`labelled_parts`, and it raises the same errors.
    """
    # The images below --data are labelled by the file of --labels, or one that lies beside them. The file of --labels
    # labels the other images, too. Those with a file of their own are labelled apart, as are all without --labels.
    table = tables.get("train")
    apart: list[Part] = [part for part in HELD_OUT if part in stores and (table is None or part in tables)]
    is_beside_images = table is None
    if table is None:
        table = own_label_table(stores["train"])

    # First the images below --data, and those that have the same label file.
    if table is not None:
        together: dict[Part, Store] = {part: store for part, store in stores.items() if part not in apart}
        parts = _parts_of_table(table, together, config.max_bad_fraction, has_others=bool(apart))
        if is_beside_images:  # a resumed run does not read this table again, and so cannot compare its digest
            parts = {part: replace(images, labels_digest="") for part, images in parts.items()}
    elif apart:
        parts: dict[Part, Manifest] = {"train": build_manifest(stores["train"], None, "train")}
    else:
        parts = build_manifests(stores["train"])
    table_of_part: dict[Part, LabelTable | None] = dict.fromkeys(parts, table)

    # Then the parts apart, whose labels index the classes of the training images.
    for part in apart:
        table_of_part[part] = tables.get(part)
        classes = parts["train"].classes
        parts[part] = images_of_part(stores[part], table_of_part[part], part, config.max_bad_fraction, classes)
    return parts, table_of_part


def _divided(config: TrainConfig, images: Manifest, table: LabelTable | None) -> tuple[Manifest, Manifest]:
    """Return the training images, and those of them that are held out for validation: a fold of them, or a fraction.

    With ``--group-by``, whole groups of the label ``table`` are held out. Raises UsageError if there are too few.
    """
    groups = table.groups[table.rows_of(images)] if table is not None and config.group_by else None
    if config.fold is not None:
        return hold_out_fold(images, config.fold, config.seed, groups)
    fraction = HELD_OUT_FRACTION if config.validation_fraction is None else config.validation_fraction
    if groups is None and (table is None or table.classes is None):
        check_can_split(images, fraction)
    return hold_out(images, fraction, config.seed, groups)


def _parts_of_table(
    table: LabelTable, stores: Mapping[Part, Store], max_bad_fraction: float, *, has_others: bool
) -> dict[Part, Manifest]:
    """Return the images that one label file labels: those of each store, or those of each split in the file.

    ``has_others``: held-out images have label files of their own, so this file may have training images alone. Raises
    UsageError as :func:`check_keys`, :func:`_split_names` and :func:`labelled` do.
    """
    listed = {part: table.images or list_images(store) for part, store in stores.items()}
    check_keys(table, tuple(listed.values()), max_bad_fraction)
    splits = _split_names(table, has_others=has_others)

    # If rows are of another held-out part than the store that is given, such as val and a store of test images, then
    # they are about that store.
    for part in HELD_OUT:
        like = part_like(part, splits) if part in listed else None
        if like is not None and like not in listed:
            splits[part] = splits.pop(like)

    # The first part, training, decides on the classes. A part without a store has its images below --data.
    parts: dict[Part, Manifest] = {}
    for part in PARTS:
        if part in listed or part in splits:
            classes = parts["train"].classes if parts else None
            parts[part] = labelled(listed.get(part, listed["train"]), table, splits.get(part, ()), classes)
    return parts


def _report_divided_groups(group_by: str, parts: Sequence[tuple[LabelTable | None, Manifest]]) -> None:
    """Log how many groups are divided over several parts by the split that came with the images."""
    groups = [set(table.groups[table.rows_of(images)]) for table, images in parts if table is not None]
    counts = Counter(group for names in groups for group in names)
    if shared := sorted(group for group, count in counts.items() if count > 1):
        _log.warning(
            "%s of %s values of --group-by %s, such as %s, have both training and held-out images: the split was given "
            "with the images, so that --group-by does not change it.",
            *(f"{len(shared):,}", f"{len(counts):,}", group_by, first_names(shared)),
        )


def _report_missing_classes(parts: Mapping[Part, Manifest]) -> None:
    """Log the classes that have no image in a part, as whole groups that are held out and splits of a table leave some.

    Without training images they are not learned, and without others no figure says anything about them.
    """
    for part, images in parts.items():
        is_training = part == "train"
        effect = "the network cannot learn them" if is_training else "no figure says how well they are learned"
        counts = zip(images.classes, images.class_counts(), strict=True)
        if missing := [name for name, count in counts if not count]:
            _log.warning(
                "Classes without a %s image, so that %s: %s of %s (%s).",
                *("training" if is_training else part, effect),
                *(f"{len(missing):,}", f"{len(images.classes):,}", first_names(missing)),
            )


def _split_names(table: LabelTable, *, has_others: bool = False) -> dict[Part, tuple[str, ...]]:
    """Return the values of the column ``split`` that mean each part; an empty dictionary without such a column.

    Rows with a value that means no part are logged as not used. Raises UsageError if no value means training. If none
    means held-out images, that is allowed only with ``has_others``: other label files have these.
    """
    present = sorted(set(table.splits))
    if not any(present):
        return {}
    names_of = names_of_parts(present)
    if "train" not in names_of or (len(names_of) == 1 and not has_others):
        shown = ", ".join(map(repr, present[:5]))
        raise UsageError(
            f"The column 'split' of {table.url} has the values {shown}; it must have train, and validation or test."
        )
    used = {name for names in names_of.values() for name in names}
    if unused := Counter(split or "none" for split in table.splits if split not in used):
        texts = ", ".join(f"{count:,} {split}" for split, count in unused.items())
        _log.warning("Rows of %s with other splits (%s) are not used.", table.url, texts)
    return names_of


def images_of_part(
    store: Store, table: LabelTable | None, part: Part, max_bad_fraction: float, classes: tuple[str, ...] | None = None
) -> Manifest:
    """Return the images of ``part`` below ``store``, labelled by ``table``.

    Without a table, the label file beside the images labels them, or else their folders do. ``classes`` are those that
    the labels index: for held-out images, the classes of the training images. If the label file has no split for this
    part, the split of the other held-out part is used.

    Raises UsageError if the images are not labelled as they should be, and StorageError if the store cannot be read.
    """
    if table is None:
        table_beside_images = own_label_table(store)
        if table_beside_images is None:
            return build_manifest(store, classes, part)
        images = images_of_part(store, table_beside_images, part, max_bad_fraction, classes)
        return replace(images, labels_digest="")  # a resumed run does not read the table again, so it cannot compare it
    images = table.images or list_images(store)
    check_keys(table, (images,), max_bad_fraction)
    if all(map(is_held_out, set(table.splits))):  # the file is of these images alone
        return labelled(images, table, (), classes)
    splits = _split_names(table)
    like = part_like(part, splits)
    return labelled(images, table, splits[like] if like is not None else (), classes)


def check_keys(table: LabelTable, listed: Sequence[Manifest], max_bad_fraction: float) -> None:
    """Log keys without an image and images without a key.

    Raises UsageError if more than ``max_bad_fraction`` of the keys have no image, or a key has several images.
    """
    num_images = np.zeros(len(table.keys), np.int64)  # of each key
    for images in listed:
        if not any(table.splits) and (parts := parts_among(top_folders(images.keys.to_pylist()))):
            sentence = "The folders %s below %s do not say the split; a column split in %s would."
            _log.warning(sentence, first_names(parts), images.url, table.url)
        rows = table.rows_of(images)

        # Keys such as C:/photos/cat/1.jpg were written on another machine: log which image such a key is taken for.
        first = int((rows >= 0).argmax()) if len(rows) else 0  # the first image that has a row, if any has
        if len(rows) and rows[first] >= 0:
            key, path = str(table.keys[rows[first]]), str(images.keys[first].as_py())
            has_other_suffix = ends_like_image(key) and posixpath.splitext(key)[1] != posixpath.splitext(path)[1]
            if len(key) > len(path) or has_other_suffix:
                is_or_are = "have other suffixes" if has_other_suffix else "are elsewhere"
                sentence = f"The images that %s names {is_or_are}: %s is taken for %s below %s."
                _log.warning(sentence, table.url, key, path, images.url)

        # Images without a key are only counted. If there are splits, a key may have an image in each store: its split
        # says which one it means.
        num_here = np.bincount(rows[rows >= 0], minlength=len(num_images))
        num_images = np.maximum(num_images, num_here) if any(table.splits) else num_images + num_here
        if num_without := int((rows < 0).sum()):
            _log.warning(
                "Images below %s that are not in %s are not used: %s.", images.url, table.url, f"{num_without:,}"
            )

    # Otherwise each key must name one image.
    if num_again := int((num_images > 1).sum()):
        raise UsageError(
            f"{table.url} has {format_count(num_again, 'key')} for several images each below "
            f"{' and '.join(images.url for images in listed)}, whose names differ in folder, suffix or Unicode form "
            "only; make them distinct, or give whole paths as keys."
        )

    # A key without an image is more often a wrong folder than a lost file.
    unknown = table.keys[num_images == 0]
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
    is none of them, or there is only one class. ``are_joined``: the caller has joined the classes of each image into
    one label on purpose, so that is not reported as a possible mistake.
    """
    # Choose the images that have a row (not -1) with a label; if an image may have several, it may have none. Of
    # these, take the ones in the given splits.
    rows = table.rows_of(images)
    chosen = np.flatnonzero((rows >= 0) & ((table.labels[rows] != "") | (table.classes is not None)))
    num_left_out = len(images) - len(chosen)
    if splits:  # images of the other parts are not left out
        used = [name for names in names_of_parts(sorted(set(table.splits))).values() for name in names]
        num_left_out += int((~np.isin(table.splits[rows[chosen]], used)).sum())
        chosen = chosen[np.isin(table.splits[rows[chosen]], splits)]
    if not len(chosen):
        in_split = f" and the split {' or '.join(splits)}" if splits else ""
        raise UsageError(
            f"None of the {format_count(len(images), 'image')} below {images.url} has a label{in_split} in {table.url}"
            "; give a label file that has them, or omit the option for images whose labels are not known."
        )

    # The classes: those given, or those of these images, or all of the table if an image may have several.
    names = table.labels[rows[chosen]]
    present = tuple(sorted(set(names))) if table.classes is None else table.classes
    if not present:
        raise UsageError(f"No row of the label file {table.url} has a class.")
    if table.classes is None or classes is not None:
        check_classes(present, classes, images.url, len(chosen))
    if classes is None:
        report_alike(present, table.url)
        if missing := [name for name in present if name.casefold() in _LIKE_NO_LABEL]:
            sentence = "%s of %s is a class like any other; leave the label of images without a class empty."
            _log.warning(sentence, first_names(list(map(repr, missing))), table.url)
        _report_fractions(present, table.url)
        if not are_joined:
            _report_compound_labels(present, table.url)
            if table.classes is not None and table.has_one_class_each:
                sentence = (
                    "Each row of %s has exactly one class, and the options allow several or none, for which loss and "
                    "figures are others; if an image has one class, omit --label-separator, or, with several "
                    "--label-column, %s."
                )
                _log.warning(sentence, table.url, ONE_CLASS_EACH)
    classes = classes or present

    # With one class for each image, a label is the number of the class.
    label_of = {name: label for label, name in enumerate(classes)}
    left_out = {**images.left_out, "images that the label file leaves out": num_left_out}
    common: dict[str, Any] = {"classes": classes, "left_out": left_out, "labels_digest": table.digest}
    if table.classes is None:
        labels = np.array([label_of[name] for name in names], np.int32)
        return replace(images.select(chosen), labels=labels, **common)

    # With several classes, a label is the number of a set of them: label_sets is (K, C) for K sets of C classes.
    texts = sorted(set(table.labels))
    number_of = {text: number for number, text in enumerate(texts)}
    label_sets = np.zeros((len(texts), len(classes)), bool)
    for members, text in zip(label_sets, texts, strict=True):
        members[[label_of[name] for name in text.split(JOINED) if name]] = True
    labels = np.array([number_of[text] for text in names], np.int32)
    return replace(images.select(chosen), labels=labels, label_sets=label_sets, **common)


def _report_fractions(classes: Sequence[str], url: str) -> None:
    """Log a warning if most classes are fractions, such as 0.25: somebody may want to predict numbers, which have an
    order.
    """
    fractions = [name for name in classes if _FRACTION.fullmatch(name) and not is_whole_number(name)]
    if 2 * len(fractions) > len(classes):
        sentence = (
            "%s of %s classes of %s are fractions, such as %s, and each is a class of its own, without an order; if "
            "they are measured values, write ranges of them as labels."
        )
        _log.warning(sentence, f"{len(fractions):,}", f"{len(classes):,}", url, fractions[0])


def _report_compound_labels(classes: Sequence[str], url: str) -> None:
    """Log a warning if a label seems to stand for several classes, so that --label-separator is missing.

    That is a label such as ``['cat', 'dog']`` or ``{"choices": ["cat", "dog"]}``, or ``cat dog`` beside the classes cat
    and dog, or any label if at least half of all have a separator and parts that recur, as ``rose|bright`` and
    ``rose|dark`` do.
    """
    # A class is suspect if it has several words, and either it begins like a list, or each word is a class, too.
    words = {name: set(_SEPARATORS.split(name)) for name in classes}
    suspects = (name for name in classes if len(words[name]) > 1 and (name[0] in "[{" or words[name] <= words.keys()))
    if (name := next(suspects, None)) is not None:
        sentence = "The label %r of %s is a class of its own; if it stands for several, give --label-separator."
        _log.warning(sentence, name, url)
        return

    # rose|bright, rose|dark and tulip are made of parts that recur, unlike names that contain a comma.
    for separator in "|;,":
        parts = {name: {part.strip() for part in name.split(separator)} for name in classes}
        counts = Counter(part for names in parts.values() for part in names)
        compound = [name for name in classes if separator in name]
        recurring = [name for name in compound if any(counts[part] > 1 for part in parts[name])]
        if recurring and 2 * len(recurring) >= len(classes):
            sentence = (
                "%s of %s classes of %s contain '%s', such as %r, and each is a class of its own; if they stand for "
                "several, give --label-separator '%s'."
            )
            _log.warning(sentence, f"{len(compound):,}", f"{len(classes):,}", url, separator, recurring[0], separator)
            return
