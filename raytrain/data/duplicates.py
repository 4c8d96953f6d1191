"""Images with the same content: held-out images that are training images too, and training images of two classes."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from raytrain.data.images.fetch_and_decode import read_contents, require_bytes
from raytrain.data.images.image_format import BadImage
from raytrain.data.labels.manifest import Manifest
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.permutation import Int64s
from raytrain.storage.store import Store

_log = logging.getLogger(__name__)
_NUM_READ_AT_ONCE = 64  # images
_MD5 = re.compile(r"[0-9a-f]{32}")
_MOST_COMPARED = 16  # held-out images, with one training image each
_NUM_VERIFIED = 8  # entity tags that are compared with the MD5 of the content


@dataclass(frozen=True)
class Duplicate:
    """An image ``key`` of the class ``label`` that has the content of a training image."""

    key: str
    label: str
    training_key: str
    training_label: str


@dataclass(frozen=True)
class Duplicates:
    """Images with the same content. Only ``compared`` of all ``images`` were compared before the deadline."""

    compared: int  # number of images, with those whose size in bytes no other image has
    images: int
    held_out: tuple[Duplicate, ...]  # held-out images that are training images, too
    contradicting: tuple[Duplicate, ...]  # training images that are training images of another class, too


def find_duplicates(parts: Sequence[StoredImages], deadline_s: float) -> Duplicates:
    """Find images whose files have the same content as a training image, until ``deadline_s`` of ``time.monotonic``.

    The first of ``parts`` are the training images, the others are held out. Files are compared by their MD5. An image
    of a size in bytes that no other has is not read, nor is an object whose entity tag is such a hash, as most are in
    S3. Raises StorageError if a store refuses or cannot be reached.
    """
    # Number the images part after part: the numbers of a part are those below its end.
    manifests = [part.manifest for part in parts]
    ends = np.cumsum([len(manifest) for manifest in manifests])
    num_train, num_images = int(ends[0]), int(ends[-1])

    # Only images that have as many bytes as others are compared, those first that share their size with the fewest.
    # Packed images are taken in their order, for a shard is read as a whole.
    sizes_bytes = np.concatenate([manifest.sizes_bytes for manifest in manifests])
    _, size_index, counts = np.unique(sizes_bytes, return_inverse=True, return_counts=True)
    num_of_this_size = counts[size_index]  # (num_images,)
    is_packed = any(manifest.packing is not None for manifest in manifests)
    order = np.arange(num_images) if is_packed else np.lexsort((size_index, num_of_this_size))
    candidates = order[num_of_this_size[order] > 1]

    # Group the images by content. Held-out images have the numbers after those of the training images, so the first of
    # a group is a training image, if any of them is. Each of the others makes a pair with that one.
    hashes = dict(_hashes(parts, ends, candidates, deadline_s))
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for image in sorted(hashes):
        groups[hashes[image]].append(image)
    pairs = [(image, group[0]) for group in groups.values() for image in group[1:] if group[0] < num_train]

    def key_and_label(image: int) -> tuple[str, str]:
        part = int(np.searchsorted(ends, image, side="right"))
        manifest, index = manifests[part], image - (int(ends[part - 1]) if part else 0)
        return manifest.keys[index].as_py(), ", ".join(manifest.class_names(manifest.labels[index]))

    # Sorted by number, pairs of two training images come first.
    duplicates = [Duplicate(*key_and_label(image), *key_and_label(first)) for image, first in sorted(pairs)]
    num_in_training = sum(image < num_train for image, _ in pairs)
    return Duplicates(
        compared=num_images - len(candidates) + len(hashes),
        images=num_images,
        held_out=tuple(duplicates[num_in_training:]),
        contradicting=tuple(pair for pair in duplicates[:num_in_training] if pair.label != pair.training_label),
    )


def report_copies(stores: Mapping[Part, Store], manifests: Mapping[Part, Manifest]) -> None:
    """Log how many held-out images are copies of training images, in folders of their own or of another class."""
    store_of = {store.url: store for store in stores.values()}
    training, *held_out = (
        (part, StoredImages(store_of[manifest.url], manifest)) for part, manifest in manifests.items()
    )
    for part, images in held_out:
        copies = find_copies(training[1], images)
        if copies.equal:
            _log.warning(
                "%s of %s %s images have the name and the size of a training image of their class; %s of %s that were "
                "compared have its content, too, and say nothing of how the network does on others. `raytrain look` "
                "compares all.",
                *(f"{copies.candidates:,}", f"{len(images.manifest):,}", part),
                *(f"{copies.equal:,}", f"{copies.compared:,}"),
            )


class Copies(NamedTuple):
    """Held-out images that have the name and the size of a training image of their class, as copies have."""

    candidates: int
    compared: int
    equal: int  # of those that were compared


def find_copies(training: StoredImages, held_out: StoredImages) -> Copies:
    """Compare up to 16 held-out images with the training images of the same class, file name and size in bytes.

    That costs two reads for each, and finds a folder that was copied, or is there twice by a link. An image that is in
    both parts by the same path is no copy. Packed images are not compared, as whole shards would be read. Raises
    StorageError as :func:`find_duplicates` does.
    """
    if training.manifest.packing is not None or held_out.manifest.packing is not None:
        return Copies(0, 0, 0)

    def paths_and_marks(manifest: Manifest) -> Iterator[tuple[str, tuple[str, int, int]]]:
        """Yield the path of each image, and the marks that a copy shares: name, size in bytes and label."""
        rows = zip(manifest.keys.to_pylist(), manifest.sizes_bytes.tolist(), manifest.labels.tolist(), strict=True)
        for key, size_bytes, label in rows:
            yield f"{manifest.url.rstrip('/')}/{key}", (key.rpartition("/")[2], size_bytes, label)

    # Find the training image with the marks of each held-out one, if there is one at another path.
    held_out_by_marks = {marks: (index, path) for index, (path, marks) in enumerate(paths_and_marks(held_out.manifest))}
    training_index_of: dict[int, int] = {}  # by the index of the held-out image
    for training_index, (path, marks) in enumerate(paths_and_marks(training.manifest)):
        if marks in held_out_by_marks:
            held_out_index, held_out_path = held_out_by_marks[marks]
            if held_out_path != path:
                training_index_of[held_out_index] = training_index

    # Compare some of these pairs, evenly spaced.
    candidates = sorted(training_index_of)
    chosen = candidates[:: max(1, len(candidates) // _MOST_COMPARED)][:_MOST_COMPARED]
    hashes_held_out = dict(held_out.hashes(np.array(chosen, np.int64)))
    hashes_training = dict(training.hashes(np.array([training_index_of[index] for index in chosen], np.int64)))
    num_equal = sum(
        index in hashes_held_out and hashes_held_out[index] == hashes_training.get(training_index_of[index])
        for index in chosen
    )
    return Copies(len(candidates), len(chosen), num_equal)


def report_trained_on(train: Manifest, held_out: Mapping[Part, Manifest]) -> None:
    """Log how many images of parts that have an option of their own, such as --test-data, are trained on, too.

    A folder that is given for two parts is a slip, or a first try, and so is one within the other: its images are then
    both trained on and held out. They are not if labels or folders divide them.
    """
    for part, images in held_out.items():
        train_url, url = f"{train.url.rstrip('/')}/", f"{images.url.rstrip('/')}/"
        if train_url == url:
            relation = "is the folder of"
        elif url.startswith(train_url):
            relation = "is within"
        elif train_url.startswith(url):
            relation = "contains"
        else:
            continue
        trained_on = {train_url + key for key in train.keys.to_pylist()}
        if num_trained := sum(url + key in trained_on for key in images.keys.to_pylist()):
            _log.warning(
                "%s of %s %s images are trained on, too, as --%s-data %s --data: they say nothing of how the network "
                "does on others.",
                *(f"{num_trained:,}", f"{len(images):,}", part, part, relation),
            )


def _hashes(
    parts: Sequence[StoredImages], ends: Int64s, candidates: Int64s, deadline_s: float
) -> Iterator[tuple[int, str]]:
    """Yield the number and the MD5 of each candidate until the deadline; those whose file is gone are left out.

    Images are numbered part after part, up to the ``ends`` of each part. The first candidates are read even if the
    deadline has passed.
    """
    for start in range(0, len(candidates), _NUM_READ_AT_ONCE):
        if start and time.monotonic() >= deadline_s:
            return
        chosen = candidates[start : start + _NUM_READ_AT_ONCE]
        for part, end in zip(parts, ends.tolist(), strict=True):
            first = end - len(part.manifest)
            for index, content_hash in part.hashes(chosen[(chosen >= first) & (chosen < end)] - first):
                yield index + first, content_hash


@dataclass(frozen=True, eq=False)
class StoredImages:
    """The images of one part in storage."""

    store: Store
    manifest: Manifest

    def hashes(self, indices: Int64s) -> Iterator[tuple[int, str]]:
        """Yield the index and the MD5 of each file at ``indices``; a file that is gone is left out."""
        # Most hashes are in the entity tags of the listing. Files without one there are read.
        chosen = self.manifest.select(indices)
        hashes = [_md5_in(etag) if self._etags_are_hashes else None for etag in chosen.etags.to_pylist()]
        is_unknown = np.array([content_hash is None for content_hash in hashes], bool)
        for index, content_hash in zip(indices.tolist(), hashes, strict=True):
            if content_hash is not None:
                yield index, content_hash

        # The other files are read.
        contents = read_contents(self.store, chosen.select(np.flatnonzero(is_unknown)))
        for index, content in zip(indices[is_unknown].tolist(), contents, strict=True):
            try:
                yield index, _md5(require_bytes(content))
            except BadImage:
                continue

    @cached_property
    def _etags_are_hashes(self) -> bool:
        """True if entity tags that look like an MD5 are the MD5 of the file, which is not so in S3 with AWS KMS.

        The first eight files with such a tag are read to find that out.
        """
        look_like_md5 = (index for index, etag in enumerate(self.manifest.etags) if _md5_in(etag.as_py()))
        chosen = self.manifest.select(np.fromiter(islice(look_like_md5, _NUM_VERIFIED), np.int64))
        contents = read_contents(self.store, chosen)
        hashes = [None if isinstance(content, Exception) else _md5(content) for content in contents]
        return bool(hashes) and hashes == [_md5_in(etag) for etag in chosen.etags.to_pylist()]


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _md5_in(etag: str) -> str | None:
    """Return what is in an entity tag, which may be quoted, if it has the form of an MD5; else None."""
    match = _MD5.fullmatch(etag.strip('"'))
    return match and match[0]
