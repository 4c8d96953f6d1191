"""Reads files of weights from a folder, a bucket or Hugging Face, and checks them; reads and writes safetensors."""

from __future__ import annotations

import io
import json
import os
import re
import ssl
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer  # in Python 3.10 it is not the builtin one
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, cast
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from safetensors import SafetensorError

from raytrain.config.extras import require_package
from raytrain.config.network import timm_name
from raytrain.config.option_values import matches
from raytrain.errors import StorageError, UsageError
from raytrain.storage.open import expanded_path, open_store

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT = "DEFAULT"  # in place of a location: the weights that torchvision or timm has for the network
SUFFIX = ".safetensors"
_CLASSES = "classes"  # key of the class names in the metadata
_HUB = "hf://"
_IN_HUB = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+))?")
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")  # usual files of a repository, the safer kind first
_ANSWERS_WITHIN_S = 4.0
_MAX_RATIO = 10
"""torch.save does not compress, and compressed weights lose some ten percent. A zip bomb grows a thousand times."""
# The first four bytes of the records of a zip archive, and the lengths of the records at its end.
ZIP, _END, _END64, _LOCATOR = b"PK\3\4", b"PK\5\6", b"PK\6\6", b"PK\6\7"
_END_BYTES, _END64_BYTES, _LOCATOR_BYTES = 22, 56, 20
_PICKLE = b"\x80"  # the first byte of what torch wrote before version 1.6
_SIZES64 = 1  # kind of an extra field that holds sizes of 64 bits
_DAMAGE = (zipfile.BadZipFile, zlib.error, UnicodeDecodeError, RuntimeError, EOFError, OSError, struct.error)
"""What zipfile raises for damaged archives; encrypted ones, and unknown methods of compression, are RuntimeErrors."""


def check_weights_source(location: str) -> None:
    """Raise UsageError if there are no weights at ``location``, as far as it can be checked without a connection.

    A file must exist and begin as those of torch do, and an address of Hugging Face must have the right form, and its
    client be installed. Buckets are not asked.
    """
    if location.startswith(_HUB):
        _parse_hub(location)
    elif location != DEFAULT and "://" not in location:
        path = expanded_path(location)
        if not path.is_file():
            raise _no_file(location)
        with path.open("rb") as file:
            if not location.endswith(SUFFIX) and not file.read(len(ZIP)).startswith((ZIP, _PICKLE)):
                raise no_state_dict(location)


def check_downloads(model: str, location: str) -> None:
    """Raise UsageError or StorageError if the weights at ``location`` for ``model`` surely cannot be loaded.

    That is the case if a bucket has no such object, or if they are not kept on this machine and the server from which
    they would be downloaded does not answer. Called before a worker starts, it takes a few seconds at most.
    """
    # Weights in a repository of Hugging Face.
    if location.startswith(_HUB):
        address = _parse_hub(location)
        names = (address["file"],) if address["file"] else _HUB_FILES
        is_here = _is_in_hub_cache(address["repository"], *names)
        if not is_here and (silent := _silent_server(_hub_server())):
            raise StorageError(
                f"--weights {location} cannot be downloaded ({silent}), and is not below HF_HOME on this machine; "
                "check the network connection, or give a file."
            )
        return

    # A file or an object of a bucket.
    if location != DEFAULT:
        folder, slash, name = location.rpartition("/")
        if "://" in location and not open_store(folder + slash).exists(name):
            raise _no_file(location)
        return

    # DEFAULT weights of torchvision. Its files have the names of its networks and a hash (resnet18-f37072fd.pth), so
    # names are compared by how they begin, without separators; the file of shufflenet_v2_x1_0 lacks the 0 at the end.
    if ":" not in model:
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = Path(os.environ.get("TORCH_HOME") or f"{cache}/torch").expanduser()
        begins = re.sub(r"[._-]", "", model).rstrip("0")
        if any(re.sub(r"[._-]", "", file.name).startswith(begins) for file in home.glob("hub/checkpoints/*")):
            return
        from torchvision.models import get_model_weights  # deferred: it imports torch, which takes seconds

        if silent := _silent_server(get_model_weights(model)["DEFAULT"].url):
            raise not_downloaded("torchvision", model, silent)
        return

    # DEFAULT weights of timm, in repositories of Hugging Face. Only timm knows which one, and importing it takes
    # seconds, so it is asked only if the server is silent and any repository is kept on this machine.
    if (in_timm := timm_name(model)) is not None and (silent := _silent_server(_hub_server())):
        from huggingface_hub import constants

        if any(Path(constants.HF_HUB_CACHE).glob("models--*")):
            from timm.models import get_pretrained_cfg

            pretrained = get_pretrained_cfg(in_timm)
            repository = pretrained and pretrained.hf_hub_id
            if not repository or _is_in_hub_cache(repository, *_HUB_FILES):
                return
        raise not_downloaded("timm", in_timm, silent)


def not_downloaded(library: str, name: str, reason: object) -> StorageError:
    """Return the error for weights of a ``library``'s network that are not on this machine and cannot be downloaded."""
    return StorageError(
        f"{library}'s weights for {name} cannot be downloaded ({reason}); save them on a machine with a network "
        "connection with torch.save(model.state_dict(), FILE), and give --weights FILE."
    )


def _hub_server() -> str:
    """Return the address of Hugging Face's server; empty if the user forbids connections."""
    from huggingface_hub import constants

    return "" if constants.HF_HUB_OFFLINE else constants.ENDPOINT


def _is_in_hub_cache(repository: str, *names: str) -> bool:
    """Return whether Hugging Face's client keeps one of the files ``names`` of a repository on this machine."""
    from huggingface_hub import try_to_load_from_cache

    return any(isinstance(try_to_load_from_cache(repository, name), str) for name in names)


def _silent_server(url: str) -> str | None:
    """Return why the server of ``url`` cannot be reached, within 4 s; None if it answers, even with an error.

    The environment's proxies are used. An error of its certificate counts as an answer, because the actual download may
    trust it. The URL is empty if the user forbids connections.
    """
    if not url:
        return "HF_HUB_OFFLINE is set"
    answer: Future[str | None] = Future()

    def ask() -> None:
        try:
            urlopen(Request(url, method="HEAD"), timeout=_ANSWERS_WITHIN_S).close()
            answer.set_result(None)
        except HTTPError:  # it refuses this request, such as one without credentials, but it is there
            answer.set_result(None)
        except Exception as error:
            reason = getattr(error, "reason", error)
            answer.set_result(None if isinstance(reason, ssl.SSLError) else f"{urlsplit(url).hostname}: {reason}")

    # In a thread, because looking up a name may take longer than the limit of a connection, and cannot be interrupted.
    Thread(target=ask, daemon=True, name="weights").start()
    try:
        return answer.result(_ANSWERS_WITHIN_S)
    except NoAnswer:
        return f"{urlsplit(url).hostname} does not answer within {_ANSWERS_WITHIN_S:g} s"


def read_weights_file(location: str) -> tuple[str, bytes]:
    """Return the name and the content of the file at ``location``. Raises UsageError if there is none.

    If only a repository of Hugging Face is named, it is the first of its usual files. Hugging Face's client keeps its
    downloads below HF_HOME. Raises StorageError if the file cannot be downloaded.

    Example: ``name, data = read_weights_file("hf://timm/resnet18.a1_in1k")``
    """
    if not location.startswith(_HUB):
        folder, slash, name = location.rpartition("/")
        try:
            return name, open_store(folder + slash or ".").get(name)
        except FileNotFoundError:
            raise _no_file(location) from None
    address = _parse_hub(location)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    # If no file is named, the usual ones are tried in turn.
    reason = ""
    for name in (address["file"],) if address["file"] else _HUB_FILES:
        try:
            file = Path(hf_hub_download(address["repository"], name))
            return file.name, file.read_bytes()
        except (OSError, EntryNotFoundError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            # If the connection or the repository is missing, the other files cannot be had either.
            if not isinstance(error, EntryNotFoundError) or isinstance(error, LocalEntryNotFoundError):
                break
    raise StorageError(
        f"--weights {location} cannot be downloaded ({reason}); check the name and the network connection, or give a "
        "file."
    )


def _parse_hub(location: str) -> re.Match[str]:
    """Return the match of hf://owner/name/file, with the groups ``repository`` and ``file``, which may be None.

    Raises UsageError for another form, or if Hugging Face's client is not installed.
    """
    address = _IN_HUB.fullmatch(location)
    if address is None:
        raise UsageError("--weights starts with hf://; write hf://owner/name or hf://owner/name/file.")
    require_package(f"--weights {location}", "huggingface_hub", "timm")
    return address


def no_state_dict(location: str) -> UsageError:
    """Return the error that says that the file at ``location`` has no weights that could be read."""
    return UsageError(
        f"--weights {location} holds no state_dict (it is damaged, or was saved with code in it, which is never "
        "run); save one with torch.save(model.state_dict(), FILE), or as safetensors."
    )


def _no_file(location: str) -> UsageError:
    """Return the error that says that ``location`` does not exist, or is a folder."""
    is_folder = "://" not in location and expanded_path(location).is_dir()
    problem = "that is a folder" if is_folder else "there is no such file"
    return UsageError(f"--weights {location}: {problem}; give {DEFAULT}, a file, an s3:// object or hf://owner/name.")


def to_safetensors(weights: Mapping[str, Tensor], classes: Sequence[str]) -> bytes:
    """Return the content of a safetensors file with ``weights``; its metadata hold the names of the classes as JSON.

    Example: ``Path("weights.safetensors").write_bytes(to_safetensors(model.state_dict(), ["cat", "dog"]))``
    """
    from safetensors.torch import save  # imports torch

    # Each tensor gets memory of its own, because the format cannot express shared weights.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return save(copies, {_CLASSES: json.dumps(list(classes)), "format": "pt"})


def from_safetensors(data: bytes) -> tuple[dict[str, Tensor] | None, tuple[str, ...] | None]:
    """Return the weights in a safetensors file, None if it is damaged, and their classes, None if it names none.

    Only classes that :func:`to_safetensors` has written are known.

    Example: ``weights, classes = from_safetensors(Path("weights.safetensors").read_bytes())``
    """
    from safetensors.torch import load

    try:
        weights = load(data)
    except SafetensorError:
        return None, None
    # The file begins with the length of its header, in 8 bytes, and the header, as JSON.
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        classes: object = json.loads(header.get("__metadata__", {})[_CLASSES])
    except (KeyError, ValueError, RecursionError):
        return weights, None
    return weights, tuple(cast(list[str], classes)) if matches(classes, list[str]) else None


def check_archive(data: bytes) -> None:
    """Raise ValueError if ``data`` is a zip archive, as torch writes them, that is damaged, or too large when unpacked.

    It is too large if it unpacks to over 10 times its size. torch itself allocates the sizes in the archive's
    directory before it reads the rest, and checks no CRCs: it would return weights with a flipped bit. Data of other
    formats pass.
    """
    if not data.startswith(ZIP):  # torch decides by the same bytes how to read the file
        return
    _check_directory(data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            unpacked = sum(entry.file_size for entry in entries)
            if unpacked > _MAX_RATIO * len(data):
                raise ValueError(f"it unpacks to {unpacked / 1e9:,.1f} GB, {unpacked / len(data):,.0f} times its size")
            # If there are two fields with sizes of 64 bits, Python may use the last one and torch the first one, which
            # may be larger.
            if any(_count_zip64(entry.extra) > 1 for entry in entries):
                raise ValueError("it is a damaged archive (it says the size of a part twice)")
            damaged = archive.testzip()
    except _DAMAGE as error:
        raise ValueError(f"it is a damaged archive ({error})") from None
    if damaged is not None:
        raise ValueError(f"it is a damaged archive (its part {damaged} is not what was written)")


def _check_directory(data: bytes) -> None:
    """Raise ValueError unless the directory of an archive is directly before its last record, as that record says.

    Python reads the directory that is directly before the last record, torch the one to which that record points. An
    archive with a harmless directory in one place and a huge one in the other would pass Python's check and be read by
    torch.
    """
    # The last two bytes of the last record are the length of a comment after it, which torch does not write. Size and
    # offset of the directory are at byte 12.
    end = len(data) - _END_BYTES
    if end < 0 or data[end : end + 4] != _END or data[-2:] != b"\0\0":
        raise ValueError("it is a damaged archive (its end is missing)")
    size, offset = struct.unpack_from("<II", data, end + 12)
    # Archives of more than 4 GB, and all of some versions of torch, have a larger last record before the small one, and
    # between them a locator, whose byte 8 begins the offset of the larger one.
    locator = end - _LOCATOR_BYTES
    if locator >= _END64_BYTES and data[locator : locator + 4] == _LOCATOR:
        end = locator - _END64_BYTES
        (end_by_locator,) = struct.unpack_from("<Q", data, locator + 8)
        if end_by_locator != end or data[end : end + 4] != _END64:
            raise ValueError("it is a damaged archive (its last record is not where it says)")
        size, offset = struct.unpack_from("<QQ", data, end + 40)
    if offset + size != end:
        raise ValueError("it is a damaged archive (its directory is not where its last record says)")


def _count_zip64(extra: bytes) -> int:
    """Return how many of an entry's extra fields hold sizes of 64 bits.

    A field is its kind and its size, in two bytes each, and ``size`` bytes.
    """
    count = position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, position)
        count += kind == _SIZES64
        position += 4 + size
    return count
