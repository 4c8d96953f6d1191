"""Files of a bucket, kept on a disk of the machine, for all processes and runs on it.

An entry's name is a digest of what it is called in the bucket, with its ETag, so that no entry ever changes. It ends
with a checksum: a crash leaves at worst one that counts as missing. What a run has used itself is not removed for its
sake. So a part of a data set that is larger than the cache stays, while each file would go just before its next use.
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
from typing import Literal, NamedTuple, TypeVar

from raytrain.storage.locks import acquire

T = TypeVar("T")

_CHECKSUM_BYTES = 4
_MIN_GRANT_BYTES = 1 << 20
_GRANTS = 256  # a process looks what lies in the cache when it has written this part of the limit
_FREE_FRACTION = 0.05  # of the disk, which others need
_ABANDONED_AFTER_S = 3600.0
_NUM_TIMED, _TRY_EVERY = 64, 16
_UNFINISHED = "unfinished-"
_FOLDER_NAME, _ENTRY_NAME = re.compile("[0-9a-f]{2}"), re.compile("[0-9a-f]{38}")


@dataclass(frozen=True)
class DiskCache:
    """A folder with about ``limit_bytes`` of files, for all processes of a run; what is used since its start stays."""

    folder: str
    limit_bytes: int
    run_started_at: float

    def get(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        """The content of ``name``, from the disk or ``fetch``; a disk slower than that is asked every 16th time."""
        speed = _speed(self)
        if not _belongs_to_user(self.folder) or not speed.disk_is_worth_it():
            return speed.time("fetch", fetch)
        path = self._path(name)
        if (kept := speed.time("read", lambda: self._read(path))) is not None:
            return kept
        with nullcontext(False) if _room(self).closed else _turn(path) as waited:
            kept = self._read(path) if waited else None
            if kept is None:
                kept = speed.time("fetch", fetch)
                self._keep(path, kept)
            return kept

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return Path(self.folder, digest[:2], digest[2:40])

    def _read(self, path: Path) -> bytes | None:
        with suppress(OSError):
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_mtime < self.run_started_at:
                    os.utime(file.fileno())  # the time of the last run that used it
                data = file.read(max(status.st_size - _CHECKSUM_BYTES, 0))  # apart: a slice would copy it
                checksum = file.read()
            if checksum == _checksum(data):
                return data
            path.unlink()
        return None

    def _keep(self, path: Path, data: bytes) -> None:
        """Write an entry, unless there is no room for it, or the disk refuses."""
        if not _room(self).take(len(data) + _CHECKSUM_BYTES):
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            number, unfinished = tempfile.mkstemp(dir=self.folder, prefix=_UNFINISHED)
            try:
                with os.fdopen(number, "wb") as file:
                    file.write(data + _checksum(data))
                os.replace(unfinished, path)
            except BaseException:
                os.unlink(unfinished)
                raise
        except OSError:
            _room(self).closed = True


@contextmanager
def _turn(path: Path) -> Generator[bool]:
    """Let one process at a time fetch an entry: those that decode images of one shard want it at the same moment.

    Yields whether this one has waited for another. Threads of one process do not wait: the second one is there because
    the first one's request is slow.
    """
    if path in _fetched_here:
        yield False
        return
    _fetched_here.add(path)
    try:
        with ExitStack() as stack:
            waited = False
            with suppress(OSError):  # a disk that refuses costs a request at worst
                lock = path.parent.parent / f"{_UNFINISHED}{path.parent.name}{path.name}"
                waited = stack.enter_context(acquire(lock)).waited
            yield waited
    finally:
        _fetched_here.discard(path)


_fetched_here: set[Path] = set()


class _Entry(NamedTuple):
    used_at: float
    num_bytes: int
    path: str


class _Room:
    """How much this process may still write before it has to look again."""

    def __init__(self, disk: DiskCache) -> None:
        self._disk = disk
        self._grant_bytes = max(_MIN_GRANT_BYTES, disk.limit_bytes // _GRANTS)
        self._left_bytes = 0
        self.closed = False
        """Whether this process writes no more: there is no room, or the disk refuses."""
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> bool:
        """Whether there is room for so many bytes, which are then taken."""
        with self._lock:
            if self._left_bytes < num_bytes and not self.closed:
                self._left_bytes = max(self._grant_bytes, num_bytes) if self._make_room(num_bytes) else 0
                self.closed = not self._left_bytes
            if self.closed or self._left_bytes < num_bytes:
                return False
            self._left_bytes -= num_bytes
            return True

    def _make_room(self, num_bytes: int) -> bool:
        """Remove entries that no run has used for longest, until there is room; whether there is."""
        wanted = max(self._grant_bytes, num_bytes)
        try:
            too_many = kept_bytes(self._disk.folder) + wanted - self._disk.limit_bytes
            excess = max(too_many, wanted - usable_bytes(self._disk.folder))
            if excess <= 0:
                return True
            unused = sorted(each for each in _entries(self._disk.folder) if each.used_at < self._disk.run_started_at)
        except OSError:
            return False
        for each in unused:
            if excess <= 0:
                break
            with suppress(FileNotFoundError):  # another process removed it
                os.unlink(each.path)
            excess -= each.num_bytes
        return excess <= 0


class _Speed:
    """Whether reading from this disk takes less time than fetching, as this process sees it."""

    def __init__(self, _: DiskCache) -> None:
        self._timed = {"read": (0, 0.0), "fetch": (0, 0.0)}
        self._asked = 0

    def disk_is_worth_it(self) -> bool:
        """Whether to look at the disk at all."""
        self._asked += 1
        (num_read, read_s), (num_fetched, fetched_s) = self._timed.values()
        if min(num_read, num_fetched) < _NUM_TIMED:
            return True
        return read_s / num_read < fetched_s / num_fetched or self._asked % _TRY_EVERY == 0

    def time(self, what: Literal["read", "fetch"], get: Callable[[], T]) -> T:
        """What ``get`` returns, timed if that is something."""
        started = time.perf_counter()
        data = get()
        if data is not None:
            num, seconds = self._timed[what]
            self._timed[what] = num + 1, seconds + time.perf_counter() - started
        return data


_room, _speed = cache(_Room), cache(_Speed)  # one of each for each cache and process


def make_folder(folder: str) -> bool:
    """Make the folder of a cache; whether this user made it: what others put there must not become an image."""
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.lstat(folder).st_uid == os.stat(folder).st_uid == os.getuid()


@cache
def _belongs_to_user(folder: str) -> bool:
    with suppress(OSError):
        return make_folder(folder)
    return False


def kept_bytes(folder: str) -> int:
    """The size of a cache; 0 if there is none."""
    with suppress(OSError):
        return sum(each.num_bytes for each in _entries(folder))
    return 0


def _entries(folder: str) -> Iterator[_Entry]:
    """All entries, in no order. Removes unfinished ones that a process left behind, and touches nothing else."""
    for found in os.scandir(folder):
        if _FOLDER_NAME.fullmatch(found.name) and found.is_dir(follow_symlinks=False):
            yield from _entries_in(found.path)
        elif found.name.startswith(_UNFINISHED):
            with suppress(FileNotFoundError):
                if found.stat().st_mtime < time.time() - _ABANDONED_AFTER_S:
                    os.unlink(found.path)


def _entries_in(folder: str) -> Iterator[_Entry]:
    for found in os.scandir(folder):
        with suppress(FileNotFoundError):
            if _ENTRY_NAME.fullmatch(found.name):
                status = found.stat(follow_symlinks=False)
                yield _Entry(status.st_mtime, status.st_blocks * 512, found.path)


def usable_bytes(folder: str) -> int:
    """Free bytes of the disk that ``folder`` is on, but for a part that is left to others."""
    status = os.statvfs(folder)
    return int((status.f_bavail - _FREE_FRACTION * status.f_blocks) * status.f_frsize)


def _checksum(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(_CHECKSUM_BYTES, "little")
