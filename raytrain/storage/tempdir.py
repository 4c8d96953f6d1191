"""Temporary folders. If a process is killed, the next process that creates a folder removes those left over."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK = "raytrain-", "lock"


class TemporaryFolder:
    """A temporary folder for this process. Creating one also removes those of killed processes on this machine."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        unlocked = self.path / "unlocked"  # renamed once the lock is held, so that no other process removes the folder
        self._lock = unlocked.open("w")
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


def _remove_abandoned(folder: Path) -> None:
    """Remove folders whose lock is free. The operating system releases a lock when its process ends."""
    for path in folder.glob(f"{_PREFIX}*/{_LOCK}"):
        with (
            suppress(OSError),
            path.open() as lock,
        ):  # BlockingIOError if the lock is held; PermissionError for another user's folder
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent)
