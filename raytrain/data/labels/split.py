"""Split of the images into training and test images."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from raytrain.data.labels.folders import first_names, is_training, test_names
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError

Mask = npt.NDArray[np.bool_]


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
    counts = np.bincount(manifest.labels, minlength=len(manifest.classes))
    if few := [name for name, count in zip(manifest.classes, counts, strict=True) if count < 2]:
        needed = math.ceil(1 / test_fraction)
        raise UsageError(
            f"{first_names(few)} in {manifest.url} {'have' if len(few) > 1 else 'has'} only one image, so that none "
            f"can be held out for testing; add images ({needed} per class make --test-fraction {test_fraction} exact), "
            "remove the class, or set --test-data."
        )


def split_names(splits: npt.NDArray[np.object_], url: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values of the column ``split`` for training images, and for those to test on, test before validation."""
    present = sorted(set(splits))
    training, tested = tuple(filter(is_training, present)), test_names(present)
    if not training or not tested:
        shown = ", ".join(map(repr, present[:5]))
        raise UsageError(f"The column 'split' of {url} has the values {shown}; it must have train, and test or val.")
    return training, tested


def _held_out(manifest: Manifest, fraction: float, seed: int) -> Mask:
    held_out = np.zeros(len(manifest), bool)
    for label in range(len(manifest.classes)):
        members = np.flatnonzero(manifest.labels == label)
        shuffled = np.random.default_rng((abs(seed), label)).permutation(members)
        held_out[shuffled[: _num_held_out(len(members), fraction)]] = True
    return held_out


def _num_held_out(num_images: int, fraction: float) -> int:
    return min(max(1, round(num_images * fraction)), num_images - 1) if num_images > 1 else 0


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
