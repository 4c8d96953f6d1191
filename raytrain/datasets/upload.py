"""Copying a folder to S3: many files at a time, only what is not there yet, and looked at when all is done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from raytrain.errors import StorageError, UsageError
from raytrain.storage.base import Store, StoredObject, threads
from raytrain.storage.open import open_store

T = TypeVar("T")

_QUEUED = 4096  # files that wait for a thread: there may be millions


def upload(folder: str, url: str, console: Console | None = None) -> dict[str, Any]:
    """Copy the files below ``folder`` to ``url`` under the same names, with a progress bar; hidden files stay.

    A file that is there with the same content is not sent again, so that a copy which was interrupted goes on.

    Returns:
        folder, url, num_files, num_bytes (of all files) and num_sent (files sent this time).

    Raises:
        UsageError: ``url`` is no s3:// URL, or there is no file to copy.
        StorageError: one of both cannot be used, or a file did not arrive as it is.
    """
    if "://" not in url:
        raise UsageError(f"{url!r} is no place in S3; write s3://bucket/prefix.")
    source, target = open_store(folder), open_store(url)
    sizes_bytes = _sizes_of_files(source)
    target.check_writable()
    listed = {stored.path: stored for stored in target.list()}
    paths = sorted(sizes_bytes)
    sending = _concurrently(lambda path: _send(source, target, path, listed), paths)
    sent = list(track(sending, f"Uploading to {url}", total=len(paths), console=console or Console(stderr=True)))
    _check_arrived(source, target, paths)
    return {"folder": source.url, "url": target.url, "num_files": len(paths), "num_bytes": sum(sizes_bytes.values()), "num_sent": sum(sent)}


def _sizes_of_files(source: Store) -> dict[str, int]:
    source.check_readable()
    sizes_bytes = {stored.path: stored.size_bytes for stored in source.list() if not f"/{stored.path}".count("/.")}
    if not sizes_bytes:
        raise UsageError(f"There are no files in {source.url}; give the folder that holds the images.")
    return sizes_bytes


def _send(source: Store, target: Store, path: str, listed: Mapping[str, StoredObject]) -> bool:
    """Copy one file unless it is there; whether it was sent."""
    data = source.get(path)
    if _is_there(target, path, data, listed):
        return False
    target.put(path, data)
    return True


def _is_there(target: Store, path: str, data: bytes, listed: Mapping[str, StoredObject]) -> bool:
    """Whether the object has this content: its ETag says so where it is the content's MD5, else the content itself."""
    stored = listed.get(path)
    if stored is None or stored.size_bytes != len(data):
        return False
    return stored.etag.strip('"') == hashlib.md5(data, usedforsecurity=False).hexdigest() or target.get(path) == data


def _check_arrived(source: Store, target: Store, paths: Sequence[str]) -> None:
    listed = {stored.path: stored for stored in target.list()}
    arrived = _concurrently(lambda path: _is_there(target, path, source.get(path), listed), paths)
    missing = [path for path, is_there in zip(paths, arrived, strict=True) if not is_there]
    if missing:
        raise StorageError(
            f"{len(missing):,} of {len(paths):,} files are not in {target.url} as they are in {source.url}, such as {missing[0]}; "
            "run the command again, and leave the files as they are meanwhile."
        )


def _concurrently(work: Callable[[str], T], paths: Sequence[str]) -> Iterator[T]:
    """``work`` of each path, in order, on this process's threads for storage."""
    for start in range(0, len(paths), _QUEUED):
        yield from threads().map(work, paths[start : start + _QUEUED])
