"""Locks between processes: a file that one of them holds at a time, until it lets go or dies."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileLock:
    """A lock that this process holds. The operating system releases it if the process dies."""

    path: str
    descriptor: int
    exclusive: bool  # False on a disk that knows no locks, such as a network disk that was mounted without them
    waited: bool  # whether another process held it at first

    def release(self) -> None:
        """Delete the file, and let another process have the lock."""
        Path(self.path).unlink(missing_ok=True)
        os.close(self.descriptor)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def acquire(path: str | os.PathLike[str], *, wait: bool = True, create: bool = True) -> FileLock:
    """Create and lock the file ``path``, no link or pipe. BlockingIOError without ``wait`` if it is locked."""
    name, waited = os.fspath(path), False
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    while True:
        descriptor = os.open(name, flags, 0o666)
        try:
            exclusive, had_to_wait = _flock(descriptor, wait)
            waited = waited or had_to_wait
            if not exclusive or _is_still(name, descriptor):
                return FileLock(name, descriptor, exclusive, waited)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # whoever held it has deleted the file


def _flock(descriptor: int, wait: bool) -> tuple[bool, bool]:
    """Lock an open file; whether that worked, and whether another process held the lock at first."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not wait:
            raise
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return True, True
    except OSError:
        return False, False
    return True, False


def _is_still(name: str, descriptor: int) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(name, follow_symlinks=False))
    return False
