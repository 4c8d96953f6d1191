"""The images of a data set: their keys, classes and sizes, as a record that is stored with each run."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain.data.blocks import number_array, string_array
from raytrain.data.images.decode import ImageShape
from raytrain.data.labels.folders import FolderLabels, Part, check_classes, read_folders, tell_left_out
from raytrain.data.labels.listing import Listing, check_folder, list_files
from raytrain.data.plan.partition import rows_per_block
from raytrain.data.plan.permutation import Packing, ShardShuffle, check_range, read_packing
from raytrain.errors import StorageError, UsageError
from raytrain.storage.store import Store, StoredObject

UNLABELLED = -1
PACKED_INDEX = "packed.parquet"  # the manifest of a packed data set, stored beside its shards

_log = logging.getLogger("raytrain")
_METADATA = b"raytrain.manifest"
_STRAY = "images that are in no class folder"
_DIGEST_ROWS = 1 << 20  # at a time


class Shrinking(NamedTuple):
    """What has become of larger images when they were packed: JPEGs."""

    shorter_side: int  # pixels
    quality: int  # 1 to 100


@dataclass(frozen=True, eq=False)
class Manifest:
    """N images, sorted by key. Keys are paths relative to ``url``.

    Packed images are in the order of their shards instead, and keep the keys that they were packed from.
    """

    keys: pa.LargeStringArray  # (N,)
    labels: npt.NDArray[np.int32]  # (N,), indices into classes, or UNLABELLED
    sizes_bytes: npt.NDArray[np.int64]  # (N,)
    etags: pa.LargeStringArray  # (N,)
    classes: tuple[str, ...]
    url: str
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many other files are below ``url``, by the reason why they are not used."""
    packing: Packing | None = None  # None if each image is an object of its own
    labels_digest: str = ""  # see ``LabelTable.digest`` in ``label_file.py``; empty if folders are the labels
    label_sets: npt.NDArray[np.bool_] | None = None  # (K, C)
    """Which of C classes belong to each label if an image may have several; None if a label is a class."""
    shrinking: Shrinking | None = None  # of packed images; None if their files are what they were

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of keys, labels, sizes, shards and rows, in hexadecimal, the same in any bucket or folder."""
        digest = hashlib.sha256()
        for start in range(0, len(self), _DIGEST_ROWS):  # a list of all keys of 10⁸ images would take 10 GB
            keys = self.keys.slice(start, _DIGEST_ROWS).to_pylist()
            digest.update(("\0" * (start > 0) + "\0".join(keys)).encode())
        digest.update(self.labels.astype("<i4").tobytes())
        digest.update(self.sizes_bytes.astype("<i8").tobytes())
        if self.label_sets is not None:
            digest.update(self.label_sets.tobytes())
        if self.packing is not None:
            digest.update(self.packing.shard.astype("<i4").tobytes() + self.packing.row.astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def shard_shuffle(self) -> ShardShuffle | None:
        """The order in which packed images are read, for the plan; None if they are not packed."""
        if self.packing is None:
            return None
        ends = np.flatnonzero(np.diff(self.packing.shard, append=-1)) + 1
        return ShardShuffle(np.diff(ends, prepend=0).astype(np.int64))

    def rows_per_block(self, shape: ImageShape) -> int:
        """Images in one block if they are decoded to this shape."""
        return rows_per_block(shape.num_bytes, packed=self.packing is not None)

    def class_counts(self) -> npt.NDArray[np.int64]:
        """How many images have each class, (C,)."""
        if self.label_sets is None:
            return np.bincount(self.labels, minlength=len(self.classes))
        return np.bincount(self.labels, minlength=len(self.label_sets)) @ self.label_sets

    def class_names(self, label: int) -> tuple[str, ...]:
        """The classes that a label stands for."""
        places = [label] if self.label_sets is None else np.flatnonzero(self.label_sets[label])
        return tuple(self.classes[place] for place in places)

    def select(self, indices: npt.NDArray[np.integer]) -> Manifest:
        """The images at ``indices``, in that order, with all of the classes."""
        arrow_indices = number_array(indices.astype(np.int64))
        return replace(
            self,
            keys=self.keys.take(arrow_indices),
            labels=self.labels[indices],
            sizes_bytes=self.sizes_bytes[indices],
            etags=self.etags.take(arrow_indices),
            packing=self.packing and self.packing.select(indices),
        )

    def to_parquet(self) -> bytes:
        """A Parquet file with the columns key, label, size_bytes, etag; for packed images also shard and row."""
        metadata: dict[str, Any] = {
            "url": self.url,
            "classes": self.classes,
            "left_out": dict(self.left_out),
            "digest": self.digest,
            "labels_digest": self.labels_digest,
        }
        if self.label_sets is not None:
            metadata["label_sets"] = [np.flatnonzero(members).tolist() for members in self.label_sets]
        if self.shrinking is not None:
            metadata["shrinking"] = self.shrinking
        columns: dict[str, Any] = {
            "key": self.keys,
            "label": number_array(self.labels),
            "size_bytes": number_array(self.sizes_bytes),
            "etag": self.etags,
        }
        if self.packing is not None:
            metadata["shards"] = self.packing.shards
            columns |= {"shard": number_array(self.packing.shard), "row": number_array(self.packing.row)}
        sink = pa.BufferOutputStream()
        table = pa.table(columns).replace_schema_metadata({_METADATA: json.dumps(metadata)})
        pq.write_table(table, sink, compression="zstd")
        return sink.getvalue().to_pybytes()

    @classmethod
    def from_parquet(cls, data: bytes) -> Manifest:
        """Decode what :meth:`to_parquet` wrote; raises StorageError if ``data`` is anything else."""
        try:
            table = pq.read_table(pa.BufferReader(data)).combine_chunks()
            metadata = json.loads(table.schema.metadata[_METADATA])
            manifest = cls(
                keys=_column_of_strings(table["key"]),
                labels=table["label"].to_numpy(),
                sizes_bytes=table["size_bytes"].to_numpy(),
                etags=_column_of_strings(table["etag"]),
                classes=tuple(metadata["classes"]),
                url=metadata["url"],
                left_out={str(reason): int(count) for reason, count in metadata["left_out"].items()},
                packing=read_packing(table, metadata),
                labels_digest=metadata["labels_digest"],
                label_sets=_label_sets(metadata),
                shrinking=Shrinking(*map(int, metadata["shrinking"])) if "shrinking" in metadata else None,
            )
            _check_values(manifest)
            digest = metadata["digest"]
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
            sentence = f"The manifest is damaged ({error}); delete it, and the images will be listed again."
            raise StorageError(sentence) from None
        if manifest.digest != digest:
            raise StorageError(
                "The manifest was changed after it was written; delete it, and the images will be listed again."
            )
        return manifest


def list_images(store: Store) -> Manifest:
    """All images below ``store``, in any folder or packed, and all UNLABELLED; UsageError if there are none."""
    packed = open_packed(store)
    if packed is not None:
        return replace(packed, labels=np.full(len(packed), UNLABELLED, np.int32), classes=())
    files = list_files(store)
    tell_left_out(files)
    return _unlabelled(files)


def named_images(store: Store, keys: Sequence[str]) -> Manifest:
    """The files ``keys`` of ``store``, all UNLABELLED; UsageError if one of them is not there."""
    for key in keys:
        if not store.exists(key):
            raise UsageError(f"There is no file {store.url}/{key}; check the path.")
    now = datetime.now(timezone.utc)
    return _unlabelled(Listing(store.url, [StoredObject(key, 0, "", now) for key in keys]))


def build_manifest(store: Store, classes: tuple[str, ...] | None = None, part: Part | None = None) -> Manifest:
    """The images below ``store``, labelled by their folders (see :mod:`raytrain.data.labels.folders`), or packed ones.

    Args:
        store: the folder or S3 prefix to list.
        classes: the classes that the labels index; by default the folders' names, sorted. For test images, pass those
            of the training images; the test images may lack some of them.
        part: which images to take if there are folders of training and of test images; None refuses these.

    Raises:
        StorageError: the store cannot be listed.
        UsageError: there are no images, no class folders, only one class, classes that are not in ``classes``, or both
            training and test images.
    """
    packed = open_packed(store)
    if packed is not None:
        return _relabelled(packed, classes)
    files = list_files(store)
    folders = read_folders([stored.path for stored in files.images], store.url)
    if folders.parts is not None and part is None:
        url = store.url.rstrip("/")
        raise UsageError(
            f"{url} contains {folders.train}/ and {folders.test}/, which would become one data set; give each by "
            f"itself, such as {url}/{folders.train}."
        )
    if folders.parts is not None:
        _log.warning(
            "Of %s, only the images in %s/ are used.", store.url, folders.train if part == "train" else folders.test
        )
    return _by_folder(files, folders, classes, part)


def build_manifests(store: Store) -> tuple[Manifest, Manifest | None]:
    """The images below ``store`` and None, or, if there are folders of both, training and test images."""
    packed = open_packed(store)
    if packed is not None:
        return _relabelled(packed, None), None
    files = list_files(store)
    folders = read_folders([stored.path for stored in files.images], store.url)
    if folders.parts is None:
        return _by_folder(files, folders, None, None), None
    train = _by_folder(files, folders, None, "train")
    test = _by_folder(files, folders, train.classes, "test")
    _log.warning(
        "Training on the %s images in %s/ and testing on the %s in %s/ of %s.",
        *(f"{len(train):,}", folders.train, f"{len(test):,}", folders.test, store.url),
    )
    return train, test


def _by_folder(files: Listing, folders: FolderLabels, classes: tuple[str, ...] | None, part: Part | None) -> Manifest:
    """The images of one part, or of all, with the classes that their folders say."""
    chosen = np.array(folders.classes, object) != ""
    files.left_out[_STRAY] = [files.images[at].path for at in np.flatnonzero(~chosen)]
    if folders.parts is not None and part is not None:
        others = chosen & (np.array(folders.parts, object) != (folders.train if part == "train" else folders.test))
        if part == "train" and (names := sorted({folders.parts[at] for at in np.flatnonzero(others)} - {folders.test})):
            _log.warning("The images in %s of %s are not used.", "/, ".join(names) + "/", files.url)
        chosen &= ~others
    if part != "test":
        tell_left_out(files, folders)
    names = [folders.classes[at] for at in np.flatnonzero(chosen)]
    found = tuple(sorted(set(names)))
    check_classes(found, classes, files.url, len(files.images))
    index = {name: label for label, name in enumerate(classes or found)}
    images = _unlabelled(files).select(np.flatnonzero(chosen))
    labels = np.array([index[name] for name in names], np.int32)
    return replace(images, labels=labels, classes=classes or found, left_out=files.counts)


def _unlabelled(files: Listing) -> Manifest:
    return Manifest(
        keys=_strings([found.path for found in files.images]),
        labels=np.full(len(files.images), UNLABELLED, np.int32),
        sizes_bytes=np.array([found.size_bytes for found in files.images], np.int64),
        etags=_strings([found.etag for found in files.images]),
        classes=(),
        url=files.url,
        left_out=files.counts,
    )


def open_packed(store: Store) -> Manifest | None:
    """The manifest of a packed data set; None if ``store`` has none, or packing has not finished."""
    check_folder(store)
    try:
        index = store.get(PACKED_INDEX)
    except FileNotFoundError:
        return None
    try:
        manifest = Manifest.from_parquet(index)
    except StorageError as error:
        raise StorageError(
            f"The index of the packed images, {store.url}/{PACKED_INDEX}, is damaged; delete it, and pack the images "
            "again."
        ) from error
    return replace(manifest, url=store.url)  # the data set may have been copied


def _relabelled(packed: Manifest, classes: tuple[str, ...] | None) -> Manifest:
    """Packed images with labels that index ``classes``."""
    check_classes(packed.classes, classes, packed.url, len(packed))
    index = {name: label for label, name in enumerate(classes or packed.classes)}
    label_of = np.array([index[name] for name in packed.classes], np.int32)
    return replace(packed, labels=label_of[packed.labels], classes=classes or packed.classes)


def _check_values(manifest: Manifest) -> None:
    """Raise ValueError unless all that the columns say is possible: the manifest may be a stranger's."""
    names = manifest.classes
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise ValueError("the classes are not different names")
    num_labels = len(manifest.classes if manifest.label_sets is None else manifest.label_sets)
    check_range("label", manifest.labels, UNLABELLED if manifest.packing is None else 0, num_labels)
    check_range("size_bytes", manifest.sizes_bytes, 0)
    if manifest.packing is not None:
        manifest.packing.check()


def _label_sets(metadata: dict[str, Any]) -> npt.NDArray[np.bool_] | None:
    """The sets of classes in a stored manifest; raises ValueError or TypeError if they are none."""
    if "label_sets" not in metadata:
        return None
    label_sets = np.zeros((len(metadata["label_sets"]), len(metadata["classes"])), bool)
    for members, places in zip(label_sets, metadata["label_sets"], strict=True):
        indices = np.array(places, np.int64)
        check_range("class", indices, 0, len(members))
        members[indices] = True
    return label_sets


def _column_of_strings(column: pa.ChunkedArray) -> pa.LargeStringArray:
    """A column that must hold strings, without a Python object for each; raises ValueError otherwise."""
    if column.type not in (pa.string(), pa.large_string()) or column.null_count:
        raise ValueError(f"a column of strings holds {column.type}")
    return pa.concat_arrays(column.cast(pa.large_string()).chunks or [pa.array([], pa.large_string())])


def _strings(values: Sequence[str]) -> pa.LargeStringArray:
    try:
        return string_array(values)
    except UnicodeEncodeError as error:
        raise UsageError(f"The file name {error.object!r} is not valid UTF-8; rename the file.") from None
