"""Hold images out for testing, at random some of each class, or whole groups."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from raytrain.data.labels.listing import first_names
from raytrain.data.labels.manifest import Manifest
from raytrain.errors import UsageError


def train_test_split(
    manifest: Manifest, test_fraction: float, seed: int, groups: npt.NDArray[np.object_] | None = None
) -> tuple[Manifest, Manifest]:
    """Hold out about ``test_fraction`` of each class at random; the same seed and images give the same split.

    Of a class of two or more images, at least one is on each side; the only image of a class is a training image.
    With ``groups``, the name of each image's group (N,), every group is on one side as a whole, and a class may lack
    test images. So it is if an image may have several classes. Returns the training and the test images, each in the
    manifest's order: ``train, test = train_test_split(images, 0.2, seed=0)``.

    Raises UsageError if no group can be held out.
    """
    if manifest.label_sets is not None and groups is None:
        groups = np.arange(len(manifest)).astype(object)  # each image is a group of its own
    if groups is not None:
        held_out = _held_out_groups(manifest, groups, test_fraction, seed)
    else:
        # Each class has random numbers of its own, so that further classes leave its split as it is.
        held_out = np.zeros(len(manifest), bool)
        for label in range(len(manifest.classes)):
            members = np.flatnonzero(manifest.labels == label)
            num_held_out = min(max(1, round(len(members) * test_fraction)), len(members) - 1)
            shuffled = np.random.default_rng((abs(seed), label)).permutation(members)
            held_out[shuffled[:num_held_out]] = True
    return manifest.select(np.flatnonzero(~held_out)), manifest.select(np.flatnonzero(held_out))


def _held_out_groups(
    manifest: Manifest, groups: npt.NDArray[np.object_], fraction: float, seed: int
) -> npt.NDArray[np.bool_]:
    """Hold out each group, the largest first, that brings the held-out share of the classes closer to ``fraction``."""
    names, group = np.unique(groups.astype(str), return_inverse=True)
    sizes = np.bincount(group)

    # How many images of each class each group has, (G, C), and one more column of all if an image may have several.
    if manifest.label_sets is None:
        counts = np.zeros((len(names), len(manifest.classes)))
        np.add.at(counts, (group, manifest.labels), 1)
    else:
        counts = np.zeros((len(names), len(manifest.classes) + 1))
        members = np.pad(manifest.label_sets, ((0, 0), (0, 1)), constant_values=True)
        np.add.at(counts, group, members[manifest.labels])
    shares = counts / counts.sum(axis=0).clip(min=1)  # (G, C), of each class

    # Large groups come first: the small ones after them can make up for what is lacking.
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


def check_can_split(manifest: Manifest, test_fraction: float) -> None:
    """Raise UsageError if a class has only one image, so that none of it can be held out."""
    if few := [name for name, count in zip(manifest.classes, manifest.class_counts(), strict=True) if count < 2]:
        needed = math.ceil(1 / test_fraction)
        raise UsageError(
            f"{first_names(few)} in {manifest.url} {'have' if len(few) > 1 else 'has'} only one image, so that none "
            f"can be held out for testing; add images ({needed} per class make --test-fraction {test_fraction} exact), "
            "remove the class, or set --test-data."
        )
