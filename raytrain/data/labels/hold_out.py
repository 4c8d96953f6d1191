"""Hold images out for validation, at random some of each class, or whole groups."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from raytrain.data.labels.listing import first_names
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError, format_count

HELD_OUT_FRACTION = 0.1
"""Fraction of each class that is held out for validation if neither images nor --validation-fraction are given."""


def hold_out(
    manifest: Manifest, fraction: float, seed: int, groups: npt.NDArray[np.object_] | None = None
) -> tuple[Manifest, Manifest]:
    """Hold out about ``fraction`` of each class at random; the same seed and images give the same split.

    Of a class of two or more images, at least one is on each side; the only image of a class is a training image.
    With ``groups``, the name of each image's group (N,), every group is on one side as a whole. A class may lack
    validation images with groups, or if images can have several classes. Returns the training and the validation
    images, each in the manifest's order: ``train, validation = hold_out(images, 0.2, seed=0)``.

    Raises UsageError if no group can be held out.
    """
    if manifest.label_sets is not None and groups is None:
        groups = np.arange(len(manifest)).astype(object)  # each image is a group of its own
    if groups is not None:
        held_out = _held_out_groups(manifest, groups, fraction, seed)
    else:
        # Each class has random numbers of its own, so that further classes leave its split as it is.
        held_out = np.zeros(len(manifest), bool)
        for label, members in enumerate(_members_of_classes(manifest)):
            num_held_out = min(max(1, round(len(members) * fraction)), len(members) - 1)
            shuffled = np.random.default_rng((abs(seed), label)).permutation(members)
            held_out[shuffled[:num_held_out]] = True
    return manifest.select(np.flatnonzero(~held_out)), manifest.select(np.flatnonzero(held_out))


def _members_of_classes(manifest: Manifest) -> list[npt.NDArray[np.int64]]:
    """Return the indices of the images of each class, in their order. An image must have one class."""
    # One sort for all classes: a search for each would take minutes for 20,000 classes of 14 million images.
    ends = np.cumsum(manifest.class_counts())
    return np.split(np.argsort(manifest.labels, kind="stable"), ends[:-1])


def hold_out_fold(
    manifest: Manifest, fold: tuple[int, int], seed: int, groups: npt.NDArray[np.object_] | None = None
) -> tuple[Manifest, Manifest]:
    """Hold out one fold of a cross-validation: each image is in one of the folds, which have equal shares.

    ``fold`` is its number, counted from 1, and the number of folds. The share of each class is the same in all folds,
    up to one image. With ``groups``, (N,), every group is in one fold as a whole. Returns the training and the held-out
    images: ``hold_out_fold(images, (2, 5), seed=0)``.

    Raises UsageError if there are fewer images of a class, or fewer groups, than folds.
    """
    number, num_folds = fold
    if groups is None and manifest.label_sets is None:
        fold_of = _folds_of_classes(manifest, num_folds, seed)
    else:
        fold_of = _folds_of_groups(manifest, groups, num_folds, seed)
    held_out = fold_of == number - 1
    return manifest.select(np.flatnonzero(~held_out)), manifest.select(np.flatnonzero(held_out))


def _folds_of_classes(manifest: Manifest, num_folds: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the fold of each image, (N,), from 0. The images of a class are dealt out to the folds like cards.

    Raises UsageError if a class has fewer images than there are folds.
    """
    counts = manifest.class_counts()
    if few := [name for name, count in zip(manifest.classes, counts, strict=True) if count < num_folds]:
        fewest = int(counts.min())
        advice = f"take at most {fewest:,} folds, or remove" if fewest > 1 else "add images, or remove"
        raise UsageError(
            f"{num_folds:,} folds need {num_folds:,} images of each class, and {first_names(few)} in {manifest.url} "
            f"{'have' if len(few) > 1 else 'has'} fewer ({fewest:,} of {manifest.classes[counts.argmin()]}); {advice} "
            f"{'these classes' if len(few) > 1 else 'the class'}."
        )
    fold_of = np.zeros(len(manifest), np.int64)
    for label, members in enumerate(_members_of_classes(manifest)):
        shuffled = np.random.default_rng((abs(seed), label)).permutation(members)
        # Each class begins with another fold, so that the remainders of all classes spread over the folds.
        fold_of[shuffled] = (np.arange(len(members)) + label) % num_folds
    return fold_of


def _folds_of_groups(
    manifest: Manifest, groups: npt.NDArray[np.object_] | None, num_folds: int, seed: int
) -> npt.NDArray[np.int64]:
    """Return the fold of each image, (N,), from 0. Each group goes to the fold where its classes are rarest so far.

    Without ``groups``, (N,), each image is a group of its own. Raises UsageError if there are fewer groups than folds.
    """
    group_of_image = np.arange(len(manifest)) if groups is None else groups.astype(str)
    names, group = np.unique(group_of_image, return_inverse=True)
    if len(names) < num_folds:
        divided = "images" if groups is None else "groups"
        in_groups = "" if groups is None else f" of {format_count(len(names), 'group')}"
        raise UsageError(
            f"{num_folds:,} folds need at least {num_folds:,} {divided}, and {manifest.url} has "
            f"{format_count(len(manifest), 'image')}{in_groups}; "
            + (f"take at most {len(names):,} folds." if len(names) > 1 else "folds cannot divide them.")
        )

    # Large groups come first, so that small ones can fill the gaps that they leave; the seed orders groups of one size.
    shares_of, sizes = _shares_of_groups(manifest, group), np.bincount(group)
    shuffled = np.random.default_rng(abs(seed)).permutation(len(names))
    fold_of_group = np.zeros(len(names), np.int64)
    filled = np.zeros((num_folds, len(shares_of(0))))  # the share of each class that each fold has so far
    num_images = np.zeros(num_folds, np.int64)
    for index in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        # The sum of squares over all folds grows least where the group's classes are rarest so far. If it grows by the
        # same in several, as for groups of one class each, the one with the fewest images gets it: none stays empty.
        shares = shares_of(index)
        growth = (shares * (2 * filled + shares)).sum(axis=1)
        chosen = np.where(growth <= growth.min() * (1 + 1e-9), num_images, len(manifest)).argmin()
        fold_of_group[index] = chosen
        filled[chosen] += shares
        num_images[chosen] += sizes[index]
    return fold_of_group[group]


def _held_out_groups(
    manifest: Manifest, groups: npt.NDArray[np.object_], fraction: float, seed: int
) -> npt.NDArray[np.bool_]:
    """Return which images are held out, (N,): groups that bring the share of each class closer to ``fraction``.

    Raises UsageError if no group does.
    """
    names, group = np.unique(groups.astype(str), return_inverse=True)
    sizes = np.bincount(group)
    shares_of = _shares_of_groups(manifest, group)

    # Large groups come first, so that small ones can fill the gaps that they leave. ``distance`` is, for each
    # class, how much more than ``fraction`` of it is held out so far. A group is held out if that makes the sum of the
    # squares smaller.
    shuffled = np.random.default_rng(abs(seed)).permutation(len(names))
    chosen, distance = np.zeros(len(names), bool), np.full(len(shares_of(0)), -fraction)
    for number in shuffled[np.argsort(-sizes[shuffled], kind="stable")]:
        distance_with = distance + shares_of(number)
        if (distance_with**2).sum() < (distance**2).sum():
            chosen[number], distance = True, distance_with

    # If even the smallest group is too large, there would be no validation images.
    if not chosen.any():
        if len(names) == len(manifest):  # each image is a group of its own
            raise UsageError(
                f"None of {len(names):,} images can be held out with --validation-fraction {fraction}: each is a "
                "larger part of its classes; raise it, or set --validation-data."
            )
        raise UsageError(
            f"None of {len(names):,} groups is small enough for --validation-fraction {fraction}: the smallest has "
            f"{int(sizes.min()):,} of {len(manifest):,} images; raise it, or set --validation-data."
        )
    return chosen[group]


def _shares_of_groups(manifest: Manifest, group: npt.NDArray[np.integer]) -> Callable[[int], npt.NDArray[np.float64]]:
    """Return a function that gives the fraction of each class that a group has, (C,). ``group`` is that of each image.

    If images may have several classes, a further number is the fraction of all images, (C + 1,). One group is counted
    at a time: a table of all would take 8 GB if a million images are groups of their own and there are 1,000 classes.
    """
    order, ends = np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))
    sizes_of_classes = manifest.class_counts().clip(min=1)

    def shares(number: int) -> npt.NDArray[np.float64]:
        """Return the fractions of the group with this number."""
        labels = manifest.labels[order[ends[number - 1] if number else 0 : ends[number]]]
        if manifest.label_sets is None:
            return np.bincount(labels, minlength=len(manifest.classes)) / sizes_of_classes
        return np.append(manifest.label_sets[labels].sum(axis=0) / sizes_of_classes, len(labels) / len(manifest))

    return shares


def check_can_split(manifest: Manifest, fraction: float) -> None:
    """Raise UsageError if a class has only one image, so that none of it can be held out."""
    if few := [name for name, count in zip(manifest.classes, manifest.class_counts(), strict=True) if count < 2]:
        needed = math.ceil(1 / fraction)
        raise UsageError(
            f"{first_names(few)} in {manifest.url} {'have' if len(few) > 1 else 'has'} only one image, so that none "
            f"can be held out for validation; add images ({needed} per class make --validation-fraction {fraction} "
            "exact), remove the class, or set --validation-data."
        )
