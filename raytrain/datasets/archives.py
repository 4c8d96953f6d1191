"""Labelled images in files that people have already: Parquet with a column of images, and WebDataset tars."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain.data.label_file import KEY_COLUMNS, LABEL_COLUMNS
from raytrain.data.manifest import SUFFIXES
from raytrain.errors import UsageError

ARCHIVE_SUFFIXES = (".parquet", ".tar")

_IMAGE_COLUMNS = ("image", "image_bytes", "bytes", "jpg", "png", "img")
_ROWS_AT_A_TIME = 64
_MAGIC = {b"\xff\xd8": ".jpg", b"\x89PNG": ".png", b"GIF8": ".gif", b"BM": ".bmp", b"RIFF": ".webp"}


class ArchivedImage(NamedTuple):
    """One image of an archive. ``key`` is a path that stays in the folder that it is written below."""

    key: str
    content: bytes
    label: str


def read_archive(name: str, file: IO[bytes]) -> Iterator[ArchivedImage]:
    """The labelled images of one archive, in its order; those without a label are left out.

    Parquet: the images are bytes, or structs with bytes and path, as Hugging Face writes them; so are the names of the
    classes in the metadata. WebDataset: the members of an image have one name up to the first dot, such as 17.jpg and
    17.cls; a label is the text of .cls, or "label" or "cls" in .json.

    Raises UsageError if it cannot be read, or has no images or labels where they are looked for.
    """
    stem = PurePosixPath(name).stem
    try:
        found = _read_parquet(name, file) if name.endswith(".parquet") else _read_tar(file)
        for key, content, label in found:
            yield ArchivedImage(f"{_safe(stem)}/{_safe(key)}", content, label)
    except (pa.ArrowInvalid, tarfile.TarError, EOFError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(f"{name} cannot be read ({reason}); check the file.") from None


def _read_parquet(name: str, file: IO[bytes]) -> Iterator[tuple[str, bytes, str]]:
    parquet = pq.ParquetFile(file)
    schema = parquet.schema_arrow
    image = _column(name, schema, _IMAGE_COLUMNS, "images")
    label = _column(name, schema, LABEL_COLUMNS, "labels")
    key = next((each for each in KEY_COLUMNS if each in schema.names and each != image), None)
    classes = _class_names(schema, label)
    row = 0
    for batch in parquet.iter_batches(_ROWS_AT_A_TIME, columns=[name for name in (image, label, key) if name]):
        for values in batch.to_pylist():
            content, path = _content(values[image])
            if content and values[label] is not None:
                known = values[key] if key else path
                yield _with_suffix(str(known or f"{row:09d}"), content), content, _class_name(values[label], classes)
            row += 1


def _column(name: str, schema: pa.Schema, usual: Sequence[str], what: str) -> str:
    found = next((each for each in usual if each in schema.names), None)
    if found is None:
        raise UsageError(
            f"{name} has no column of {what}: none of {', '.join(usual)} is among its columns "
            f"{', '.join(schema.names[:10])}; rename the right one."
        )
    return found


def _class_names(schema: pa.Schema, label: str) -> list[str]:
    """The names of the classes that Hugging Face's datasets writes into the metadata; empty if there are none."""
    with suppress(KeyError, TypeError, ValueError):
        metadata = json.loads((schema.metadata or {})[b"huggingface"])
        return [str(each) for each in metadata["info"]["features"][label]["names"]]
    return []


def _class_name(value: Any, classes: Sequence[str]) -> str:
    return classes[value] if isinstance(value, int) and 0 <= value < len(classes) else str(value)


def _content(image: Any) -> tuple[bytes | None, str | None]:
    """The bytes of an image, and the path that is known of it."""
    return (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, None)


def _read_tar(file: IO[bytes]) -> Iterator[tuple[str, bytes, str]]:
    with tarfile.open(fileobj=file, mode="r|*") as tar:
        key, members = "", dict[str, tuple[str, bytes]]()
        for member in tar:
            opened = tar.extractfile(member) if member.isfile() else None
            if opened is None:
                continue
            folder, slash, base = member.name.removeprefix("./").rpartition("/")
            if folder + slash + base.partition(".")[0] != key:
                yield from _sample(members)
                key, members = folder + slash + base.partition(".")[0], {}
            members[f".{base.partition('.')[2].lower()}"] = member.name, opened.read()
        yield from _sample(members)


def _sample(members: dict[str, tuple[str, bytes]]) -> Iterator[tuple[str, bytes, str]]:
    """The image of one WebDataset sample, whose members are given by suffix; nothing if it has no image or label."""
    image = next((members[suffix] for suffix in members if suffix in SUFFIXES), None)
    label = _tar_label(members)
    if image is not None and label:
        yield *image, label


def _tar_label(members: dict[str, tuple[str, bytes]]) -> str:
    if ".cls" in members:
        return members[".cls"][1].decode(errors="replace").strip()
    with suppress(KeyError, ValueError, RecursionError):
        document = json.loads(members[".json"][1])
        if isinstance(document, dict):
            return str(document.get("label", document.get("cls", "")))
    return ""


def _with_suffix(key: str, content: bytes) -> str:
    """``key`` with the suffix of an image: the format is told by the first bytes."""
    if key.lower().endswith(SUFFIXES):
        return key
    return key + next((suffix for magic, suffix in _MAGIC.items() if content.startswith(magic)), ".jpg")


def _safe(key: str) -> str:
    """``key`` without what leads out of a folder, and without hidden names, which are not listed."""
    return "/".join(part.lstrip(".") or "_" for part in PurePosixPath(key).parts if part != "/")
