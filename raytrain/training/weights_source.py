"""Files of weights in a folder, a bucket or at Hugging Face, and safetensors."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from safetensors import SafetensorError

from raytrain.config.values import matches
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import open_store
from raytrain.training.model_names import missing

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT = "DEFAULT"
SUFFIX = ".safetensors"
_CLASSES = "classes"
_HUB = "hf://"
_IN_HUB = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+))?")
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # of a repository, the better kind first
_MAX_RATIO = 10
"""torch.save does not compress, and compressed weights lose some ten percent. A zip bomb grows a thousand times."""


def check_unpacked_size(data: bytes) -> None:
    """Raise ValueError if ``data`` is a zip archive, as torch writes them, that unpacks to over 10 times its size."""
    file = io.BytesIO(data)
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, UnicodeDecodeError, NotImplementedError) as error:
        raise ValueError(f"it is a damaged archive ({error})") from None
    if unpacked > _MAX_RATIO * len(data):
        raise ValueError(f"it unpacks to {unpacked / 1e9:,.1f} GB, {unpacked / len(data):,.0f} times its size")


def check_weights_source(place: str) -> None:
    """Raise UsageError if there are no weights in ``place``, as far as this can be told without a connection."""
    if place.startswith(_HUB):
        _check_hub(place)
    elif place != DEFAULT and "://" not in place and not Path(place).expanduser().is_file():
        raise _no_file(place)


def read_weights_file(place: str) -> tuple[str, bytes]:
    """Name and content of the file at ``place``; UsageError if there is none."""
    if place.startswith(_HUB):
        file = _download(place)
        return file.name, file.read_bytes()
    folder, slash, name = place.rpartition("/")
    try:
        return name, open_store(folder + slash or ".").get(name)
    except FileNotFoundError:
        raise _no_file(place) from None


def _no_file(place: str) -> UsageError:
    return UsageError(
        f"--weights {place}: there is no such file; give {DEFAULT}, a file, an s3:// object or hf://owner/name."
    )


def _check_hub(place: str) -> re.Match[str]:
    found = _IN_HUB.fullmatch(place)
    if found is None:
        raise UsageError("--weights starts with hf://; write hf://owner/name or hf://owner/name/file.")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise missing(f"--weights {place}", "huggingface_hub")
    return found


def _download(place: str) -> Path:
    """The file on this machine: Hugging Face's client keeps what it downloads below HF_HOME."""
    found = _check_hub(place)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    reason = ""
    for name in (found["file"],) if found["file"] else _HUB_FILES:
        try:
            return Path(hf_hub_download(found["repository"], name))
        except (OSError, EntryNotFoundError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                break  # there is no connection, or no such repository, so no other file either
    raise StorageError(
        f"--weights {place} cannot be downloaded ({reason}); check the name and the network connection, or give a file."
    )


def to_safetensors(weights: Mapping[str, Tensor], classes: Sequence[str]) -> bytes:
    """The content of a file with ``weights``; its metadata hold the names of the classes as JSON."""
    from safetensors.torch import save  # imports torch

    # Each tensor gets memory of its own, for the format knows no shared weights.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return save(copies, {_CLASSES: json.dumps(list(classes)), "format": "pt"})


def from_safetensors(data: bytes) -> tuple[dict[str, Tensor] | None, tuple[str, ...] | None]:
    """The weights in a file, None if it is damaged, and their classes, None if it does not say."""
    from safetensors.torch import load

    try:
        return load(data), _classes(data)
    except SafetensorError:
        return None, None


def _classes(data: bytes) -> tuple[str, ...] | None:
    """From the header: its length in 8 bytes, and its JSON."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        classes: object = json.loads(header.get("__metadata__", {})[_CLASSES])
    except (KeyError, ValueError, RecursionError):
        return None
    return tuple(cast(list[str], classes)) if matches(classes, list[str]) else None
