"""Files of a bucket, kept on a disk of the machine, for all processes and runs on it.

An entry's name is a digest of the object's name and its ETag, so that no entry ever changes. An entry ends with a
checksum: a crash leaves at worst an entry that counts as missing.

A run never evicts an entry that it has used itself, only those that were last used by earlier runs. With a plain
least-recently-used cache, a data set larger than the limit would lose each file shortly before its next use. This way
a fixed part of it stays cached, and the rest is fetched in each epoch.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from raytrain.storage.locks import acquire

_CHECKSUM_BYTES = 4
_MIN_GRANT_BYTES = 1 << 20
_GRANTS = 256  # after writing the 256th part of the limit, a process counts again how full the cache is
_FREE_FRACTION = 0.05  # of the disk, left to others
_ABANDONED_AFTER_S = 3600.0
_UNFINISHED = "unfinished-"
_FOLDER_NAME, _ENTRY_NAME = re.compile("[0-9a-f]{2}"), re.compile("[0-9a-f]{38}")


@dataclass(frozen=True)
class DiskCache:
    """A folder for about ``limit_bytes`` of files, shared by all processes of the machine.

    Files that were used since ``run_started_at`` (seconds since 1970) are never evicted.
    """

    folder: str
    limit_bytes: int
    run_started_at: float

    def get(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        """Return the content of ``name`` from the disk, or from ``fetch``, whose result is stored if there is room."""
        if not _belongs_to_user(self.folder):
            return fetch()
        digest = hashlib.sha256(name.encode()).hexdigest()
        path = Path(self.folder, digest[:2], digest[2:40])
        if (content := self._read(path)) is not None:
            return content
        # Another process may fetch the same entry now: wait for it, and read what it has written. But if this process
        # can write no more entries, the other one most likely cannot either, and nobody has to wait.
        turn = nullcontext(False) if _room(self).is_closed else _fetching_alone(path)
        with turn as has_waited:
            content = self._read(path) if has_waited else None
            if content is None:
                content = fetch()
                self._write(path, content)
            return content

    def _read(self, path: Path) -> bytes | None:
        """Return the content of an entry; None if there is none, or a damaged one, which is removed."""
        with suppress(OSError):
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_mtime < self.run_started_at:
                    os.utime(file.fileno())  # the time of the last run that used it
                # Read the content and its checksum separately, because a slice of both would copy the content.
                data = file.read(max(status.st_size - _CHECKSUM_BYTES, 0))
                checksum = file.read()
            if checksum == _checksum(data):
                return data
            path.unlink()
        return None

    def _write(self, path: Path, data: bytes) -> None:
        """Write an entry if there is room for it; if the disk refuses, this process writes no more entries."""
        if not _room(self).take(len(data) + _CHECKSUM_BYTES):
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, unfinished = tempfile.mkstemp(dir=self.folder, prefix=_UNFINISHED)
            try:
                with os.fdopen(number, "wb") as file:
                    file.writelines((data, _checksum(data)))
                os.replace(unfinished, path)
            except BaseException:
                os.unlink(unfinished)
                raise
        except OSError:
            _room(self).is_closed = True


@contextmanager
def _fetching_alone(path: Path) -> Generator[bool]:
    """Let one process at a time fetch an entry: processes that decode images of one shard want it at the same moment.

    Yields True if this process had to wait for another one. Threads of one process do not wait for each other: the
    second one is a hedge, a repeated request, because that of the first one is slow.
    """
    if path in _paths_being_fetched:
        yield False
        return
    _paths_being_fetched.add(path)
    try:
        with ExitStack() as stack:
            has_waited = False
            with suppress(OSError):  # without the lock, at worst a request is sent twice
                lock = path.parent.parent / f"{_UNFINISHED}{path.parent.name}{path.name}"
                has_waited = stack.enter_context(acquire(lock)).waited
            yield has_waited
    finally:
        _paths_being_fetched.discard(path)


_paths_being_fetched: set[Path] = set()  # of this process


class _Room:
    """The bytes that this process may still write before it counts the files in the cache again: the rest of a grant.

    Counting takes long, so a grant is larger than most files. Each process has one of its own, so all of them together
    may exceed the limit by some grants.
    """

    def __init__(self, disk: DiskCache) -> None:
        self._disk = disk
        self._grant_bytes = max(_MIN_GRANT_BYTES, disk.limit_bytes // _GRANTS)
        self._left_bytes = 0
        self.is_closed = False  # this process writes no more: there is no room, or the disk refuses
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Reserve room for ``num_bytes``; return False if there is none."""
        with self._lock:
            # Get a new grant, for which all files in the cache are counted, and give up the rest of the old one.
            if self._left_bytes < num_bytes and not self.is_closed:
                grant_bytes = max(self._grant_bytes, num_bytes)
                self._left_bytes = grant_bytes if self._make_room(grant_bytes) else 0
                self.is_closed = not self._left_bytes
            if self.is_closed or self._left_bytes < num_bytes:
                return False
            self._left_bytes -= num_bytes
            return True

    def _make_room(self, num_bytes: int) -> bool:
        """Make room for ``num_bytes`` by removing entries of earlier runs; return False if that is not enough."""
        try:
            over_limit_bytes = kept_bytes(self._disk.folder) + num_bytes - self._disk.limit_bytes
            excess_bytes = max(over_limit_bytes, num_bytes - usable_bytes(self._disk.folder))
            if excess_bytes <= 0:
                return True
            # Only entries that no current run has used, the least recently used first.
            unused = sorted(entry for entry in _entries(self._disk.folder) if entry.used_at < self._disk.run_started_at)
        except OSError:
            return False
        for entry in unused:
            if excess_bytes <= 0:
                break
            with suppress(FileNotFoundError):  # another process has removed it, so its room is free, too
                os.unlink(entry.path)
            excess_bytes -= entry.num_bytes
        return excess_bytes <= 0


_room = cache(_Room)  # one for each cache and process


class _Entry(NamedTuple):
    """A file in a cache, with the time at which a run last used it, in seconds since 1970, and its size on the disk."""

    used_at: float
    num_bytes: int
    path: str


def _entries(folder: str) -> Iterator[_Entry]:
    """Iterate over all entries, in no order. Remove unfinished ones of killed processes, and touch no other files."""
    for child in os.scandir(folder):
        if _FOLDER_NAME.fullmatch(child.name) and child.is_dir(follow_symlinks=False):
            for file in os.scandir(child.path):
                with suppress(FileNotFoundError):
                    if _ENTRY_NAME.fullmatch(file.name):
                        status = file.stat(follow_symlinks=False)
                        yield _Entry(status.st_mtime, status.st_blocks * 512, file.path)
        elif child.name.startswith(_UNFINISHED):
            with suppress(FileNotFoundError):
                if child.stat().st_mtime < time.time() - _ABANDONED_AFTER_S:
                    os.unlink(child.path)


def _checksum(data: bytes) -> bytes:
    """Return the CRC-32 that ends an entry with this content."""
    return zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little")


def make_folder(folder: str) -> bool:
    """Make the folder of a cache; return False if it belongs to another user, whose files must not become images.

    The same holds for another user's link. Raises OSError if the folder cannot be made.
    """
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.lstat(folder).st_uid == os.stat(folder).st_uid == os.getuid()


@cache
def _belongs_to_user(folder: str) -> bool:
    """Make the folder of a cache, once in a process; return False if that fails, or if it is another user's."""
    with suppress(OSError):
        return make_folder(folder)
    return False


def kept_bytes(folder: str) -> int:
    """Return the bytes that the entries of a cache take on the disk; 0 if there is no cache, or it cannot be read."""
    with suppress(OSError):
        return sum(entry.num_bytes for entry in _entries(folder))
    return 0


def usable_bytes(folder: str) -> int:
    """Return the free bytes of the disk that ``folder`` is on, without the part that is left to others."""
    status = os.statvfs(folder)
    return int((status.f_bavail - _FREE_FRACTION * status.f_blocks) * status.f_frsize)
