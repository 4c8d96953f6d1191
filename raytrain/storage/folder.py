"""Storage in a local folder, or on a disk that all machines share."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import re
import socket
import stat
import threading
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from raytrain.errors import StorageError, UsageError
from raytrain.storage.locks import FileLock, acquire
from raytrain.storage.store import Guard, ObjectChanged, Store, StoredObject

_log = logging.getLogger("raytrain")
_SAY_AFTER_S = 5.0
_NO_FOLDER = "lost+found"  # of a disk, which only root may read
# put() writes to such a file and then renames it, and put_if() locks one. What is left of them is no object.
_NO_OBJECT = re.compile(r"\.[0-9a-f]{32}\.part$|\.lock$")

_BY_ERRNO: dict[int, str] = {
    errno.ENOENT: "There is no folder {url}; check the path, on every machine that uses it.",
    errno.ENOTDIR: "{url} is below a file, not below a folder; check the path.",
    errno.EISDIR: "{url} is a folder, but should be a file; remove it or choose another place.",
    errno.EACCES: "This user has no permission for {url}; change the permissions or choose another place.",
    errno.EPERM: "This user has no permission for {url}; change the permissions or choose another place.",
    errno.EROFS: "{url} is on a read-only disk; choose another place.",
    errno.ENOSPC: "The disk of {url} is full; free space or choose another place.",
    errno.EDQUOT: "The disk quota for {url} is used up; free space or choose another place.",
}


@dataclass(frozen=True)
class FolderStore(Store):
    """See :class:`Store`. ``url`` is an absolute path; the first :meth:`put` creates the folder."""

    url: str
    cloud = None
    guard: Guard | None = field(default=None, compare=False)

    def get(self, path: str, etag: str = "") -> bytes:
        data = self.get_range(path, 0, -1)
        # Only the size: machines may have copies of the folder with other modification times.
        if etag and etag.partition("-")[0] != f"{len(data):x}":
            raise ObjectChanged(f"{self.url}/{path}")
        return data

    def get_range(self, path: str, start: int, num_bytes: int) -> bytes:
        try:
            with open(self._file(path), "rb", buffering=0, opener=_open_at_once) as file:
                _check_file(file.fileno(), f"{self.url}/{path}")
                file.seek(start)
                return file.readall() if num_bytes < 0 else file.read(num_bytes) or b""
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise FileNotFoundError(f"{self.url}/{path}") from None
        except OSError as error:
            raise explain_os_error(error, f"{self.url}/{path}") from error

    def put(self, path: str, data: bytes) -> None:
        file = self._file(path)
        unfinished = f"{file}.{uuid.uuid4().hex}.part"
        self._check_owner()
        with self._explained(path):
            os.makedirs(os.path.dirname(file), exist_ok=True)
            try:
                _write_to_disk(unfinished, data)
                with self._as_owner():
                    os.replace(unfinished, file)
            except BaseException:
                Path(unfinished).unlink(missing_ok=True)
                raise

    def put_file(self, path: str, file: Path) -> None:
        with self._explained(path), self._as_owner():
            os.replace(file, self._file(path))

    def put_if(self, path: str, data: bytes, expected: bytes | None) -> None:
        with self._locked(path):
            found = self._content(path)
            if found == data:
                return
            if found != expected:
                raise ObjectChanged(f"{self.url}/{path}")
            self.put(path, data)

    def has_conditional_puts(self) -> bool:
        name = f".condition-check-{uuid.uuid4().hex}"
        with self._locked(name) as lock:
            return lock.exclusive

    def append(self, path: str, data: bytes) -> None:
        """Add to the end of a file, or create it; an object of a bucket cannot grow."""
        with self._explained(path), self._as_owner(), open(self._file(path), "ab") as file:
            file.write(data)

    def truncate(self, path: str, num_bytes: int) -> None:
        """Keep the first ``num_bytes`` of a file, if it exists."""
        with self._explained(path), self._as_owner(), suppress(FileNotFoundError):
            os.truncate(self._file(path), num_bytes)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        try:
            if os.path.isdir(folder := self._file(prefix)):
                yield from self._walk(folder, set())
        except OSError as error:
            raise explain_os_error(error, error.filename or self._file(prefix)) from error

    def delete(self, path: str) -> None:
        with self._explained(path), self._as_owner():
            Path(self._file(path)).unlink(missing_ok=True)

    def exists(self, path: str) -> bool:
        with self._explained(path):
            return os.path.isfile(self._file(path))

    def guarded(self, guard: Guard) -> FolderStore:
        return dataclasses.replace(self, guard=guard)

    def check_readable(self) -> None:
        with self._explained(""):
            os.scandir(self.url).close()

    def remove_if_empty(self) -> None:
        self._check_owner()
        with suppress(OSError):  # it is not empty
            os.rmdir(self.url)

    def _content(self, path: str) -> bytes | None:
        try:
            return self.get(path)
        except FileNotFoundError:
            return None

    def _check_owner(self) -> None:
        if self.guard is not None:
            self.guard.check(self._content(self.guard.path), self.url)

    @contextmanager
    def _as_owner(self) -> Generator[None]:
        """Write as the owner, whom nobody replaces meanwhile: that needs the same lock."""
        self._check_owner()  # first without the lock, whose file would make the folder of a run that was deleted
        if self.guard is None:
            yield
            return
        with self._locked(self.guard.path):
            self._check_owner()
            yield

    @contextmanager
    def _locked(self, path: str) -> Generator[FileLock]:
        """Have the file ``path`` for this caller alone, on all machines, unless the disk knows no locks."""
        file = f"{self._file(path)}.lock"
        with self._explained(path):
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with _lock(file) as lock:
                yield lock

    def _file(self, path: str) -> str:
        return os.path.join(self.url, path.strip("/"))

    def _walk(self, folder: str, parents: set[tuple[int, int]]) -> Iterator[StoredObject]:
        """Iterate over all files in ``folder``. Follows links, except to a folder that contains ``folder``."""
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in parents:
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir() and entry.name != _NO_FOLDER:
                    yield from self._walk(entry.path, parents | {here})
                elif entry.is_file() and not _NO_OBJECT.search(entry.name):
                    with suppress(FileNotFoundError):  # deleted since it was listed
                        yield self._stored(entry)

    def _stored(self, entry: os.DirEntry[str]) -> StoredObject:
        status = entry.stat()
        return StoredObject(
            path=entry.path[len(self.url.rstrip("/")) + 1 :],
            size_bytes=status.st_size,
            etag=f"{status.st_size:x}-{status.st_mtime_ns:x}",
            modified=datetime.fromtimestamp(status.st_mtime, timezone.utc),
        )

    @contextmanager
    def _explained(self, path: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise explain_os_error(error, f"{self.url}/{path}".rstrip("/")) from error


def _lock(file: str) -> FileLock:
    """Lock ``file``, and note in it who has done so. A wait that takes long is told, and for whom."""
    try:
        lock = acquire(file, wait=False)
    except BlockingIOError:
        telling = threading.Timer(_SAY_AFTER_S, _tell_holder, (file,))
        telling.start()
        try:
            lock = acquire(file)
        finally:
            telling.cancel()
    with suppress(OSError):  # the disk may be full
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return lock


def _tell_holder(file: str) -> None:
    holder = ""
    with suppress(OSError, ValueError):
        holder = Path(file).read_text()
    _log.warning(
        "waiting for %s, which writes to %s; if it is halted, let it continue (kill -CONT) or end it",
        holder or "another process",
        os.path.dirname(file),
    )


def explain_os_error(error: OSError, url: str) -> StorageError:
    """Return a StorageError that says in one sentence what went wrong at ``url`` and what to do."""
    sentence = _BY_ERRNO.get(error.errno or 0, "{url} cannot be used: {detail}.")
    return StorageError(sentence.format(url=url, detail=error.strerror or error))


def links_out(store: Store, paths: Sequence[str]) -> list[str]:
    """Those of ``paths`` that links in a folder lead to, outside of it; empty for a bucket."""
    if not isinstance(store, FolderStore):
        return []
    inside = os.path.join(os.path.realpath(store.url), "")
    real_folder = cache(os.path.realpath)

    def leads_out(path: str) -> bool:
        folder, name = os.path.split(os.path.join(store.url, path))
        file = os.path.join(real_folder(folder), name)
        return not (os.path.realpath(file) if os.path.islink(file) else file).startswith(inside)

    return [path for path in paths if leads_out(path)]


def refuse_links_out(store: Store, paths: Sequence[str]) -> None:
    """Raise UsageError if links in a folder lead to files outside it, which are not meant to be copied elsewhere."""
    if outside := links_out(store, paths):
        raise UsageError(
            f"{len(outside):,} of {len(paths):,} files in {store.url} are links that lead out of it, such as "
            f"{outside[0]}; remove them, or copy what they lead to with cp -rL to a new folder and give that."
        )


def _open_at_once(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would block


def _check_file(descriptor: int, url: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise StorageError(f"{url} is not a file but a pipe or a device; remove it.")


def _write_to_disk(file: str, data: bytes) -> None:
    """Write a new file, and return when its content is on the disk."""
    with open(file, "xb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())


def dead_ends(store: Store) -> list[str]:
    """What :meth:`Store.list` leaves out of a folder: links that lead nowhere, and empty folders, with a slash."""
    found = _dead_ends(store.url) if isinstance(store, FolderStore) else ()
    return [path for each in found if (path := each[len(store.url.rstrip("/")) + 1 :])]


def _dead_ends(folder: str) -> Iterator[str]:
    with os.scandir(folder) as scan:
        entries = list(scan)
    if not entries:
        yield f"{folder}/"
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and entry.name != _NO_FOLDER:
            yield from _dead_ends(entry.path)
        elif entry.is_symlink() and not os.path.exists(entry.path):
            yield entry.path
