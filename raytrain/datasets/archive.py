"""Archives of labelled images: what all kinds have in common, and the paths at which their images are written.

Three forms are read. A Parquet file has a row for each image, with columns for its content and its label
(:mod:`~raytrain.datasets.parquet_archive`). In a tar of WebDataset, an image has its label in a file beside it, and any
other tar has a folder for each class (:mod:`~raytrain.datasets.tar_archive`). All may be damaged in ways that their
usual readers do not notice, such as zeros in place of lost content.
"""

from __future__ import annotations

import lzma
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pyarrow as pa

from raytrain.data.labels.class_names import composed
from raytrain.data.labels.label_columns import LabelColumns, column_called, find_column
from raytrain.data.labels.label_formats import KEY_COLUMNS, LABEL_COLUMNS
from raytrain.data.labels.listing import SUFFIXES, is_hidden
from raytrain.errors import UsageError

TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz")
ARCHIVE_SUFFIXES = (".parquet", *TAR_SUFFIXES)
IMAGE_COLUMNS = ("image", "image_bytes", "bytes", "jpg", "png", "img")

_SUFFIX_OF_FIRST_BYTES = {b"\xff\xd8": ".jpg", b"\x89PNG": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"RIFF": ".webp"}


class ArchivedImage(NamedTuple):
    """An image of an archive. Its key is any text with the suffix of an image; :func:`visible_path` makes it a path."""

    key: str
    content: bytes
    label: str  # may be a text that stands for no label
    split: str = ""  # from :meth:`Archive.read` in lower case; empty if the archive has no column of splits


ArchivedImages = Iterator[ArchivedImage]


@dataclass
class Archive(ABC):
    """An archive that is being read, and what its reader has left out and chosen so far.

    Example: ``for image in TarArchive("photos/000.tar").read(file): print(image.key, image.label)``
    """

    name: str
    columns: LabelColumns = field(default_factory=LabelColumns)
    left_out: Counter[str] = field(default_factory=Counter)  # number of images and other files, by reason
    choices: set[str] = field(default_factory=set[str])  # sentences on which of several possible columns is read
    has_class_folders: bool = field(default=False, init=False)  # then None or -1 is a class like any other

    def read(self, file: Any) -> ArchivedImages:
        """Yield the images in the archive's order; count images without content, and other files.

        Raises UsageError if the archive is damaged, lacks images or labels, or does not say which of several images has
        the label. An OSError of the disk or the network, which has a number, is raised as it is.
        """
        try:
            for image in self._images(file):
                yield image._replace(label=composed(image.label.strip()), split=image.split.strip().lower())
        except (pa.ArrowException, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
            # Damage found by Arrow or gzip is an OSError, too; one with a number comes from the disk or the network.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = str(error).partition("\n")[0].rstrip(".:")
            raise UsageError(f"{self.name} cannot be read ({reason}); check the file.") from None

    @abstractmethod
    def _images(self, file: Any) -> ArchivedImages:
        """Yield the images of an open file, in its order, and count in ``left_out`` what is no image."""
        ...

    def _image_and_label(self, names: Sequence[str]) -> tuple[str, str]:
        """Return which of the columns ``names`` holds the images, and which the labels; add ``choices`` if several may.

        Raises UsageError if there is none of them.
        """
        advice = "rename the right one to image, or give a label file with --labels"
        image = column_called(names, self.name, "", None, IMAGE_COLUMNS, advice=advice, choices=self.choices)
        label = next(iter(self.columns.label), None)
        return image, column_called(names, self.name, "--label-column", label, LABEL_COLUMNS, choices=self.choices)

    def _key(self, names: Sequence[str], image: str) -> str | None:
        """Return which of the columns ``names`` holds the keys; None if none is called so, or only that of images.

        Raises UsageError if the column that --key-column names is not there.
        """
        if self.columns.key is not None:
            return column_called(names, self.name, "--key-column", self.columns.key)
        return find_column([name for name in names if name != image], None, KEY_COLUMNS)


def is_archive(path: str) -> bool:
    """Return True if a file of this name is read as an archive, whatever the case of its suffix.

    >>> is_archive("photos/000.TAR")
    True
    """
    return path.lower().endswith(ARCHIVE_SUFFIXES)


def visible_path(path: str) -> str:
    """Return the path at which an archive's image is written below a folder: one that stays in it and is not hidden.

    ``path`` is the key of an image, so it ends in the suffix of one. It may be absolute or contain ``..``, and a
    listing of the folder would leave out files that are hidden or in a folder of the operating system.

    >>> visible_path("/../lost+found/.jpg")
    '_/_lost+found/_.jpg'
    """
    # Slashes at the start are removed first, because pathlib keeps two of them as a root of its own.
    parts = PurePosixPath(path.replace("\0", "_").lstrip("/")).parts
    *folders, name = (part.lstrip(".") or "_" for part in parts)
    folders = [f"_{folder}" if is_hidden(f"{folder}/{name}") else folder for folder in folders]
    # A name that is nothing but a suffix, such as ".jpg", has lost its dot above.
    return "/".join([*folders, name if name.lower().endswith(SUFFIXES) else f"_.{name}"])


def with_suffix(key: str, content: bytes) -> str:
    """Return ``key`` with the suffix of an image: its own, else that of the format in which the content begins.

    An unknown format becomes ``.jpg``: whoever decodes the image reports that it is none.
    """
    if key.lower().endswith(SUFFIXES):
        return key
    return key + next((suffix for first, suffix in _SUFFIX_OF_FIRST_BYTES.items() if content.startswith(first)), ".jpg")
