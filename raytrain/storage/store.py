"""The storage interface: objects addressed by path, in a local folder or below a prefix of a bucket."""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from raytrain.storage.clouds.cloud import Cloud
from raytrain.storage.credentials import LentCredentials
from raytrain.storage.disk_cache import DiskCache
from raytrain.storage.retries_and_hedges import fetch_each

_OF_CHECK = re.compile(r"/\.(write|condition)-check-[0-9a-f]+$")


def shown_url(url: str) -> str:
    """Return ``url`` for an error sentence: for an object that only a check writes, the folder that is checked.

    Example: ``shown_url("s3://bucket/runs/.write-check-0a1b") == "s3://bucket/runs"``
    """
    return _OF_CHECK.sub("", url).rstrip("/")


class StoredObject(NamedTuple):
    """One object or file in a listing."""

    path: str  # relative to the store's URL, with forward slashes
    size_bytes: int
    etag: str  # changes if the content changes: S3's ETag, or a file's size and modification time
    modified: datetime


class ObjectChanged(Exception):
    """An object was replaced after it was listed or read. The argument is its URL."""


class Guard(Protocol):
    """The right of one owner at a time to write to a store: an object in the store names the owner. Can be pickled."""

    path: ClassVar[str]
    """The object that names the owner."""

    @property
    def takeover(self) -> int:
        """A number for names of objects that no earlier owner uses, whose last request may still be under way."""
        ...

    def check(self, content: bytes | None, url: str) -> None:
        """Raise OwnerChanged if the object ``path`` in the store ``url``, whose content is given, names another owner.

        Raise it also if ``content`` is None, because the object is gone.
        """


class Store(ABC):
    """A local folder or a prefix of a bucket. Paths are relative to ``url``. Can be pickled, and contains no secret.

    Every method raises StorageError, one sentence that says what to do, if storage refuses the request or cannot be
    reached. Transient failures (the cloud is busy, a connection breaks, credentials expire) are retried first.
    """

    url: str  # ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``, or the absolute path of a folder
    cloud: Cloud | None  # where the bucket is reached; None for a folder
    guard: Guard | None
    """The owner's right to write, checked before each attempt of a write or a deletion; None: anybody may write."""

    @abstractmethod
    def get(self, path: str, etag: str = "") -> bytes:
        """Return the content. Raises FileNotFoundError, or ObjectChanged if a listing's ``etag`` no longer matches."""

    @abstractmethod
    def get_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """Return at most ``num_bytes`` of the content, from byte ``start`` on. Raises FileNotFoundError."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write or replace an object atomically: a reader sees the old or the new content, never a part of it."""

    @abstractmethod
    def put_file(self, path: str, file: Path) -> None:
        """Write or replace an object by a file of this machine.

        A folder takes the file itself, which must be on the same disk: afterwards, it is gone from its old place. A
        bucket gets a copy.
        """

    @abstractmethod
    def put_if(self, path: str, data: bytes, expected: bytes | None) -> None:
        """Write an object if its content is ``expected``, or if it does not exist and ``expected`` is None.

        Raises ObjectChanged otherwise. Contents must be unique: an object that holds ``data`` counts as written by an
        earlier request whose answer was lost. A server may accept a write in spite of another one at the same moment:
        see :meth:`has_conditional_puts`.
        """

    @abstractmethod
    def has_conditional_puts(self) -> bool:
        """Return True if the server refuses one of two calls of :meth:`put_if` at the same moment."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        """Iterate over all objects below the folder ``prefix``, in no order. Empty if there is no such folder."""

    def folders_with(self, name: str, report: Callable[[str], object]) -> Sequence[str]:
        """Return the names of the folders directly below that hold an object called ``name``.

        A folder that cannot be read is left out, and ``report`` gets a sentence about it.
        """
        paths = (stored.path.split("/") for stored in self.list())
        return [parts[0] for parts in paths if len(parts) == 2 and parts[1] == name]

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete an object; do nothing if it does not exist."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Return whether the object exists."""

    @abstractmethod
    def guarded(self, guard: Guard) -> Store:
        """Return the same store with a guard: only the owner can write to it.

        In a folder, nobody can take over between the check and the write. In a bucket, a write that arrives after
        another owner's write to the same object is refused, if the server has conditional writes and the object has at
        most 16 MiB; larger objects must have ``guard.takeover`` in their names.
        """

    def kept_on(self, disk: DiskCache | None) -> Store:
        """Return the same store with a cache on a disk for the objects that :meth:`get` returns.

        Its objects must not change, unless they are read with an ETag.
        """
        return self

    def with_lent_credentials(self, lent: LentCredentials) -> Store:
        """Return the same store with the credentials that ``lent`` returns for its cloud; a folder needs none.

        In Amazon's S3, the credentials of the node's own role take precedence, if it has one.
        """
        return self

    def fail_fast(self) -> Store:
        """Return the same store for callers that must not wait: requests give up within seconds if nothing answers."""
        return self

    @abstractmethod
    def check_readable(self) -> None:
        """Raise StorageError unless the store can be listed. Takes only seconds, even if nothing answers."""

    def check_writable(self) -> None:
        """Raise StorageError unless objects can be written and deleted. Takes only seconds, even if nothing answers."""
        store, name = self.fail_fast(), f".write-check-{uuid.uuid4().hex}"
        store.put(name, b"")
        store.delete(name)

    def remove_if_empty(self) -> None:  # noqa: B027
        """Remove the folder if no file is left in it. There is nothing to do in a bucket, which has no folders."""

    def abort_uploads(self, should_abort: Callable[[str], bool], idle_s: float) -> None:  # noqa: B027
        """Remove what killed processes have left of objects that they were writing; no listing has it.

        In S3, these are multipart uploads of the objects whose paths ``should_abort`` accepts. If it refuses the
        requests, nothing happens, and no error is raised: a rule of the bucket may remove the parts. In a folder, they
        are unfinished files to which nobody has written for ``idle_s`` seconds, whatever objects they were to be. Other
        clouds keep nothing.
        """

    def get_many(self, paths: Sequence[str], etags: Sequence[str] = ()) -> list[bytes | Exception]:
        """Fetch many objects at once; return the content of each, or the exception of :meth:`get`, in their order."""
        contents: list[bytes | Exception] = [b""] * len(paths)
        for index, content in fetch_each(self.get, paths, etags):
            contents[index] = content
        return contents
