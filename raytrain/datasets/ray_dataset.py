"""Labelled images in the rows of a ``ray.data.Dataset``, one more source of `raytrain pack`."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain.data.labels.label_columns import as_text, find_column
from raytrain.datasets.archive import Archive, ArchivedImage, ArchivedImages, with_suffix
from raytrain.errors import UsageError

RAY_DATASET = "ray.data.Dataset"
_ROWS_AT_A_TIME = 64
_NUM_THREADS = 4
_Columns = Mapping[str, npt.NDArray[Any]]  # of a few rows, by name


class Rows(Protocol):
    """The part of a ``ray.data.Dataset``'s interface that is used here, where Ray is not imported."""

    def iter_batches(self, *, batch_size: int, batch_format: str) -> Iterable[Any]: ...


def is_ray_dataset(source: object) -> TypeGuard[Rows]:
    """Return True if ``source`` is a Ray dataset, or an iterator over one."""
    is_of_ray = any(base.__module__.startswith("ray.data") for base in type(source).__mro__)
    return is_of_ray and callable(getattr(source, "iter_batches", None))


class RayDatasetRows(Archive):
    """The rows of a ``ray.data.Dataset`` as an archive; each has an image, as the bytes of a file or as pixels.

    Ray yields rows in any order. So without a column of keys, the key of an image is a digest of its content and its
    label, and the same rows always become the same shards.

    Example: ``images = RayDatasetRows(RAY_DATASET).read(ray.data.read_parquet("s3://photos/rows"))``
    """

    def _images(self, source: Any) -> ArchivedImages:
        """Yield the images of the rows of ``source``; pixels become PNG files, without loss. Count rows without one."""
        num_of_digest: dict[str, int] = {}  # rows so far with this digest of image and label
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pack") as pool:
            for batch in self._batches(source):
                # Encode the images in threads, while the other columns are made texts.
                image, label, key, split = self._columns_of(batch)
                contents = [self._content(image, value) for value in batch[image]]
                files = pool.map(_as_file, contents)
                labels = self._texts(batch, label)
                splits = [""] * len(labels) if split is None else self._texts(batch, split)
                keys = [""] * len(labels) if key is None else self._texts(batch, key)
                for file, label_text, split_text, key_text in zip(files, labels, splits, keys, strict=True):
                    if not file:
                        self.left_out["rows without the bytes of an image"] += 1
                        continue

                    # A row without a key is named by its content. Equal rows are images of their own, so from the
                    # second one on their names end in a number: in any order, the same rows have the same names.
                    if not key_text:
                        digest = hashlib.sha256(file + b"\0" + label_text.encode()).hexdigest()[:32]
                        num_of_digest[digest] = num_of_digest.get(digest, 0) + 1
                        key_text = digest if num_of_digest[digest] == 1 else f"{digest}-{num_of_digest[digest]}"
                    yield ArchivedImage(with_suffix(key_text, file), file, label_text, split_text)

    def _batches(self, source: Rows) -> Iterator[_Columns]:
        """Yield the rows, a few at a time, as NumPy columns. Raise UsageError if Ray raises an exception."""
        try:
            yield from source.iter_batches(batch_size=_ROWS_AT_A_TIME, batch_format="numpy")
        except Exception as error:
            from raytrain.launch.ray.ray_errors import root_cause  # Ray is imported: the dataset comes from it

            raise UsageError(f"The rows of the {self.name} cannot be read ({root_cause(error)}).") from error

    def _columns_of(self, batch: _Columns) -> tuple[str, str, str | None, str | None]:
        """Return the names of the columns of images and labels, and, if there are any, of keys and splits.

        Raises UsageError if a column that is needed is not there.
        """
        names = list(batch)
        image, label = self._image_and_label(names)
        return image, label, self._key(names, image), find_column(names, None, ("split",))

    def _content(self, column: str, value: Any) -> bytes | npt.NDArray[np.uint8]:
        """Return the file or the pixels in a row, (H, W) if these are grey; empty bytes if it has neither.

        Raises UsageError for other values. ``column`` names the column in it.
        """
        # Datasets of Hugging Face have the bytes in a dictionary; pandas writes a missing value as NaN.
        if isinstance(value, dict):
            value = value.get("bytes")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        if value is None or (isinstance(value, (float, np.floating)) and math.isnan(value)):
            return b""

        # Pillow takes uint8 pixels of 1, 3 or 4 channels, and a single channel without an axis of its own.
        if isinstance(value, bytes):
            return value
        if isinstance(value, np.ndarray):
            if not value.size:  # an image without pixels counts as missing
                return b""
            if value.dtype == np.uint8 and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4))):
                return value.squeeze(axis=2) if value.shape[2:] == (1,) else value
            actual = f"an array of {value.dtype} and the shape {value.shape}"
        else:
            actual = f"a {type(value).__name__}"
        raise UsageError(
            f"The column {column!r} of the {self.name} holds {actual}, and the bytes of image files, or uint8 arrays "
            "(height, width, channels) of 1, 3 or 4 channels and values from 0 to 255 are expected; convert it with "
            "map_batches."
        )

    def _texts(self, batch: _Columns, column: str) -> list[str]:
        """Return a column as texts; missing values are empty. Raise UsageError for lists and mixed types."""
        values: Any = batch[column]
        try:
            if values.ndim != 1:
                raise pa.ArrowInvalid(f"arrays of the shape {values.shape[1:]}")
            array = pa.array(values, from_pandas=True)
            if pa.types.is_nested(array.type):
                raise pa.ArrowInvalid(f"values of type {array.type}")
            return [text or "" for text in as_text(array).to_pylist()]
        except (pa.ArrowException, TypeError, UnicodeError) as error:
            raise UsageError(
                f"The column {column!r} of the {self.name} holds values that are neither all text nor all integers "
                f"({str(error).partition(chr(10))[0]:.100}); one class per image is expected."
            ) from None


def _as_file(content: bytes | npt.NDArray[np.uint8]) -> bytes:
    """Return an image file: ``content`` itself, or a PNG of its pixels."""
    if isinstance(content, bytes):
        return content
    from PIL import Image

    written = io.BytesIO()
    Image.fromarray(content).save(written, "PNG")
    return written.getvalue()
