"""Copy a folder to a bucket: many files at a time, only those that are missing, and verified at the end."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from raytrain.data.labels.listing import DOTTED, counted, is_hidden, why_left_out
from raytrain.errors import StorageError, UsageError
from raytrain.storage.folder import refuse_links_out
from raytrain.storage.open import URL_FORMS, open_store
from raytrain.storage.retries_and_hedges import request_threads
from raytrain.storage.store import Store, StoredObject

T = TypeVar("T")

_log = logging.getLogger("raytrain")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f]")
_MAX_QUEUED = 4096  # files that wait for a thread, of perhaps millions


@dataclass(frozen=True)
class UploadResult:
    """The result of :func:`upload`."""

    folder: str
    url: str
    num_files: int
    num_bytes: int  # of all files
    num_sent: int  # files sent this time


def upload(folder: str, url: str, console: Console | None = None) -> UploadResult:
    """Copy the files below ``folder`` to ``url`` under the same names, except hidden files, and show a progress bar.

    A file that is already there with the same content is not sent again, so that an interrupted upload can be resumed.
    ``console`` shows the progress bar; by default standard error.

    Raises:
        UsageError: ``url`` is not that of a bucket, there is no file to copy, or a link leads out of the folder.
        StorageError: the folder or the bucket cannot be used, or a file did not arrive unchanged.

    Example: ``upload("photos", "s3://bucket/photos").num_sent``
    """
    if "://" not in url:
        raise UsageError(f"{url!r} is not the URL of a bucket; write {URL_FORMS}.")
    source, target = open_store(folder), open_store(url)

    # Copy all files but hidden ones. A link must not lead out of the folder, because its target may be a secret.
    source.check_readable()
    listed_files = list(source.list())
    sizes_bytes = {stored.path: stored.size_bytes for stored in listed_files if not is_hidden(stored.path)}
    if num_dotted := sum(why_left_out(stored.path) == DOTTED for stored in listed_files):
        _log.warning("Not copied from %s: %s.", source.url, counted(num_dotted, DOTTED))
    paths = sorted(sizes_bytes)
    if not paths:
        raise UsageError(f"There are no files in {source.url}; give the folder that contains the images.")
    if unusable := [path for path in paths if _CONTROL_CHARACTER.search(path)]:
        raise UsageError(
            f"{len(unusable):,} of {len(paths):,} files in {source.url} have names that a bucket cannot have, "
            f"such as {unusable[0]!r}; rename them."
        )
    refuse_links_out(source, paths)
    target.check_writable()

    # Send what the bucket lacks; objects with the same content stay. ``send`` returns whether it has sent a file.
    listed = {stored.path: stored for stored in target.list()}

    def send(path: str) -> bool:
        data = source.get(path)
        if _has_content(target, path, data, listed):
            return False
        target.put(path, data)
        return True

    console = console or Console(stderr=True)
    in_notebook = console.is_jupyter  # a notebook would keep each frame of the progress bar
    sent = _map_in_threads(send, paths)
    num_sent = sum(track(sent, f"Uploading to {url}", total=len(paths), console=console, disable=in_notebook))

    # Compare everything once more with a new listing of the bucket.
    arrived = {stored.path: stored for stored in target.list()}
    has_arrived = _map_in_threads(lambda path: _has_content(target, path, source.get(path), arrived), paths)
    missing = [path for path, is_there in zip(paths, has_arrived, strict=True) if not is_there]
    if missing:
        raise StorageError(
            f"{len(missing):,} of {len(paths):,} files in {target.url} differ from those in {source.url} or are "
            f"missing, such as {missing[0]}; run the command again, and do not change the files meanwhile."
        )
    return UploadResult(source.url, target.url, len(paths), sum(sizes_bytes.values()), num_sent)


def _has_content(target: Store, path: str, data: bytes, listed: Mapping[str, StoredObject]) -> bool:
    """Return True if the object's content is ``data``: by its ETag if that is an MD5, else by fetching the object.

    ``listed`` has the objects of the bucket by path.
    """
    stored = listed.get(path)
    if stored is None or stored.size_bytes != len(data):
        return False
    return stored.etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest() or target.get(path) == data


def _map_in_threads(work: Callable[[str], T], paths: Sequence[str]) -> Iterator[T]:
    """Call ``work`` for each path in this process's request threads; yield the results in order."""
    for start in range(0, len(paths), _MAX_QUEUED):
        yield from request_threads().map(work, paths[start : start + _MAX_QUEUED])
