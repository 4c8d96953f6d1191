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
from raytrain.data.labels.label_columns import KEY_COLUMNS, LABEL_COLUMNS, NO_LABELS, LabelColumns, as_text, find_column
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
        """The images, in the archive's order; those without label or content, and other files, are counted.

        Parquet: the images are bytes, or structs with bytes and path, as Hugging Face writes them; so are the names of
        the classes in the metadata. WebDataset: the members of an image have one name up to the first dot, such as
        17.jpg and 17.cls; a label is the text of .cls, or "label" or "cls" in .json. Other tars: class folders.

        Raises UsageError if it cannot be read, has no images or labels where they are looked for, or repeats a key.
        """
        try:
            found = self._parquet(file) if self.name.endswith(".parquet") else self._tar(file)
            for image in found:
                if image.label.strip() in _NO_LABELS:
                    self.left_out["images without a label"] += 1
                else:
                    yield image._replace(key=_safe(image.key), label=image.label.strip())
        except (pa.ArrowInvalid, tarfile.TarError, zlib.error, EOFError) as error:
            reason = str(error).partition("\n")[0].rstrip(".:")
            raise UsageError(f"{self.name} cannot be read ({reason}); check the file.") from None

    # Parquet.

    def _parquet(self, file: IO[bytes]) -> ArchivedImages:
        parquet = pq.ParquetFile(file)
        schema = parquet.schema_arrow
        image = self._column(
            schema, _IMAGE_COLUMNS, None, "images", "rename the right one to image, or give a label file with --labels"
        )
        label = self._column(
            schema, LABEL_COLUMNS, next(iter(self.columns.label), None), "labels", "name it with --label-column"
        )
        self._check_columns(schema.field(image), schema.field(label))
        keys = _keys(parquet, self._key_column(schema, image), image)
        type = schema.field(label).type
        classes = _class_names(schema, label) if pa.types.is_integer(type) or pa.types.is_floating(type) else []
        split = find_column(schema.names, None, ("split",)) or image
        row = 0
        for batch in parquet.iter_batches(_ROWS_AT_A_TIME, columns=list({image, label, split})):
            labels = as_text(batch.column(label)).to_pylist()
            for values, text in zip(batch.select(list({image, split})).to_pylist(), labels, strict=True):
                content = values[image].get("bytes") if isinstance(values[image], dict) else values[image]
                part = "" if split == image else str(values[split] or "").lower()
                if content:
                    name = self._class_name(text or "", classes)
                    yield ArchivedImage(_with_suffix(keys[row], content), content, name, part)
                else:
                    self.left_out["rows without the bytes of an image"] += 1
                row += 1

    def _class_name(self, text: str, classes: Sequence[str]) -> str:
        """The class of a label, the number of one of the ``classes`` if there are some, or -1 and the like for none."""
        if not classes or text in _NO_LABELS:
            return text
        if not text.isdecimal() or int(text) >= len(classes):
            raise UsageError(f"{self.name} has the label {text}, and names of {len(classes)} classes; correct it.")
        return classes[int(text)]

    def _column(self, schema: pa.Schema, usual: Sequence[str], name: str | None, what: str, advice: str) -> str:
        found = find_column(schema.names, name, usual)
        if found is None:
            raise UsageError(
                f"{self.name} has no column of {what}: none of {name or ', '.join(usual)} is among its columns "
                f"{', '.join(schema.names[:10])}; {advice}."
            )
        if schema.names.count(found) > 1:
            raise UsageError(f"{self.name} has {schema.names.count(found)} columns called {found!r}; rename one.")
        return found

    def _check_columns(self, image: pa.Field, label: pa.Field) -> None:
        """Raise UsageError unless images are bytes, or structs with bytes, and an image has at most one label."""
        content = image.type
        if pa.types.is_struct(content) and content.get_field_index("bytes") >= 0:
            content = content.field("bytes").type
        wrong, expected = None, "the bytes of image files are expected; write those into it, or use files with --labels"
        if content not in (pa.binary(), pa.large_binary(), pa.binary_view()):
            wrong = image
        elif pa.types.is_nested(label.type):
            wrong, expected = label, "one class per image is expected; unpack the images, and give --labels"
        if wrong is not None:
            what = f"The column {wrong.name!r} of {self.name} holds values of type {wrong.type}"
            raise UsageError(f"{what}, and {expected}.")

    def _key_column(self, schema: pa.Schema, image: str) -> str | None:
        if self.columns.key is not None:
            return self._column(schema, (), self.columns.key, "keys", "name it with --key-column")
        return find_column([each for each in schema.names if each != image], None, KEY_COLUMNS)

    # Tars.

    def _tar(self, file: IO[bytes]) -> ArchivedImages:
        with tarfile.open(fileobj=file, mode="r:*") as tar:
            found = [(each, _why_left_out(each)) for each in tar if not each.isdir()]
            _check_end(tar)
            self.left_out.update(reason for _, reason in found if reason)
            members = [member for member, reason in found if not reason]
            images = [each for each in members if _suffix(each.name) in SUFFIXES]
            samples = {_sample_key(each.name) for each in images}
            if any(_suffix(each.name) in _LABEL_SUFFIXES and _sample_key(each.name) in samples for each in members):
                yield from self._by_label(tar, members, len(images))
            elif images:
                yield from self._by_folder(tar, images, Counter(_suffix(each.name) for each, _ in found))

    def _by_label(self, tar: tarfile.TarFile, members: list[tarfile.TarInfo], num_images: int) -> ArchivedImages:
        """Images with a label file beside each, as WebDataset has them."""
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
            for stem in [each for each in images if each in labels]:
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

    def _by_folder(self, tar: tarfile.TarFile, images: list[tarfile.TarInfo], suffixes: Counter[str]) -> ArchivedImages:
        """Images of a tar without label files: their folders are the labels."""
        named = [(str(PurePosixPath(each.name)).lstrip("/"), each) for each in images]
        shared = len(posixpath.commonpath([posixpath.dirname(name) for name, _ in named]))  # may be hidden itself
        named = [(name, each) for name, each in named if not is_hidden(name[shared:].lstrip("/"))]
        folders = read_folders([name for name, _ in named], self.name)
        if folders.parts is not None:
            raise UsageError(
                f"{self.name} contains {folders.train}/ and {folders.test}/, which would become one data set; unpack "
                "it, and pack each folder."
            )
        if not any(folders.classes):
            found = ", ".join(f"{count:,} {suffix or 'without a suffix'}" for suffix, count in suffixes.items())
            raise UsageError(
                f"{self.name} has neither labels beside its images (.cls, or .json with label or cls) nor class "
                f"folders, but {found}."
            )
        for (name, member), label in zip(named, folders.classes, strict=True):
            yield ArchivedImage(name, _content(tar, member), label)


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    try:
        opened = tar.extractfile(member)
    except KeyError as error:  # of a link
        raise tarfile.TarError(str(error)) from None
    assert opened is not None
    return opened.read()


def _why_left_out(member: tarfile.TarInfo) -> str | None:
    """Why a member that is no folder is not used; None if it is an image or may be a label."""
    name = PurePosixPath(member.name).name
    if not member.isfile() and not member.islnk():
        return "links"
    return None if _suffix(name) in _LABEL_SUFFIXES and not is_hidden(name) else why_left_out(name)


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise TarError unless the tar has ended: tarfile takes a damaged header for the end."""
    file: Any = tar.fileobj
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise tarfile.TarError(f"it is damaged at byte {tar.offset:,}")


def _sample_key(name: str) -> str:
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.partition(".")[0]


def _tar_label(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    """The label in a member, empty if it has none. Raises UsageError for several labels."""
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
    return _text(label)


def _text(label: Any) -> str:
    """A label of JSON as text: 3.0 is 3, as in label files, and what is missing is empty."""
    if isinstance(label, bool):
        return str(label).lower()
    return "" if label is None else str(int(label) if isinstance(label, float) and label.is_integer() else label)


def _keys(parquet: pq.ParquetFile, column: str | None, image: str) -> list[str]:
    """The key of each row: its value in ``column``, else the path in the image's struct if unique, else its number."""
    schema = parquet.schema_arrow
    numbers = [f"{row:09d}" for row in range(parquet.metadata.num_rows)]
    if column is not None:
        given = parquet.read([column])[column].to_pylist()
        return [number if key is None else str(key) for key, number in zip(given, numbers, strict=True)]
    type = schema.field(image).type
    if not pa.types.is_struct(type) or type.get_field_index("path") < 0:
        return numbers
    paths = [(each or {}).get("path") for each in parquet.read([f"{image}.path"])[image].to_pylist()]
    return numbers if None in paths or len(set(paths)) < len(paths) else list(map(str, paths))


def _class_names(schema: pa.Schema, label: str) -> list[str]:
    """The names of the classes that Hugging Face's datasets writes into the metadata; empty if there are none."""
    with suppress(KeyError, TypeError, ValueError):
        metadata = json.loads((schema.metadata or {})[b"huggingface"])
        return [str(each) for each in metadata["info"]["features"][label]["names"]]
    return []


def _with_suffix(key: str, content: bytes) -> str:
    """``key`` with the suffix of an image: the format is told by the first bytes."""
    if key.lower().endswith(SUFFIXES):
        return key
    return key + next((suffix for magic, suffix in _MAGIC.items() if content.startswith(magic)), ".jpg")


def _safe(key: str) -> str:
    """``key`` without what leads out of a folder, and without hidden names, which are not listed."""
    parts = PurePosixPath(key.replace("\0", "_")).parts
    return "/".join(part.lstrip(".") or "_" for part in parts if part != "/")
