"""Images with the same content: test images that are training images too, and training images of two classes."""

from __future__ import annotations

import hashlib
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from raytrain.data.images.decode import BadImage
from raytrain.data.images.image_reader import read_contents, require_bytes
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.permutation import Int64s
from raytrain.storage.store import Store

_BLOCK = 64  # images that are read at once
_MD5 = re.compile(r"[0-9a-f]{32}")
_NUM_VERIFIED = 8  # entity tags, by the content


@dataclass(frozen=True)
class Duplicate:
    """An image ``key`` of the class ``label`` that has the content of a training image."""

    key: str
    label: str
    training_key: str
    training_label: str


@dataclass(frozen=True)
class Duplicates:
    """Images with the same content. ``compared`` of all ``images`` were compared; there was no time for the others."""

    compared: int
    images: int
    test: tuple[Duplicate, ...]  # test images that are training images, too
    contradicting: tuple[Duplicate, ...]  # training images that are training images of another class, too


def find_duplicates(train: StoredImages, test: StoredImages, deadline_s: float) -> Duplicates:
    """Compare training and test images, each with all others, by the MD5 of their files, until ``deadline_s``.

    An image whose size in bytes no other has needs no reading, and neither do objects whose entity tags are such
    hashes, as most are in S3. ``deadline_s`` is a time of ``time.monotonic``. Raises StorageError if a store refuses or
    cannot be reached.
    """
    sources = train, test
    candidates = _candidates(train.manifest, test.manifest)
    num_train, num_images = len(train.manifest), len(train.manifest) + len(test.manifest)
    hashes = dict(_hashes(sources, candidates, deadline_s))
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for image in sorted(hashes):
        groups[hashes[image]].append(image)
    pairs = [(image, group[0]) for group in groups.values() for image in group[1:] if group[0] < num_train]
    duplicates = [_described(sources, *pair) for pair in sorted(pairs)]
    num_contradicting = sum(image < num_train for image, _ in pairs)
    return Duplicates(
        compared=num_images - len(candidates) + len(hashes),
        images=num_images,
        test=tuple(duplicates[num_contradicting:]),
        contradicting=tuple(each for each in duplicates[:num_contradicting] if each.label != each.training_label),
    )


@dataclass(frozen=True, eq=False)
class StoredImages:
    """The training images, or the test images, and the hashes of their files."""

    store: Store
    manifest: Manifest

    def hashes(self, indices: Int64s) -> Iterator[tuple[int, str]]:
        """The MD5 of the files at ``indices``, but for those that are gone."""
        chosen = self.manifest.select(indices)
        etags = [_md5_of(etag) if self._etags_are_hashes else None for etag in chosen.etags.to_pylist()]
        unknown = np.array([etag is None for etag in etags], bool)
        yield from ((index, etag) for index, etag in zip(indices.tolist(), etags, strict=True) if etag)
        contents = read_contents(self.store, chosen.select(np.flatnonzero(unknown)))
        for index, content in zip(indices[unknown].tolist(), contents, strict=True):
            try:
                yield index, _md5(require_bytes(content))
            except BadImage:
                continue

    @cached_property
    def _etags_are_hashes(self) -> bool:
        """Whether the entity tags that look like MD5 are those of the files. Not so in S3 with keys of AWS KMS."""
        alike = (index for index, etag in enumerate(self.manifest.etags) if _md5_of(etag.as_py()))
        chosen = self.manifest.select(np.fromiter(islice(alike, _NUM_VERIFIED), np.int64))
        contents = read_contents(self.store, chosen)
        hashes = [None if isinstance(content, Exception) else _md5(content) for content in contents]
        return bool(hashes) and hashes == [_md5_of(etag) for etag in chosen.etags.to_pylist()]


def _hashes(sources: Sequence[StoredImages], candidates: Int64s, deadline_s: float) -> Iterator[tuple[int, str]]:
    """Number and hash of training images, and of test images, whose numbers follow theirs."""
    num_train = len(sources[0].manifest)
    for start in range(0, len(candidates), _BLOCK):
        if start and time.monotonic() >= deadline_s:
            return
        block = candidates[start : start + _BLOCK]
        yield from sources[0].hashes(block[block < num_train])
        for index, content_hash in sources[1].hashes(block[block >= num_train] - num_train):
            yield index + num_train, content_hash


def _candidates(train: Manifest, test: Manifest) -> Int64s:
    """The images that have as many bytes as others, those first that share their size with the fewest.

    Packed images are in their order, for a shard is read as a whole.
    """
    sizes_bytes = np.concatenate([train.sizes_bytes, test.sizes_bytes])
    _, size, counts = np.unique(sizes_bytes, return_inverse=True, return_counts=True)
    is_packed = train.packing is not None or test.packing is not None
    order = np.arange(len(size)) if is_packed else np.lexsort((size, counts[size]))
    return order[counts[size[order]] > 1]


def _described(sources: tuple[StoredImages, StoredImages], image: int, training_image: int) -> Duplicate:
    train, test = (source.manifest for source in sources)
    manifest, index = (train, image) if image < len(train) else (test, image - len(train))
    names = [
        (images.keys[place].as_py(), ", ".join(images.class_names(images.labels[place])))
        for images, place in ((manifest, index), (train, training_image))
    ]
    return Duplicate(*names[0], *names[1])


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _md5_of(etag: str) -> str | None:
    """The MD5 that an entity tag of S3 may be; None if it is none."""
    found = _MD5.fullmatch(etag.strip('"'))
    return found and found[0]
