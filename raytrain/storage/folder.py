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
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from raytrain.errors import StorageError, UsageError
from raytrain.storage.locks import FileLock, acquire
from raytrain.storage.retries_and_hedges import RetryPolicy, with_retries
from raytrain.storage.store import Guard, ObjectChanged, Store, StoredObject, shown_url

T = TypeVar("T")

_log = logging.getLogger("raytrain")
REPORT_AFTER_S = 5.0
_UNTIL_CLOSED = RetryPolicy(20, 30.0)  # for opening a file: until others are closed, if this process has too many open
_MAX_REMOVALS = 20  # times that others may remove a folder while a file is opened in it
_LOST_AND_FOUND = "lost+found"  # a folder at the root of a disk, which only root may read
# Files that are no objects: put() writes a .part and renames it, put_if() locks a .lock. Killed processes leave some.
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.part")
_NO_OBJECT = re.compile(rf"{_UNFINISHED.pattern}$|\.lock$")

TOO_MANY_FILES = (
    "{url} cannot be used, because this process has as many files open as it may; raise the limit (ulimit -n)."
)
_BY_ERRNO: dict[int, str] = {
    errno.ENOENT: "There is no folder {url}; check the path, on every machine that uses it.",
    errno.ENOTDIR: "{url} is below a file, not below a folder; check the path.",
    errno.EEXIST: "{url} is below a file, not below a folder; check the path.",
    errno.EISDIR: "{url} is a folder, but should be a file; remove it or choose another place.",
    errno.EACCES: "This user has no permission for {url}; change the permissions or choose another place.",
    errno.EPERM: "This user has no permission for {url}; change the permissions or choose another place.",
    errno.EROFS: "{url} is on a read-only disk; choose another place.",
    errno.ENOSPC: "The disk of {url} is full; free space or choose another place.",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), TOO_MANY_FILES),
    errno.EDQUOT: "The disk quota for {url} is used up; free space or choose another place.",
}
_UNWRITABLE: dict[int, str] = {  # sentences about a whole folder, where they differ from those about a file in it
    errno.ENOENT: "{url} cannot be written: no folder and no file can be made there; choose another place.",
    errno.EEXIST: "{url} is a file, but should be a folder; remove it or choose another place.",
    errno.EACCES: "This user has no permission to write to {url}; change the permissions or choose another place.",
    errno.EPERM: "This user has no permission to write to {url}; change the permissions or choose another place.",
}


@dataclass(frozen=True)
class FolderStore(Store):
    """See :class:`Store`. ``url`` is an absolute path; the first :meth:`put` creates the folder."""

    url: str
    cloud = None
    guard: Guard | None = field(default=None, compare=False)

    def get(self, path: str, etag: str = "") -> bytes:
        data = self.get_range(path, 0, -1)  # -1: to the end
        # A file's ETag is its size in hexadecimal, a dash and its modification time; see list. Compare only the
        # size: machines may have copies of the folder with other modification times.
        listed_size = etag.partition("-")[0]
        if etag and listed_size != f"{len(data):x}":
            raise ObjectChanged(f"{self.url}/{path}")
        return data

    def get_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """See :meth:`Store.get_range`. A negative ``num_bytes`` stands for all bytes from ``start`` on."""

        def open_at_once(file: str, flags: int) -> int:
            return os.open(file, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would block

        try:
            open_file = partial(open, self._file(path), "rb", buffering=0, opener=open_at_once)
            with with_retries(open_file, _UNTIL_CLOSED, has_too_many_files) as file:
                info = os.fstat(file.fileno())
                if not stat.S_ISREG(info.st_mode):
                    raise StorageError(f"{self.url}/{path} is not a file but a pipe or a device; remove it.")
                # A file with a hole in it may have any size. To ask for that much memory would end the command.
                if num_bytes < 0 and info.st_size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
                    raise StorageError(
                        f"{self.url}/{path} has {info.st_size:,} bytes, more than this machine's memory; remove it."
                    )
                file.seek(start)
                return file.readall() if num_bytes < 0 else file.read(num_bytes) or b""
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise FileNotFoundError(f"{self.url}/{path}") from None
        except OSError as error:
            raise explain_os_error(error, f"{self.url}/{path}") from error

    def put(self, path: str, data: bytes) -> None:
        name = self._file(path)
        # The name of the unfinished file does not begin with ``name``, which may be as long as the disk allows.
        unfinished = os.path.join(os.path.dirname(name), f".{uuid.uuid4().hex}.part")
        self._check_owner()
        with self._explained(path):
            opened = _opened_below(os.path.dirname(name), partial(open, unfinished, "xb"))
            try:
                # The content is on the disk before the name, so that after a crash no name stands for half a file.
                with opened as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                with self._as_owner():
                    os.replace(unfinished, name)
            except BaseException:
                Path(unfinished).unlink(missing_ok=True)
                raise

    def put_file(self, path: str, file: Path) -> None:
        with self._explained(path), self._as_owner():
            os.replace(file, self._file(path))

    def put_if(self, path: str, data: bytes, expected: bytes | None) -> None:
        # Without its folder, the object cannot be as expected. The file of the lock would bring back the folder of a
        # deleted run.
        if expected is not None and not os.path.lexists(self.url):
            raise ObjectChanged(f"{self.url}/{path}")
        with self._locked(path):
            content = self._content(path)
            if content == data:
                return
            if content != expected:
                raise ObjectChanged(f"{self.url}/{path}")
            self.put(path, data)

    def has_conditional_puts(self) -> bool:
        name = f".condition-check-{uuid.uuid4().hex}"
        with self._locked(name) as lock:  # put_if holds such a lock
            return lock.exclusive

    def append(self, path: str, data: bytes) -> None:
        """Add to the end of a file, or create it. Only folders have this method: an object of a bucket cannot grow."""
        open_file = partial(open, self._file(path), "ab")
        with (
            self._explained(path),
            self._as_owner(),
            with_retries(open_file, _UNTIL_CLOSED, has_too_many_files) as file,
        ):
            file.write(data)

    def truncate(self, path: str, num_bytes: int) -> None:
        """Keep only the first ``num_bytes`` of a file, if it exists."""
        with self._explained(path), self._as_owner(), suppress(FileNotFoundError):
            os.truncate(self._file(path), num_bytes)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        try:
            if not _is_of_kind(folder := self._file(prefix), stat.S_ISDIR):
                return
            for path, status in _walk(folder):
                if status is not None and stat.S_ISREG(status.st_mode) and not _NO_OBJECT.search(path):
                    yield StoredObject(
                        path=path[len(self.url.rstrip("/")) + 1 :],
                        size_bytes=status.st_size,
                        etag=f"{status.st_size:x}-{status.st_mtime_ns:x}",
                        modified=datetime.fromtimestamp(status.st_mtime, timezone.utc),
                    )
        except OSError as error:
            raise explain_os_error(error, error.filename or self._file(prefix)) from error

    def folders_with(self, name: str, report: Callable[[str], object]) -> Sequence[str]:
        # Look at one level only, so that trouble deep in one folder does not hide the others.
        try:
            folders = os.listdir(self.url) if os.path.lexists(self.url) else []
        except OSError as error:
            raise explain_os_error(error, self.url) from error
        folders_with_name: list[str] = []
        for folder in folders:
            try:
                if stat.S_ISREG(os.stat(os.path.join(self.url, folder, name)).st_mode):
                    folders_with_name.append(folder)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if folder != _LOST_AND_FOUND:
                    report(f"left out: {explain_os_error(error, f'{self.url}/{folder}')}")
        return folders_with_name

    def delete(self, path: str) -> None:
        with self._explained(path), self._as_owner():
            Path(self._file(path)).unlink(missing_ok=True)

    def exists(self, path: str) -> bool:
        with self._explained(path):
            return _is_of_kind(self._file(path), stat.S_ISREG)

    def guarded(self, guard: Guard) -> FolderStore:
        return dataclasses.replace(self, guard=guard)

    def check_readable(self) -> None:
        with self._explained(""):
            os.scandir(self.url).close()

    def check_writable(self) -> None:
        try:
            super().check_writable()
        except StorageError as error:
            if not isinstance(cause := error.__cause__, OSError):
                raise
            # Name the folder, which the user can mend, and not the file that the check tried to write.
            if sentence := _UNWRITABLE.get(cause.errno or 0):
                raise StorageError(sentence.format(url=self.url)) from cause
            raise explain_os_error(cause, self.url) from cause

    def remove_if_empty(self) -> None:
        self._check_owner()
        for folder, _, _ in os.walk(self.url, topdown=False):
            with suppress(OSError):  # it is not empty
                os.rmdir(folder)

    def abort_uploads(self, should_abort: Callable[[str], bool], idle_s: float) -> None:
        with suppress(OSError):  # the folder is gone
            # Times on this disk are compared with each other, as its clock may differ from this machine's: a file that
            # the caller has just put into the folder has set the time of the folder.
            now = os.stat(self.url).st_mtime
            for folder, _, names in os.walk(self.url):
                for unfinished in (os.path.join(folder, name) for name in names if _UNFINISHED.fullmatch(name)):
                    with suppress(OSError):  # its writer has renamed it meanwhile
                        if now - os.lstat(unfinished).st_mtime >= idle_s:
                            os.unlink(unfinished)

    def _content(self, path: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        try:
            return self.get(path)
        except FileNotFoundError:
            return None

    def _check_owner(self) -> None:
        """Raise OwnerChanged if the store has a guard, and its file names another owner."""
        if self.guard is not None:
            self.guard.check(self._content(self.guard.path), self.url)

    @contextmanager
    def _as_owner(self) -> Generator[None]:
        """Hold the lock that a new owner would need, so that the owner is not replaced during a write.

        Raises OwnerChanged if the store has another owner. Without a guard, no lock is needed.
        """
        self._check_owner()  # first without the lock, whose file would bring back the folder of a deleted run
        if self.guard is None:
            yield
            return
        with self._locked(self.guard.path):
            self._check_owner()
            yield

    @contextmanager
    def _locked(self, path: str) -> Generator[FileLock]:
        """Lock the file ``path`` for this caller, on all machines, unless the disk knows no locks.

        The lock is a file beside it, into which this process writes its name: others that wait for long report that.
        """
        name = f"{self._file(path)}.lock"
        with self._explained(path), _opened_below(os.path.dirname(name), lambda: _acquire_or_report(name)) as lock:
            with suppress(OSError):  # the disk may be full
                os.ftruncate(lock.descriptor, 0)
                os.pwrite(lock.descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            yield lock

    def _file(self, path: str) -> str:
        """Return the name of the file, or of the folder, that holds ``path``."""
        return os.path.join(self.url, path.strip("/"))

    @contextmanager
    def _explained(self, path: str) -> Generator[None]:
        """Raise every OSError as a StorageError that says what is wrong with ``path``."""
        try:
            yield
        except OSError as error:
            raise explain_os_error(error, shown_url(f"{self.url}/{path}")) from error


def _walk(
    folder: str, parents: frozenset[tuple[int, int]] = frozenset()
) -> Iterator[tuple[str, os.stat_result | None]]:
    """Iterate over the files below ``folder``, and whatever else there is no folder: yield each path and its status.

    Of a link, the status is that of what it leads to; None if that is nothing: the link is broken, or leads to itself.
    It is None, too, for what was deleted since it was listed. A folder is yielded itself only if it is empty. Links are
    followed, except to a folder that contains ``folder``: ``parents`` are the devices and inodes of those above.
    """
    folder_status = os.stat(folder)
    identity = (folder_status.st_dev, folder_status.st_ino)
    if identity in parents:
        return
    is_empty = True
    with os.scandir(folder) as entries:  # not as a list: a folder may have millions
        for entry in entries:
            is_empty = False
            try:
                status = entry.stat()
            except FileNotFoundError:
                status = None
            except OSError as error:
                if error.errno != errno.ELOOP:
                    raise
                status = None
            if status is None or not stat.S_ISDIR(status.st_mode):
                yield entry.path, status
            elif entry.name != _LOST_AND_FOUND:
                yield from _walk(entry.path, parents | {identity})
    if is_empty:
        yield folder, folder_status


def _is_of_kind(path: str, is_kind: Callable[[int], bool]) -> bool:
    """Return True if something of a kind is at ``path``: a file for ``stat.S_ISREG``, a folder for ``stat.S_ISDIR``.

    Raises OSError if the system does not say, as in a folder that this user may not enter: os.path.isfile would return
    False.
    """
    try:
        return is_kind(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _opened_below(folder: str, open_file: Callable[[], T]) -> T:
    """Make ``folder``, and return the result of ``open_file``, which opens a file there.

    Another process may remove the folder meanwhile because it is empty; then make it again. If this process has as many
    files open as it may, wait: other threads will close theirs soon.
    """
    for _ in range(_MAX_REMOVALS):
        os.makedirs(folder, exist_ok=True)
        with suppress(FileNotFoundError):
            return with_retries(open_file, _UNTIL_CLOSED, has_too_many_files)
    return open_file()


def has_too_many_files(error: BaseException) -> bool:
    """Return True if this process or machine has as many files open as it may (EMFILE, ENFILE)."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


def _acquire_or_report(file: str) -> FileLock:
    """Wait for the lock ``file``; after 5 s, report which process holds it, because that may be halted."""
    try:
        return acquire(file, wait=False)
    except BlockingIOError:
        report = threading.Timer(REPORT_AFTER_S, _report_holder, (file,))
        report.start()
        try:
            return acquire(file)
        finally:
            report.cancel()


def _report_holder(file: str) -> None:
    """Log that this process waits for another one, which has locked ``file`` and written its name there."""
    holder = ""
    with suppress(OSError, ValueError):
        holder = Path(file).read_text()
    _log.warning(
        "waiting for %s, which writes to %s; if it is halted, let it continue (kill -CONT) or end it",
        holder or "another process",
        os.path.dirname(file),
    )


def explain_os_error(error: OSError, url: str) -> StorageError:
    """Return a StorageError that says in one sentence what went wrong at ``url``, and, if that is known, what to do."""
    sentence = _BY_ERRNO.get(error.errno or 0, "{url} cannot be used: {detail}.")
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and os.path.isfile(url):
        sentence = "{url} is a file, but should be a folder; check the path."
    return StorageError(sentence.format(url=url, detail=error.strerror or error))


def links_out(store: Store, paths: Sequence[str]) -> list[str]:
    """Return those of ``paths`` that lead out of the folder of ``store`` through links; none for a bucket."""
    if not isinstance(store, FolderStore):
        return []
    inside = os.path.join(os.path.realpath(store.url), "")
    real_folder = cache(os.path.realpath)

    def leads_out(path: str) -> bool:
        # The links of a folder are resolved once for all of its files, and those of a file only if it is one.
        folder, name = os.path.split(os.path.join(store.url, path))
        file = os.path.join(real_folder(folder), name)
        return not (os.path.realpath(file) if os.path.islink(file) else file).startswith(inside)

    return [path for path in paths if leads_out(path)]


def refuse_links_out(store: Store, paths: Sequence[str]) -> None:
    """Raise UsageError if links in a folder lead out of it: those files may not be meant to be copied."""
    if outside := links_out(store, paths):
        raise UsageError(
            f"{len(outside):,} of {len(paths):,} files in {store.url} are links that lead out of it, such as "
            f"{outside[0]}; remove them, or copy what they lead to with cp -rL to a new folder and give that."
        )


class DeadEnd(NamedTuple):
    """Something in a folder that is no file and leads to none."""

    path: str
    kind: Literal["link", "empty folder", "pipe or device"]


def dead_ends(store: Store) -> list[DeadEnd]:
    """Return what :meth:`Store.list` leaves out: broken links, empty folders, and pipes, sockets and devices."""
    ends: list[DeadEnd] = []
    start = len(store.url.rstrip("/")) + 1
    for path, status in _walk(store.url) if isinstance(store, FolderStore) else ():
        if status is None and os.path.islink(path):  # without a link, it was deleted since it was listed
            ends.append(DeadEnd(path[start:], "link"))
        elif status is not None and not stat.S_ISREG(status.st_mode):
            ends.append(DeadEnd(path[start:], "empty folder" if stat.S_ISDIR(status.st_mode) else "pipe or device"))
    return [end for end in ends if end.path]
