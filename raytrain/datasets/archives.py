"""Labelled images in archives that people have already: Parquet files, and tars of WebDataset or of class folders."""

from __future__ import annotations

import json
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

from raytrain.data.labels.folders import read_folders
from raytrain.data.labels.label_file import KEY_COLUMNS, LABEL_COLUMNS, NO_LABELS, LabelColumns, as_text, find_column
from raytrain.data.labels.listing import SUFFIXES, is_hidden, why_left_out
from raytrain.errors import UsageError

ARCHIVE_SUFFIXES = (".parquet", ".tar", ".tgz", ".tar.gz")

_IMAGE_COLUMNS = ("image", "image_bytes", "bytes", "jpg", "png", "img")
_ROWS_AT_A_TIME = 64
_MAGIC = {b"\xff\xd8": ".jpg", b"\x89PNG": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"RIFF": ".webp"}
_NO_LABELS = NO_LABELS | {"-1"}
_LABEL_SUFFIXES = (".cls", ".json")


class ArchivedImage(NamedTuple):
    """An image of an archive. Its key is a path that stays in the folder that it is written below."""

    key: str
    content: bytes
    label: str
    split: str = ""  # in lower case; empty if the archive has no column ``split``


ArchivedImages = Iterator[ArchivedImage]


@dataclass
class Archive:
    """An archive that is being read, and how many of its images are left out, by reason."""

    name: str
    columns: LabelColumns = field(default_factory=LabelColumns)
    left_out: Counter[str] = field(default_factory=Counter)

    def read(self, file: IO[bytes]) -> ArchivedImages:
        """Yield the images, in the archive's order; count those without label or content, and other files.

        Parquet: the images are bytes, or structs with bytes and path, as Hugging Face writes them; so are the names of
        the classes in the metadata. WebDataset: the members of an image have one name up to the first dot, such as
        17.jpg and 17.cls; a label is the text of .cls, or "label" or "cls" in .json. Other tars: class folders.

        Raises UsageError if it cannot be read, has no images or labels where they are looked for, or repeats a key.
        """
        try:
            for image in self._parquet(file) if self.name.endswith(".parquet") else self._tar(file):
                label = image.label.strip()
                if label in _NO_LABELS:
                    self.left_out["images without a label"] += 1
                    continue
                # A key may not lead out of a folder, nor have hidden names, which are not listed.
                parts = PurePosixPath(image.key.replace("\0", "_")).parts
                key = "/".join(part.lstrip(".") or "_" for part in parts if part != "/")
                yield image._replace(key=key, label=label)
        except (pa.ArrowInvalid, tarfile.TarError, zlib.error, EOFError) as error:
            reason = str(error).partition("\n")[0].rstrip(".:")
            raise UsageError(f"{self.name} cannot be read ({reason}); check the file.") from None

    # Parquet.

    def _parquet(self, file: IO[bytes]) -> ArchivedImages:
        """Yield the images of a Parquet file, with the names of the classes that Hugging Face writes into it."""
        parquet = pq.ParquetFile(file)
        schema = parquet.schema_arrow
        advice = "rename the right one to image, or give a label file with --labels"
        image = self._column(schema, _IMAGE_COLUMNS, None, "images", advice)
        label_name = next(iter(self.columns.label), None)
        label = self._column(schema, LABEL_COLUMNS, label_name, "labels", "name it with --label-column")

        # Images are bytes, or structs with bytes, and an image has at most one label.
        content_type, label_type = schema.field(image).type, schema.field(label).type
        if pa.types.is_struct(content_type) and content_type.get_field_index("bytes") >= 0:
            content_type = content_type.field("bytes").type
        wrong, expected = None, "the bytes of image files are expected; write those into it, or use files with --labels"
        if content_type not in (pa.binary(), pa.large_binary(), pa.binary_view()):
            wrong = schema.field(image)
        elif pa.types.is_nested(label_type):
            wrong = schema.field(label)
            expected = "one class per image is expected; unpack the images, and give --labels"
        if wrong is not None:
            problem = f"The column {wrong.name!r} of {self.name} holds values of type {wrong.type}"
            raise UsageError(f"{problem}, and {expected}.")

        # Numbers are numbers of classes, if the metadata has the names of these.
        classes = list[str]()
        if pa.types.is_integer(label_type) or pa.types.is_floating(label_type):
            with suppress(KeyError, TypeError, ValueError):
                metadata = json.loads((schema.metadata or {})[b"huggingface"])
                classes = [str(name) for name in metadata["info"]["features"][label]["names"]]

        keys = self._keys(parquet, image)
        split = find_column(schema.names, None, ("split",)) or image
        row = 0
        for batch in parquet.iter_batches(_ROWS_AT_A_TIME, columns=list({image, label, split})):
            labels = as_text(batch.column(label)).to_pylist()
            for values, text in zip(batch.select(list({image, split})).to_pylist(), labels, strict=True):
                content = values[image].get("bytes") if isinstance(values[image], dict) else values[image]
                part = "" if split == image else str(values[split] or "").lower()
                if content:
                    # A label without a class, such as -1, is left to the caller.
                    if classes and text and text not in _NO_LABELS:
                        if not text.isdecimal() or int(text) >= len(classes):
                            raise UsageError(
                                f"{self.name} has the label {text}, and names of {len(classes)} classes; correct it."
                            )
                        text = classes[int(text)]
                    # The first bytes say the format of a file whose name does not.
                    key = keys[row]
                    if not key.lower().endswith(SUFFIXES):
                        key += next((suffix for magic, suffix in _MAGIC.items() if content.startswith(magic)), ".jpg")
                    yield ArchivedImage(key, content, text or "", part)
                else:
                    self.left_out["rows without the bytes of an image"] += 1
                row += 1

    def _column(self, schema: pa.Schema, usual: Sequence[str], name: str | None, content: str, advice: str) -> str:
        """Return the column called ``name``, or by a usual name. Raise UsageError unless there is one."""
        column = find_column(schema.names, name, usual)
        if column is None:
            raise UsageError(
                f"{self.name} has no column of {content}: none of {name or ', '.join(usual)} is among its columns "
                f"{', '.join(schema.names[:10])}; {advice}."
            )
        if schema.names.count(column) > 1:
            raise UsageError(f"{self.name} has {schema.names.count(column)} columns called {column!r}; rename one.")
        return column

    def _keys(self, parquet: pq.ParquetFile, image: str) -> list[str]:
        """Return the key of each row: that of its column, else the path beside the bytes if unique, else its number."""
        schema = parquet.schema_arrow
        if self.columns.key is not None:
            column = self._column(schema, (), self.columns.key, "keys", "name it with --key-column")
        else:
            column = find_column([name for name in schema.names if name != image], None, KEY_COLUMNS)
        numbers = [f"{row:09d}" for row in range(parquet.metadata.num_rows)]
        if column is not None:
            keys = parquet.read([column])[column].to_pylist()
            return [number if key is None else str(key) for key, number in zip(keys, numbers, strict=True)]
        type = schema.field(image).type
        if not pa.types.is_struct(type) or type.get_field_index("path") < 0:
            return numbers
        paths = [(record or {}).get("path") for record in parquet.read([f"{image}.path"])[image].to_pylist()]
        return numbers if None in paths or len(set(paths)) < len(paths) else list(map(str, paths))

    # Tars.

    def _tar(self, file: IO[bytes]) -> ArchivedImages:
        """Yield the images of a tar, with a label file beside each, or else in class folders."""
        with tarfile.open(fileobj=file, mode="r:*") as tar:
            members: list[tarfile.TarInfo] = []
            suffixes: Counter[str] = Counter()  # of all files, in the tar's order
            for member in tar:
                if member.isdir():
                    continue
                name = PurePosixPath(member.name).name
                suffixes[_suffix(name)] += 1
                may_be_label = _suffix(name) in _LABEL_SUFFIXES and not is_hidden(name)
                is_file = member.isfile() or member.islnk()
                if reason := "links" if not is_file else None if may_be_label else why_left_out(name):
                    self.left_out[reason] += 1
                else:
                    members.append(member)

            # tarfile takes a damaged header for the end.
            raw: Any = tar.fileobj
            raw.seek(tar.offset)
            if raw.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise tarfile.TarError(f"it is damaged at byte {tar.offset:,}")

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
        """Yield images with a label file beside each, as WebDataset has them."""
        num_alone = 0
        for _, group in groupby(members, lambda member: _sample_key(member.name)):
            images: dict[str, tuple[str, bytes]] = {}  # names and contents by the names without suffix
            labels: dict[str, str] = {}
            for member in group:
                stem = member.name.removesuffix(PurePosixPath(member.name).suffix)
                if _suffix(member.name) in SUFFIXES:
                    images[stem] = member.name, _content(tar, member)
                elif _suffix(member.name) in _LABEL_SUFFIXES and (label := _tar_label(tar, member)):
                    labels.setdefault(stem, label)
            for stem in [stem for stem in images if stem in labels]:
                yield ArchivedImage(*images.pop(stem), labels.pop(stem))
            if len(images) == len(labels) == 1:  # such as 17.input.jpg and 17.cls
                yield ArchivedImage(*images.popitem()[1], labels.popitem()[1])
            num_alone += len(images)
        if num_images and num_alone == num_images:
            raise UsageError(
                f"None of the {num_images:,} images of {self.name} is beside its label: the files of one image must "
                "follow each other in a tar and be called alike, as 17.jpg and 17.cls (or 17.json with label or cls)."
            )
        self.left_out["images without a label beside them"] += num_alone

    def _in_class_folders(
        self, tar: tarfile.TarFile, images: list[tarfile.TarInfo], suffixes: Counter[str]
    ) -> ArchivedImages:
        """Yield the images of a tar without label files: their folders are the labels."""
        named = [(str(PurePosixPath(member.name)).lstrip("/"), member) for member in images]
        shared = len(posixpath.commonpath([posixpath.dirname(name) for name, _ in named]))  # may be hidden itself
        named = [(name, member) for name, member in named if not is_hidden(name[shared:].lstrip("/"))]
        folders = read_folders([name for name, _ in named], self.name)
        if folders.parts is not None:
            raise UsageError(
                f"{self.name} contains {folders.train}/ and {folders.test}/, which would become one data set; unpack "
                "it, and pack each folder."
            )
        if not any(folders.classes):
            files = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes.items())
            raise UsageError(
                f"{self.name} has neither labels beside its images (.cls, or .json with label or cls) nor class "
                f"folders, but {files}."
            )
        for (name, member), label in zip(named, folders.classes, strict=True):
            yield ArchivedImage(name, _content(tar, member), label)


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _sample_key(name: str) -> str:
    """Return what WebDataset's files of one image have in common: the path up to the first dot of the name."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    try:
        opened = tar.extractfile(member)
    except KeyError as error:  # of a link
        raise tarfile.TarError(str(error)) from None
    assert opened is not None
    return opened.read()


def _tar_label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """Return the label in a member, empty if it has none. Raise UsageError for several labels."""
    content = _content(tar, member)
    if _suffix(member.name) == ".cls":
        return content.decode(errors="replace").strip()
    document: Any = None
    with suppress(ValueError, RecursionError):
        document = json.loads(content)
    label = document.get("label", document.get("cls", "")) if isinstance(document, dict) else ""
    if isinstance(label, (list, dict)):
        raise UsageError(
            f"A label in a .json file is {json.dumps(label)[:80]}, and one class per image is expected; unpack the "
            "images, and give their classes with --labels and --label-separator."
        )
    # 3.0 is 3, as in label files, and what is missing is empty.
    if label is None or isinstance(label, bool):
        return "" if label is None else str(label).lower()
    return str(int(label) if isinstance(label, float) and label.is_integer() else label)
