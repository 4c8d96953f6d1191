"""Manifest of a data set, the keys, classes and sizes of its images, as a record that is stored with each run."""

from __future__ import annotations

import hashlib
import json
import re
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
from raytrain.data.images.image_format import ImageShape
from raytrain.data.labels.listing import Listing, check_folder, list_files, report_left_out
from raytrain.data.parquet_size import check_memory, read_columns
from raytrain.data.plan.partition import BLOCK_BYTES, rows_per_block
from raytrain.data.plan.permutation import ShardShuffle
from raytrain.errors import StorageError, UsageError
from raytrain.storage.store import Store, StoredObject

UNLABELLED = -1
PACKED_INDEX = "packed.parquet"  # the manifest of a packed data set, stored beside its shards

_METADATA = b"raytrain.manifest"
_COLUMNS = ["key", "label", "size_bytes", "etag", "shard", "row"]
_DIGEST_ROWS = 1 << 20  # at a time
_SHARD_PATH = re.compile(r"shards/\d{6,}-[0-9a-f]{16}\.parquet")  # as pack names them; never outside the folder


@dataclass(frozen=True, eq=False)
class Packing:
    """The locations of N images in packed shards."""

    shards: tuple[str, ...]  # paths relative to the manifest's url
    shard: npt.NDArray[np.int32]  # (N,), indices into shards
    row: npt.NDArray[np.int32]  # (N,), from 0 in each shard

    def select(self, indices: npt.NDArray[np.integer]) -> Packing:
        """Return the locations of the images at ``indices``."""
        return replace(self, shard=self.shard[indices], row=self.row[indices])

    def check(self) -> None:
        """Raise ValueError unless these are locations that ``raytrain pack`` could have written."""
        if bad := [path for path in self.shards if not _SHARD_PATH.fullmatch(path)]:
            raise ValueError(f"{bad[0]!r} is not the path of a shard")
        _check_range("shard", self.shard, 0, len(self.shards))
        _check_range("row", self.row, 0)
        if (np.diff(self.shard) < 0).any():
            raise ValueError("the shards are not in order")


class Shrinking(NamedTuple):
    """Size and quality of the JPEGs that larger images were turned into when they were packed."""

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
    """Number of other files below ``url``, by the reason why they are not used."""
    packing: Packing | None = None  # None if each image is an object of its own
    labels_digest: str = ""  # see ``LabelTable.digest`` in ``label_file.py``; empty if folders are the labels
    label_sets: npt.NDArray[np.bool_] | None = None  # (K, C)
    """Which of C classes belong to each label if an image may have several; None if a label is a class."""
    shrinking: Shrinking | None = None  # of packed images; None if their files are unchanged

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of keys, labels, sizes, shards and rows, in hexadecimal, the same in any bucket or folder."""
        digest = hashlib.sha256()
        # The keys are joined by zeros, a part of them at a time: a list of all keys of 10⁸ images would take 10 GB.
        for start in range(0, len(self), _DIGEST_ROWS):
            keys = self.keys.slice(start, _DIGEST_ROWS).to_pylist()
            if start > 0:
                digest.update(b"\0")
            digest.update("\0".join(keys).encode())
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
        # A shard ends where the next image is in another one; -1, which is no shard, ends the last one.
        ends = np.flatnonzero(np.diff(self.packing.shard, append=-1)) + 1
        return ShardShuffle(np.diff(ends, prepend=0).astype(np.int64))

    def rows_per_block(self, shape: ImageShape, *, as_files: bool = False, most_bytes: int = BLOCK_BYTES) -> int:
        """Return how many images are in a block of up to ``most_bytes``, decoded to ``shape`` or ``as_files``."""
        image_bytes = self.mean_bytes if as_files else shape.num_bytes
        return rows_per_block(image_bytes, packed=self.packing is not None, most_bytes=most_bytes)

    @property
    def mean_bytes(self) -> int:
        """Mean size of a file, at least 1."""
        return max(1, int(self.sizes_bytes.mean()))

    def class_counts(self) -> npt.NDArray[np.int64]:
        """Return how many images have each class, (C,). The images must have labels."""
        if self.label_sets is None:
            return np.bincount(self.labels, minlength=len(self.classes))
        # A product of matrices would first make integers of all of (K, C), eight times as large.
        counts = np.bincount(self.labels, minlength=len(self.label_sets))
        return np.einsum("k,kc->c", counts, self.label_sets, dtype=np.int64, casting="unsafe")

    def class_names(self, label: int) -> tuple[str, ...]:
        """Return the classes that a label stands for: one, or a set of them."""
        indices = [label] if self.label_sets is None else np.flatnonzero(self.label_sets[label])
        return tuple(self.classes[index] for index in indices)

    def keys_of(self, samples: Sequence[int]) -> list[str]:
        """Return the keys of the images at these indices, in that order: ``images.keys_of([2, 0])``."""
        return self.keys.take(number_array(np.asarray(samples, np.int64))).to_pylist()

    def select(self, indices: npt.NDArray[np.integer]) -> Manifest:
        """Return the images at ``indices``, in that order, with all classes: ``images.select(np.arange(10))``."""
        arrow_indices = number_array(indices.astype(np.int64))
        return replace(
            self,
            keys=self.keys.take(arrow_indices),
            labels=self.labels[indices],
            sizes_bytes=self.sizes_bytes[indices],
            etags=self.etags.take(arrow_indices),
            packing=self.packing and self.packing.select(indices),
        )

    def random_order(self, seed: int) -> npt.NDArray[np.int64]:
        """Return the indices of all images in a random order, (N,).

        Packed images keep their order, which is random already, so that few shards have the first ones.
        """
        order = np.arange(len(self))
        return order if self.packing is not None else np.random.default_rng(seed).permutation(order)

    def to_parquet(self) -> bytes:
        """Encode a Parquet file with the columns key, label, size_bytes, etag; for packed images also shard and row.

        What is about the data set as a whole, such as its classes and its digest, is in the file's metadata.
        """
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
        """Decode what :meth:`to_parquet` wrote; raise StorageError if ``data`` is anything else.

        The manifest of a run or of packed images may be a stranger's, so every value in it is checked.
        """
        try:
            table = read_columns(data, _COLUMNS).combine_chunks()
            metadata = json.loads(table.schema.metadata[_METADATA])
            classes = tuple(metadata["classes"])
            if not all(isinstance(name, str) for name in classes) or len(set(classes)) < len(classes):
                raise ValueError("the classes are not different names")

            # Sets of classes are stored as lists of indices.
            label_sets: npt.NDArray[np.bool_] | None = None
            if "label_sets" in metadata:
                check_memory(len(metadata["label_sets"]) * len(classes), data)
                label_sets = np.zeros((len(metadata["label_sets"]), len(classes)), bool)
                for members, indices in zip(label_sets, metadata["label_sets"], strict=True):
                    _check_range("class", np.array(indices, np.int64), 0, len(members))
                    members[np.array(indices, np.int64)] = True

            packing = None
            if "shards" in metadata:
                packing = Packing(tuple(metadata["shards"]), table["shard"].to_numpy(), table["row"].to_numpy())
            manifest = cls(
                keys=_column_of_strings(table["key"]),
                labels=table["label"].to_numpy(),
                sizes_bytes=table["size_bytes"].to_numpy(),
                etags=_column_of_strings(table["etag"]),
                classes=classes,
                url=metadata["url"],
                left_out={str(reason): int(count) for reason, count in metadata["left_out"].items()},
                packing=packing,
                labels_digest=metadata["labels_digest"],
                label_sets=label_sets,
                shrinking=Shrinking(*map(int, metadata["shrinking"])) if "shrinking" in metadata else None,
            )

            # Labels must be indices of classes, or of sets of them, and shards indices of their paths.
            num_labels = len(classes if label_sets is None else label_sets)
            _check_range("label", manifest.labels, UNLABELLED if packing is None else 0, num_labels)
            _check_range("size_bytes", manifest.sizes_bytes, 0)
            if packing is not None:
                packing.check()
            digest = metadata["digest"]
        except (ValueError, OSError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            sentence = f"The manifest is damaged ({error}); delete it, and the images will be listed again."
            raise StorageError(sentence) from None
        if manifest.digest != digest:
            raise StorageError(
                "The manifest was changed after it was written; delete it, and the images will be listed again."
            )
        return manifest


def list_images(store: Store) -> Manifest:
    """Return all images below ``store``, in any folder or packed, all UNLABELLED; UsageError if there are none."""
    packed = open_packed(store)
    if packed is not None:
        return replace(packed, labels=np.full(len(packed), UNLABELLED, np.int32), classes=())
    files = list_files(store)
    report_left_out(files)
    return unlabelled(files)


def named_images(store: Store, keys: Sequence[str]) -> Manifest:
    """Return a manifest of the files ``keys`` of ``store``, all UNLABELLED, without their sizes and entity tags.

    Raises UsageError if one does not exist.
    """
    for key in keys:
        if not store.exists(key):
            raise UsageError(f"There is no file {store.url}/{key}; check the path.")
    listed_at = datetime.now(timezone.utc)
    return unlabelled(Listing(store.url, [StoredObject(key, 0, "", listed_at) for key in keys]))


def unlabelled(files: Listing) -> Manifest:
    """Return the images of a listing, all UNLABELLED; UsageError if the name of one is not valid Unicode."""
    try:
        keys = string_array([file.path for file in files.images])
        etags = string_array([file.etag for file in files.images])
    except UnicodeEncodeError as error:
        raise UsageError(f"The file name {error.object!r} is not valid UTF-8; rename the file.") from None
    return Manifest(
        keys=keys,
        labels=np.full(len(files.images), UNLABELLED, np.int32),
        sizes_bytes=np.array([file.size_bytes for file in files.images], np.int64),
        etags=etags,
        classes=(),
        url=files.url,
        left_out=files.counts,
    )


def open_packed(store: Store) -> Manifest | None:
    """Return the manifest of a packed data set; None if ``store`` has none, or packing has not finished.

    Raises UsageError if the store is a file, and StorageError if it cannot be read, or the manifest is damaged.
    """
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


def _column_of_strings(column: pa.ChunkedArray) -> pa.LargeStringArray:
    """Return a column that must hold strings, without a Python object for each; raise ValueError otherwise."""
    if column.type not in (pa.string(), pa.large_string()) or column.null_count:
        raise ValueError(f"a column of strings holds {column.type}")
    return pa.concat_arrays(column.cast(pa.large_string()).chunks or [pa.array([], pa.large_string())])


def _check_range(name: str, values: npt.NDArray[Any], start: int, stop: int = 1 << 62) -> None:
    """Raise ValueError unless all ``values`` of the column ``name`` are integers from ``start`` to ``stop - 1``."""
    if values.dtype.kind != "i" or ((values < start) | (values >= stop)).any():
        raise ValueError(f"a {name} is out of range")
