"""Storage in a folder of this machine, or on a disk that all machines share."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from raytrain.storage.base import ObjectChanged, Store, StoredObject
from raytrain.storage.credentials import CredentialSource
from raytrain.storage.errors import explain

# What put() writes to before it renames; one that a killed process left behind is no object.
_UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.part$")


@dataclass(frozen=True)
class FolderStore(Store):
    """See :class:`Store`. ``url`` is an absolute path; the folder is made by the first :meth:`put`."""

    url: str
    settings = None

    def get(self, path: str, etag: str = "") -> bytes:
        try:
            with open(self._file(path), "rb", buffering=0) as file:
                data = file.readall()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise FileNotFoundError(f"{self.url}/{path}") from None
        except OSError as error:
            raise explain(error, f"{self.url}/{path}") from error
        # The size alone: machines may have copies of the folder, made at other times.
        if etag and etag.partition("-")[0] != f"{len(data):x}":
            raise ObjectChanged(f"{self.url}/{path}")
        return data

    def put(self, path: str, data: bytes) -> None:
        file = self._file(path)
        unfinished = f"{file}.{uuid.uuid4().hex}.part"
        with self._explained(path):
            os.makedirs(os.path.dirname(file), exist_ok=True)
            try:
                _write_through(unfinished, data)
                os.replace(unfinished, file)
            except BaseException:
                Path(unfinished).unlink(missing_ok=True)
                raise

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        with self._explained(prefix):
            if os.path.isdir(top := self._file(prefix)):
                yield from self._below(top, set())

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

    def _file(self, path: str) -> str:
        return os.path.join(self.url, path.strip("/"))

    def _below(self, folder: str, above: set[tuple[int, int]]) -> Iterator[StoredObject]:
        """Files below ``folder``, links followed as well, but none back to a folder that it lies in."""
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in above:
            return
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir():
                    yield from self._below(entry.path, above | {here})
                elif entry.is_file() and not _UNFINISHED.search(entry.name):
                    with suppress(FileNotFoundError):  # deleted a moment ago
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
    def _explained(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise explain(error, f"{self.url}/{path}".rstrip("/")) from error


def _write_through(file: str, data: bytes) -> None:
    """Write a new file and have it on the disk before anybody is pointed to it."""
    with open(file, "xb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
