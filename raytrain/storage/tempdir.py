"""A temporary folder that outlives no process for long: what a killed one left, the next one takes away."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK = "raytrain-", "lock"


class TemporaryFolder:
    """A folder for as long as its process needs it, with those gone that processes on this machine left when they were killed."""

    def __init__(self) -> None:
        _remove_abandoned(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        unnamed = self.path / "unlocked"  # nobody else looks at the folder before its lock is held
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _remove_abandoned(folder: Path) -> None:
    """The system lets go of a lock where its process ends, however it does."""
    for path in folder.glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), path.open() as lock:  # BlockingIOError, where it is held; another's folder
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent)
