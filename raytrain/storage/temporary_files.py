"""Temporary folders, removed even after a kill."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from raytrain.errors import UsageError
from raytrain.storage.locks import acquire

_PREFIX, _LOCK = "raytrain-", "lock"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as tempfile.mkdtemp makes it
_MARK = b"A temporary folder of raytrain. Removed once its process has ended.\n"
"""The content of the lock file, so that nobody else's folder is taken for one of these."""


def temporary_folder() -> str:
    """Return the system's folder for temporary files.

    Raises UsageError if there is none that can be written, as in a container with read-only disks alone.
    """
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        raise UsageError(
            "There is no folder for temporary files that can be written; set TMPDIR to one that can."
        ) from None


class TemporaryFolder:
    """A new temporary folder in ``parent``, by default where the system has them; removed when it is closed.

    Folders in ``parent`` whose processes were killed are removed when a new one is made. As a context manager, it gives
    its path.
    """

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or temporary_folder()
        _remove_abandoned(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self._lock = acquire(self.path / _LOCK)
        os.write(self._lock.descriptor, _MARK)  # after it is locked, as others remove what has a mark and no lock

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with its content. If that fails, the next process that makes one removes it."""
        with suppress(OSError):  # such as for lack of descriptors
            _remove(self.path)
        os.close(self._lock.descriptor)


def _remove_abandoned(parent: Path) -> None:
    """Remove the temporary folders in ``parent`` of processes that have ended: their locks are free."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # BlockingIOError if the lock is held
            # Touch only folders of this user with such a name, and no links or files.
            status = folder.lstat()
            is_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_folder or not _NAME.fullmatch(folder.name):
                continue
            lock = acquire(folder / _LOCK, wait=False, create=False)
            try:
                # pread raises an OSError for a pipe, which has no positions.
                if lock.exclusive and os.pread(lock.descriptor, len(_MARK) + 1, 0) == _MARK:
                    _remove(folder)
            finally:
                os.close(lock.descriptor)


def _remove(folder: Path) -> None:
    """Remove a folder, the lock last: without a lock, nobody would ever remove the rest if this fails half-way."""
    for path in folder.iterdir():
        if path.name == _LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if {path.name for path in folder.iterdir()} <= {_LOCK}:
        shutil.rmtree(folder)
