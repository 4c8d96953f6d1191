"""Labelled images in archives that people have already: Parquet files, and tars of WebDataset or of class folders.

Three forms are read. A Parquet file has a row for each image, with columns for its content and its label. In a tar of
WebDataset, the files of a *sample* follow each other and share the name up to the first dot: ``17.jpg`` with
``17.cls`` or ``17.json``, and perhaps ``17.seg.png``, a mask, which is not the image. Any other tar has a folder for
each class. All may be damaged in ways that their usual readers do not notice, such as zeros in place of lost content.
"""

from __future__ import annotations

import json
import lzma
import posixpath
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain.data.labels.folders import composed, read_folders
from raytrain.data.labels.label_columns import MOST_SPLITS, NO_LABELS, TEXT_TYPES, LabelColumns, as_text, find_column
from raytrain.data.labels.label_formats import KEY_COLUMNS, LABEL_COLUMNS
from raytrain.data.labels.listing import SUFFIXES, is_hidden, why_left_out
from raytrain.data.labels.part_names import is_part
from raytrain.errors import UsageError, format_count

ARCHIVE_SUFFIXES = (".parquet", ".tar", ".tgz", ".tar.gz")
IMAGE_COLUMNS = ("image", "image_bytes", "bytes", "jpg", "png", "img")

_ROWS_AT_A_TIME = 64
_SUFFIX_OF_FIRST_BYTES = {b"\xff\xd8": ".jpg", b"\x89PNG": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"RIFF": ".webp"}
_NO_LABELS = NO_LABELS | {"-1"}  # data sets of Hugging Face write -1 for the hidden labels of their test images
_LABEL_SUFFIXES = (".cls", ".json")
_JPEG_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif")
_SECOND_IMAGES = "second images of a sample, such as masks (--image-suffix takes them instead)"
_CHUNK_BYTES = 1 << 20
_HOLE_ROWS = 8  # this many empty images in succession are a hole of zeros in the file, where content was lost


class ArchivedImage(NamedTuple):
    """An image of an archive. Its key is any text with the suffix of an image; :func:`visible_path` makes it a path."""

    key: str
    content: bytes
    label: str
    split: str = ""  # from :meth:`Archive.read` in lower case; empty if the archive has no column of splits


ArchivedImages = Iterator[ArchivedImage]


@dataclass
class Archive:
    """An archive that is being read, and what its reader has left out and chosen so far."""

    name: str
    columns: LabelColumns = field(default_factory=LabelColumns)
    image_suffix: str | None = None  # says which of several images of a sample to take, such as ``png`` or ``seg.png``
    left_out: Counter[str] = field(default_factory=Counter)  # number of images and other files, by reason
    choices: set[str] = field(default_factory=set[str])  # sentences on which of several possible columns is read

    def read(self, file: Any) -> ArchivedImages:
        """Yield the images in the archive's order; count images without label or content, and other files.

        In Parquet, images are bytes, or structs of bytes and path as Hugging Face writes them, which also puts the
        names of the classes into the metadata. In WebDataset, a label is the text of .cls, or "label" or "cls" in
        .json; of several images with one label, the JPEG is taken, or the one that ``image_suffix`` names.

        Raises UsageError if the archive is damaged, lacks images or labels, or does not say which of several images has
        the label. An OSError of the disk or the network, which has a number, is raised as it is.
        """
        try:
            for image in self._images(file):
                label = composed(image.label.strip())
                if label in _NO_LABELS:
                    self.left_out["images without a label"] += 1
                    continue
                yield image._replace(label=label, split=image.split.strip().lower())
        except (pa.ArrowException, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError) as error:
            # Damage found by Arrow or gzip is an OSError, too; one with a number comes from the disk or the network.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = str(error).partition("\n")[0].rstrip(".:")
            raise UsageError(f"{self.name} cannot be read ({reason}); check the file.") from None

    def _images(self, file: Any) -> ArchivedImages:
        """Yield the images of an open file, in its order. Rows of a Ray data set override it."""
        return self._parquet(file) if self.name.lower().endswith(".parquet") else self._tar(file)

    # Parquet.

    def _parquet(self, file: IO[bytes]) -> ArchivedImages:
        """Yield the images of a Parquet file; if its metadata names the classes, a number becomes its class's name.

        Raises UsageError if the columns of images and labels cannot be told or hold other types, a label has no name
        in the metadata, or many images in succession are empty.
        """
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        schema = parquet.schema_arrow
        advice = "rename the right one to image, or give a label file with --labels"
        image_column = self._column(schema.names, IMAGE_COLUMNS, None, "images", advice)
        label_name = next(iter(self.columns.label), None)
        label_column = self._column(schema.names, LABEL_COLUMNS, label_name, "labels", "name it with --label-column")
        self._check_types(schema, image_column, label_column)

        # If the metadata has names of classes, numeric labels are indices of these.
        classes = list[str]()
        label_type = schema.field(label_column).type
        if pa.types.is_integer(label_type) or pa.types.is_floating(label_type):
            with suppress(KeyError, TypeError, ValueError):
                metadata = json.loads((schema.metadata or {})[b"huggingface"])
                classes = [str(name) for name in metadata["info"]["features"][label_column]["names"]]

        # Read the columns that are needed, a few rows at a time.
        keys = iter(self._keys(parquet, image_column))
        split_column = self._split_column(parquet, label_column)
        needed = {image_column, label_column} if split_column is None else {image_column, label_column, split_column}
        num_rows = num_empty = 0  # rows read so far, and how many of the last ones are empty
        for batch in parquet.iter_batches(_ROWS_AT_A_TIME, columns=list(needed)):
            contents = batch.column(image_column).to_pylist()
            labels = as_text(batch.column(label_column)).to_pylist()
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

                # Labels that mean "no label", such as -1, stay: read() counts them.
                if classes and label and label not in _NO_LABELS:
                    if not label.isdecimal() or int(label) >= len(classes):
                        raise UsageError(
                            f"{self.name} has the label {label}, and names of "
                            f"{format_count(len(classes), 'class')}; correct it."
                        )
                    label = classes[int(label)]
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

    def _column(self, names: Sequence[str], usual: Sequence[str], name: str | None, content: str, advice: str) -> str:
        """Return the column called ``name``; without a name, the one with the first of the ``usual`` names that occurs.

        If other columns have usual names, too, ``choices`` gets a sentence about it. Raises UsageError if there is no
        such column, or several have the same name. ``content`` is what the column holds, and ``advice`` what to do if
        there is none, both for messages.
        """
        column = find_column(names, name, usual)
        if column is None:
            raise UsageError(
                f"{self.name} has no column of {content}: none of {name or ', '.join(usual)} is among its columns "
                f"{', '.join(names[:10])}; {advice}."
            )
        if names.count(column) > 1:
            raise UsageError(f"{self.name} has {names.count(column)} columns called {column!r}; rename one.")
        if name is None and len(candidates := [candidate for candidate in names if candidate.lower() in usual]) > 1:
            self.choices.add(
                f"the column of {content} that is read is {column!r} of {', '.join(map(repr, candidates))}"
            )
        return column

    def _keys(self, parquet: pq.ParquetFile, image: str) -> list[str]:
        """Return the key of each row: from the column of keys, else the path in the image's struct, else its number.

        A row whose key is empty has its number. Raises UsageError if the column that --key-column names is not there.
        """
        schema = parquet.schema_arrow
        if self.columns.key is not None:
            column = self._column(schema.names, (), self.columns.key, "keys", "name it with --key-column")
        else:
            column = find_column([name for name in schema.names if name != image], None, KEY_COLUMNS)
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

    # Tars.

    def _tar(self, file: IO[bytes]) -> ArchivedImages:
        """Yield the images of a tar, labelled by a file beside each, or else by their folders.

        Raises TarError if the tar is damaged, and UsageError if the images have no labels or doubtful ones.
        """
        with tarfile.open(fileobj=file, mode="r:*") as tar:
            # Go through all headers first: a tar has no list of its files.
            members: list[tarfile.TarInfo] = []
            suffixes: Counter[str] = Counter()  # of all files, in the tar's order
            for member in tar:
                if member.isdir():
                    continue
                name = PurePosixPath(member.name).name
                suffixes[_suffix(name)] += 1
                if not (member.isfile() or member.islnk()):  # a hard link is read like the file that it stands for
                    reason = "links"
                elif _suffix(name) in _LABEL_SUFFIXES and not is_hidden(name):
                    reason = None
                else:
                    reason = why_left_out(name)
                if reason is None:
                    members.append(member)
                else:
                    self.left_out[reason] += 1
            _check_end(tar)

            # An image and its label file have the same name up to the first dot.
            images = [member for member in members if _suffix(member.name) in SUFFIXES]
            keys_of_images = {_sample_key(member.name) for member in images}
            keys_of_labels = {_sample_key(member.name) for member in members if _suffix(member.name) in _LABEL_SUFFIXES}
            if keys_of_images & keys_of_labels:
                yield from self._with_label_files(tar, members, len(images))
            elif images:
                yield from self._in_class_folders(tar, images, suffixes)

    def _with_label_files(
        self, tar: tarfile.TarFile, members: list[tarfile.TarInfo], num_images: int
    ) -> ArchivedImages:
        """Yield the images of a tar of WebDataset that have a label file beside them, and count the others.

        Raises UsageError if a label may belong to any of several images, or none of ``num_images`` images has one.
        """
        num_alone = 0  # images without a label
        for _, group in groupby(members, lambda member: _sample_key(member.name)):
            images: dict[str, list[tarfile.TarInfo]] = {}  # by the names without suffix
            labels: dict[str, str] = {}
            for member in group:
                stem = member.name.removesuffix(PurePosixPath(member.name).suffix)
                if _suffix(member.name) in SUFFIXES:
                    images.setdefault(stem, []).append(member)
                elif _suffix(member.name) in _LABEL_SUFFIXES and (label := _tar_label(tar, member)):
                    labels.setdefault(stem, label)

            # If a sample has one label, such as 17.cls beside 17.input.jpg and 17.seg.png, it is for the image that
            # image_suffix names or that is the only JPEG: then all images of the sample are candidates for it.
            # Otherwise, label and image must have the same name.
            if len(labels) == 1 and (self.image_suffix or not images.keys() & labels.keys()):
                all_images = [member for members_of_stem in images.values() for member in members_of_stem]
                if self.image_suffix or self._labelled_image(all_images) is not None:
                    images = dict.fromkeys(labels, all_images) if all_images else {}

            # Take one image for each label. Those that are left have none.
            for stem in [stem for stem in images if stem in labels]:
                candidates = images.pop(stem)
                member = self._labelled_image(candidates)
                if member is None:
                    names = [PurePosixPath(candidate.name).name for candidate in candidates]
                    raise UsageError(
                        f"{self.name} has one label beside {' and '.join(names[:3])}; name the image to take with "
                        f"--image-suffix, such as --image-suffix {names[0].partition('.')[2]}."
                    )
                self.left_out[_SECOND_IMAGES] += len(candidates) - 1
                yield ArchivedImage(member.name, _content(tar, member), labels.pop(stem))
            num_alone += sum(map(len, images.values()))
        if num_images and num_alone == num_images:
            raise UsageError(
                f"None of the {format_count(num_images, 'image')} of {self.name} is beside its label: the files of one "
                "image must follow each other in a tar and be called alike, as 17.jpg and 17.cls (or 17.json with "
                "label or cls); if a sample has several images, name the one to take with --image-suffix."
            )
        self.left_out["images without a label beside them"] += num_alone

    def _labelled_image(self, candidates: Sequence[tarfile.TarInfo]) -> tarfile.TarInfo | None:
        """Return the one of several images that their label is meant for; None if that is unclear.

        It is the one that ``image_suffix`` names. Without a suffix, it is the only image, or else the only JPEG: masks
        and depth maps are never JPEGs, which would change their values.
        """
        if self.image_suffix is None:
            suffixes = SUFFIXES if len(candidates) == 1 else _JPEG_SUFFIXES
            chosen = [member for member in candidates if _suffix(member.name) in suffixes]
        else:
            suffix = "." + self.image_suffix.lower().lstrip(".")
            chosen = [member for member in candidates if member.name.lower().endswith(suffix)]
            # --image-suffix png means 17.png even if the sample also has a 17.seg.png.
            exact = [member for member in chosen if member.name.lower() == _sample_key(member.name.lower()) + suffix]
            chosen = exact or chosen
        return chosen[0] if len(chosen) == 1 else None

    def _in_class_folders(
        self, tar: tarfile.TarFile, images: list[tarfile.TarInfo], suffixes: Counter[str]
    ) -> ArchivedImages:
        """Yield the images of a tar without label files: their folders are the labels.

        Raises UsageError if these are training and held-out images, or in no class folders. ``suffixes`` counts all
        files of the tar, for the message.
        """
        # Leave out hidden files. A folder that all images share may be hidden, so only what is below it is looked at.
        paths = [str(PurePosixPath(member.name)).lstrip("/") for member in images]
        shared_folder = posixpath.commonpath([posixpath.dirname(path) for path in paths])
        reasons = [why_left_out(path.removeprefix(shared_folder).lstrip("/")) for path in paths]
        self.left_out.update(filter(None, reasons))
        kept = [index for index, reason in enumerate(reasons) if reason is None]

        # The folders must be classes, and not parts.
        folders = read_folders([paths[index] for index in kept], self.name)
        if folders.parts is not None:
            first, second, *_ = folders.folder_of.values()
            raise UsageError(
                f"{self.name} contains {first}/ and {second}/, which would become one data set; unpack "
                "it, and pack each folder."
            )
        if not any(folders.classes):
            files = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes.items())
            raise UsageError(
                f"{self.name} has neither labels beside its images (.cls, or .json with label or cls) nor class "
                f"folders, but {files}."
            )
        for index, label in zip(kept, folders.classes, strict=True):
            yield ArchivedImage(paths[index], _content(tar, images[index]), label)


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


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise TarError unless zeros, the mark of its end, and nothing else follow the members of ``tar``.

    tarfile stops silently at a damaged header, at zeros, and at the end of the file. So it would leave out what follows
    a hole of zeros, or a second tar in the file. Reading to the end also verifies gzip's checksum.
    """
    raw: Any = tar.fileobj
    raw.seek(tar.offset)
    position = tar.offset
    while chunk := raw.read(_CHUNK_BYTES):
        if position == tar.offset and chunk[: tarfile.BLOCKSIZE].strip(b"\0"):
            raise tarfile.TarError(f"it is damaged at byte {position:,}")
        if rest := chunk.lstrip(b"\0"):
            raise tarfile.TarError(
                f"zeros from byte {tar.offset:,} on, as at the end of a tar, are followed by data at byte "
                f"{position + len(chunk) - len(rest):,}: it has a hole, or is several tars in one file, which "
                "`tar --ignore-zeros` unpacks"
            )
        position += len(chunk)
    if position == tar.offset:
        raise tarfile.TarError(f"it is cut off: the mark of its end is missing at byte {position:,}")


def _suffix(name: str) -> str:
    """Return the last suffix of a file's name in lower case: ``.png`` for ``17.seg.PNG``."""
    return PurePosixPath(name).suffix.lower()


def _sample_key(name: str) -> str:
    """Return the key of a sample, which its files share: the path up to the first dot in the file's name."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    """Return the content of a file, or of the one that a hard link names; raise TarError if there is none."""
    try:
        opened = tar.extractfile(member)
    except KeyError as error:  # the tar lacks the file that a link names
        raise tarfile.TarError(str(error)) from None
    assert opened is not None
    return opened.read()


def _tar_label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """Return the label in a .cls or .json file; empty if it has none. Raise UsageError for several, or invalid text."""
    # A .cls file is nothing but the label. Bytes that are no UTF-8 must not be replaced by a sign for "unknown": the
    # classes é and è of another encoding would become the same class.
    content = _content(tar, member)
    if _suffix(member.name) == ".cls":
        try:
            return content.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            sentence = (
                f"The label in {member.name!r} is {content[:80]!r}, which is not text in UTF-8; write it in UTF-8."
            )
            raise UsageError(sentence) from error

    # A .json file may have a label; a damaged one counts as one without.
    document: Any = None
    with suppress(ValueError, RecursionError):
        document = json.loads(content)
    label = document.get("label", document.get("cls", "")) if isinstance(document, dict) else ""
    if isinstance(label, (list, dict)):
        raise UsageError(
            f"A label in a .json file is {json.dumps(label)[:80]}, and one class per image is expected; unpack the "
            "images, and give their classes with --labels and --label-separator."
        )

    # The values of JSON become the texts that label files have: null is empty, true is "true", and 3.0 is "3".
    if label is None:
        return ""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, float) and label.is_integer():
        return str(int(label))
    return str(label)
