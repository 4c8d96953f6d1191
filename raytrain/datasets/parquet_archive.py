"""Labelled images in a Parquet file, which has a row for each image, with columns for its content and its label.

The content is bytes, or a struct of bytes and path as Hugging Face writes it, which also puts the names of the classes
into the metadata of the file.
"""

from __future__ import annotations

from contextlib import suppress
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain.data.labels.class_names import names_in_metadata, names_of_numbers
from raytrain.data.labels.label_columns import MOST_SPLITS, TEXT_TYPES, as_text, find_column
from raytrain.data.labels.label_formats import KEY_COLUMNS
from raytrain.data.labels.part_names import is_part
from raytrain.datasets.archive import (
    Archive,
    ArchivedImage,
    ArchivedImages,
    with_suffix,
)
from raytrain.errors import UsageError

_ROWS_AT_A_TIME = 64
_HOLE_ROWS = 8  # this many empty images in succession are a hole of zeros in the file, where content was lost


class ParquetArchive(Archive):
    """A Parquet file that is being read as an archive of images."""

    def _images(self, file: IO[bytes]) -> ArchivedImages:
        """Yield the images of a Parquet file; if its metadata names the classes, a number becomes its class's name.

        Raises UsageError if no column is clearly that of the images, or of the labels, if these hold other types, if a
        label has no name in the metadata, or if many images in succession are empty.
        """
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        schema = parquet.schema_arrow
        image_column, label_column = self._image_and_label(schema.names)
        self._check_types(schema, image_column, label_column)

        # If the metadata has names of classes, numeric labels are indices of these.
        classes = names_in_metadata(schema, schema.field(label_column))

        # Read the columns that are needed, a few rows at a time.
        keys = iter(self._keys(parquet, image_column))
        split_column = self._split_column(parquet, label_column)
        needed = {image_column, label_column} if split_column is None else {image_column, label_column, split_column}
        num_rows = num_empty = 0  # rows read so far, and how many of the last ones are empty
        for batch in parquet.iter_batches(_ROWS_AT_A_TIME, columns=list(needed)):
            contents = batch.column(image_column).to_pylist()
            numbers = batch.column(label_column)
            named = names_of_numbers(numbers.to_pylist(), classes, self.name) if classes else None
            labels = named or as_text(numbers).to_pylist()
            splits = [""] * len(labels) if split_column is None else as_text(batch.column(split_column)).to_pylist()
            for content, label, split in zip(contents, labels, splits, strict=True):
                key = next(keys)
                if isinstance(content, dict):
                    content = content.get("bytes")

                # One empty image is left out; many in succession are content that was lost.
                num_rows += 1
                num_empty = num_empty + 1 if content == b"" else 0
                if num_empty == _HOLE_ROWS:
                    raise UsageError(
                        f"{self.name} has images of 0 bytes in row {num_rows - num_empty + 1:,} and the next "
                        f"{num_empty - 1}, as if zeros stood in place of its content: check the file, or leave these "
                        "rows out."
                    )
                if not content:
                    self.left_out["rows without the bytes of an image"] += 1
                    continue

                yield ArchivedImage(with_suffix(key, content), content, label or "", split or "")

    def _check_types(self, schema: pa.Schema, image_column: str, label_column: str) -> None:
        """Raise UsageError unless images are bytes, or structs with bytes, and labels single values."""
        content_type = schema.field(image_column).type
        if pa.types.is_struct(content_type) and content_type.get_field_index("bytes") >= 0:
            content_type = content_type.field("bytes").type
        if content_type not in (pa.binary(), pa.large_binary(), pa.binary_view()):
            wrong = schema.field(image_column)
            expected = "the bytes of image files are expected; write those into it, or use files with --labels"
        elif pa.types.is_nested(schema.field(label_column).type):
            wrong = schema.field(label_column)
            expected = "one class per image is expected; unpack the images, and give --labels"
        else:
            return
        raise UsageError(f"The column {wrong.name!r} of {self.name} holds values of type {wrong.type}, and {expected}.")

    def _keys(self, parquet: pq.ParquetFile, image: str) -> list[str]:
        """Return the key of each row: from the column of keys, else the path in the image's struct, else its number.

        A row whose key is empty has its number. Raises UsageError if the column that --key-column names is not there.
        """
        schema = parquet.schema_arrow
        column = self._key(schema.names, image)
        numbers = [f"{row:09d}" for row in range(parquet.metadata.num_rows)]  # with zeros, so that they sort as text
        if column is not None:
            try:
                keys = as_text(parquet.read([column])[column]).to_pylist()
                return [key or number for key, number in zip(keys, numbers, strict=True)]
            except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
                if self.columns.key is None:  # a digest, say, that only happens to be called key
                    return numbers
                type = schema.field(column).type
                raise UsageError(
                    f"The column {column!r} of {self.name} holds values of type {type} that are no text; name a column "
                    "of texts or numbers with --key-column, or none."
                ) from None

        # Paths are the keys only if every image has one of its own, which nothing in Parquet ensures.
        image_type = schema.field(image).type
        if not pa.types.is_struct(image_type) or image_type.get_field_index("path") < 0:
            return numbers
        paths = [(record or {}).get("path") for record in parquet.read([f"{image}.path"])[image].to_pylist()]
        with suppress(pa.ArrowNotImplementedError, pa.ArrowInvalid):
            texts = as_text(pa.array(paths)).to_pylist()
            return numbers if None in texts or len(set(texts)) < len(texts) else texts
        return numbers

    def _split_column(self, parquet: pq.ParquetFile, label: str) -> str | None:
        """Return the column of splits: ``split``, or the first with texts such as train and test; None without one.

        An archive may have the rows of one part only. So a column that says nothing but ``train`` is one of splits,
        too, while that of a label file must say both training and held-out images.
        """
        schema = parquet.schema_arrow
        if named := find_column(schema.names, None, ("split",)):
            return named
        key = find_column(schema.names, self.columns.key, KEY_COLUMNS)
        for column in schema:
            is_text = column.type in TEXT_TYPES or pa.types.is_dictionary(column.type)
            if column.name in (label, key) or not is_text or schema.names.count(column.name) > 1:
                continue
            # Few different texts may occur, and at least half of them must mean a part.
            distinct = parquet.read([column.name])[column.name].drop_null().unique().to_pylist()
            values = set(map(str, distinct)) - {""}
            num_parts = sum(map(is_part, values))
            if values and len(values) < MOST_SPLITS and 2 * num_parts >= len(values):
                return column.name
        return None
