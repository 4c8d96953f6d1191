"""Storage in a local folder, or on a disk that all machines share."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import uuid
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from raytrain.errors import StorageError, UsageError
from raytrain.storage.base import ObjectChanged, Store, StoredObject
from raytrain.storage.credentials import CredentialSource
from raytrain.storage.error_sentences import explain

# put() writes to such a file and then renames it, and put_if() locks one. What is left of them is no object.
_NO_OBJECT = re.compile(r"\.[0-9a-f]{32}\.part$|\.lock$")


@dataclass(frozen=True)
class FolderStore(Store):
    """See :class:`Store`. ``url`` is an absolute path; the first :meth:`put` creates the folder."""

    url: str
    settings = None

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
            raise explain(error, f"{self.url}/{path}") from error

    def put(self, path: str, data: bytes) -> None:
        file = self._file(path)
        unfinished = f"{file}.{uuid.uuid4().hex}.part"
        with self._explained(path):
            os.makedirs(os.path.dirname(file), exist_ok=True)
            try:
                _write_to_disk(unfinished, data)
                os.replace(unfinished, file)
            except BaseException:
                Path(unfinished).unlink(missing_ok=True)
                raise

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
        with self._locked(name) as locked:
            return locked

    def append(self, path: str, data: bytes) -> None:
        with self._explained(path), open(self._file(path), "ab") as file:
            file.write(data)

    def truncate(self, path: str, num_bytes: int) -> None:
        with self._explained(path), suppress(FileNotFoundError):
            os.truncate(self._file(path), num_bytes)

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        with self._explained(prefix):
            if os.path.isdir(folder := self._file(prefix)):
                yield from self._walk(folder, set())

    def delete(self, path: str) -> None:
        with self._explained(path):
            Path(self._file(path)).unlink(missing_ok=True)

    def exists(self, path: str) -> bool:
        with self._explained(path):
            return os.path.isfile(self._file(path))

    def with_credentials(self, credentials: CredentialSource) -> FolderStore:
        return self

    def fail_fast(self) -> FolderStore:
        return self

    def check_readable(self) -> None:
        with self._explained(""):
            os.scandir(self.url).close()

    def check_writable(self) -> None:
        name = f".write-check-{uuid.uuid4().hex}"
        self.put(name, b"")
        self.delete(name)

    def remove_if_empty(self) -> None:
        with suppress(OSError):  # it is not empty
            os.rmdir(self.url)

    def _content(self, path: str) -> bytes | None:
        try:
            return self.get(path)
        except FileNotFoundError:
            return None

    @contextmanager
    def _locked(self, path: str) -> Generator[bool, None, None]:
        """Have the file ``path`` for this caller alone, on all machines; False on a disk that knows no locks."""
        file = f"{self._file(path)}.lock"
        with self._explained(path):
            os.makedirs(os.path.dirname(file), exist_ok=True)
            descriptor, locked = _open_locked(file)
            try:
                yield locked
            finally:
                Path(file).unlink(missing_ok=True)
                os.close(descriptor)

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
                if entry.is_dir():
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
    def _explained(self, path: str) -> Generator[None, None, None]:
        try:
            yield
        except OSError as error:
            raise explain(error, f"{self.url}/{path}".rstrip("/")) from error


def refuse_links_out(store: Store, paths: Sequence[str]) -> None:
    """Raise UsageError if links in a folder lead to files outside it, which are not meant to be copied elsewhere."""
    if not isinstance(store, FolderStore):
        return
    inside = os.path.join(os.path.realpath(store.url), "")
    real_folder = cache(os.path.realpath)

    def leads_out(path: str) -> bool:
        folder, name = os.path.split(os.path.join(store.url, path))
        file = os.path.join(real_folder(folder), name)
        return not (os.path.realpath(file) if os.path.islink(file) else file).startswith(inside)

    outside = [path for path in paths if leads_out(path)]
    if outside:
        raise UsageError(
            f"{len(outside):,} of {len(paths):,} files in {store.url} are links that lead out of it, such as "
            f"{outside[0]}; remove them, or copy what they lead to with cp -rL to a new folder and give that."
        )


def _open_at_once(file: str, flags: int) -> int:
    return os.open(file, flags | os.O_NONBLOCK)  # a pipe that nobody writes to would block


def _check_file(descriptor: int, url: str) -> None:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise StorageError(f"{url} is not a file but a pipe or a device; remove it.")


def _open_locked(file: str) -> tuple[int, bool]:
    """Open and lock ``file``; whether it could be locked. Waits for another process that has it."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # such as a network disk that was mounted without locks
            return descriptor, False
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(file)):
                return descriptor, True
        os.close(descriptor)  # whoever had it before has deleted it


def _write_to_disk(file: str, data: bytes) -> None:
    """Write a new file, and return when its content is on the disk."""
    with open(file, "xb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
