"""Bytes by name, in a folder or below an S3 prefix: one interface for images and for what a run leaves behind."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from raytrain.errors import UsageError

if TYPE_CHECKING:
    from raytrain.storage.credentials import CredentialSource

MAX_THREADS = 64
"""Requests that one process has under way at a time, over all of its stores."""


@dataclass(frozen=True)
class S3Settings:
    """Where S3 is, by the standard AWS configuration of the process that opened the store. Holds no secret."""

    endpoint_url: str | None = None
    """None is Amazon's own."""
    region: str | None = None
    """None is us-east-1."""


class StoredObject(NamedTuple):
    """One object or file, as a listing tells it."""

    path: str
    """Relative to the store's URL, with forward slashes."""
    size_bytes: int
    etag: str
    """Differs where the content differs: S3's ETag, or a file's size and time of change."""
    modified: datetime


class ObjectChanged(Exception):
    """An object is another one by now than it was when it was listed."""


class Store(ABC):
    """A folder or an S3 prefix. Paths are relative to ``url``. Can be pickled, and holds no secret.

    Every method raises StorageError, one sentence that says what to do, where storage refuses or is out of reach;
    requests that fail in passing (S3 is busy, a connection breaks, keys expire) are repeated before that.
    """

    url: str
    """``s3://bucket/prefix``, or the absolute path of a folder."""
    settings: S3Settings | None
    """How S3 is reached; None for a folder."""

    @abstractmethod
    def get(self, path: str, etag: str = "") -> bytes:
        """The content; raises FileNotFoundError where there is none, and Replaced where a listing's ``etag`` does not fit it."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write or replace an object. A reader sees the old one or all of the new one, never a part, whatever happens."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """All objects below the folder ``prefix``, in no order; none where there is no such folder."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove an object; nothing happens where there is none."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is an object of this name."""

    @abstractmethod
    def with_credentials(self, credentials: CredentialSource) -> Store:
        """The same place, entered with other credentials (a folder needs none)."""

    @abstractmethod
    def fail_fast(self) -> Store:
        """The same place for whoever must not wait: gives up within seconds where nothing answers."""

    @abstractmethod
    def check_readable(self) -> None:
        """Raise StorageError unless the store can be listed; knows within seconds, also where nothing answers."""

    @abstractmethod
    def check_writable(self) -> None:
        """Raise StorageError unless objects can be written and deleted; knows within seconds, also where nothing answers."""

    def get_many(self, paths: Sequence[str], etags: Sequence[str] = (), concurrency: int = MAX_THREADS) -> list[bytes | Exception]:
        """The contents in the order of ``paths``; where one cannot be read, the exception that :meth:`get` raises.

        ``etags`` are those that a listing told of ``paths``, or none.

        At most ``concurrency`` requests are under way at a time. Plain threads: obstore works outside the interpreter's
        lock, and a thread that waits for it takes half the CPU time that an asyncio task takes.
        """
        results: list[bytes | Exception] = [b""] * len(paths)
        remaining = iter(enumerate(zip(paths, etags or repeat(""), strict=bool(etags))))  # shared: whichever thread is free takes the next

        def work() -> None:
            for place, (path, etag) in remaining:
                results[place] = self._get_or_error(path, etag)

        workers = [threads().submit(work) for _ in range(min(concurrency, len(paths)))]
        for worker in workers:
            worker.result()
        return results

    def _get_or_error(self, path: str, etag: str) -> bytes | Exception:
        try:
            return self.get(path, etag)
        except Exception as error:
            return error


@cache
def threads() -> ThreadPoolExecutor:
    """This process's threads for requests; started once, because they serve many short calls."""
    return ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="storage")


def open_store(url: str, credentials: CredentialSource | None = None, settings: S3Settings | None = None) -> Store:
    """The store at ``url``: ``s3://bucket/prefix``, or the path of a folder. Nothing is asked of it yet.

    Args:
        url: where it is.
        credentials: asked for keys, again before they expire; by default this process's own AWS configuration.
        settings: where S3 is; by default by this process's own AWS configuration.

    Raises:
        UsageError: the URL is of another kind, or carries credentials.
        StorageError: the AWS configuration is broken.
    """
    if "://" not in url:
        from raytrain.storage.local import FolderStore

        return FolderStore(os.path.abspath(Path(url).expanduser()))
    _check_url(url)
    from raytrain.storage.credentials import resolve
    from raytrain.storage.s3 import (  # not above: a folder needs neither obstore nor botocore
        BucketStore,
        resolve_settings,
    )

    return BucketStore(url.rstrip("/"), settings or resolve_settings(url), credentials or resolve, uuid.uuid4().hex)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if "@" in parts.netloc:
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise UsageError(
            f"A URL must not carry credentials; write {place} and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile."
        )
    if parts.scheme != "s3":
        raise UsageError(f"{url!r} is not a place that can be read; give s3://bucket/prefix or a folder.")
    if not parts.netloc:
        raise UsageError(f"{url!r} names no bucket; write s3://bucket/prefix.")
    if "//" in url.removeprefix("s3://"):
        raise UsageError(f"{url!r} has two slashes side by side; write s3://bucket/prefix, with one between the names.")
