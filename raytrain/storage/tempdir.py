"""Temporary folders. If a process is killed, the next process that creates a folder removes those left over."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK = "raytrain-", "lock"
_NAME = re.compile(rf"{_PREFIX}[a-z0-9_]{{8}}")  # as tempfile.mkdtemp makes it
_MARK = b"A temporary folder of raytrain. Removed once its process has ended.\n"
"""The content of the lock file, so that nobody else's folder is taken for one of these."""


class TemporaryFolder:
    """A temporary folder for this process, in ``parent``, by default the system's folder for such things.

    Creating one also removes those of killed processes there.
    """

    def __init__(self, parent: str | None = None) -> None:
        parent = parent or tempfile.gettempdir()
        _remove_abandoned(Path(parent))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        unlocked = self.path / "unlocked"  # renamed once the lock is held, so that no other process removes the folder
        unlocked.write_bytes(_MARK)
        self._lock = unlocked.open("rb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unlocked.rename(self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(parent: Path) -> None:
    """Remove folders whose lock is free. The operating system releases a lock when its process ends."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # BlockingIOError if the lock is held
            if _is_own_folder(folder):
                _remove_if_unlocked(folder)


def _is_own_folder(folder: Path) -> bool:
    status = folder.lstat()
    return _NAME.fullmatch(folder.name) is not None and stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


def _remove_if_unlocked(folder: Path) -> None:
    # A pipe would block, and a link could lead to another folder's lock.
    lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        if stat.S_ISREG(os.fstat(lock).st_mode) and os.read(lock, len(_MARK) + 1) == _MARK:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(lock)
