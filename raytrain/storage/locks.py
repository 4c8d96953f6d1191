"""Locks between processes: a file that one process holds at a time, until it releases the file or dies.

The library filelock is not used: it keeps its file after the release, hides its descriptor, does not tell who has
waited, and retries every 50 ms. Here, a run's folder must be empty again, a holder writes its name into the file, and
the disk cache asks who has waited.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileLock(AbstractContextManager["FileLock"]):
    """A lock that this process holds. The operating system releases it if the process dies."""

    path: str
    descriptor: int
    exclusive: bool  # False on a disk that knows no locks, such as a network disk that was mounted without them
    waited: bool  # True if another process held it at first

    def release(self) -> None:
        """Delete the file, and let another process have the lock."""
        try:
            Path(self.path).unlink(missing_ok=True)
        finally:  # otherwise this process would wait for itself at the next lock of this file
            os.close(self.descriptor)

    def __exit__(self, *exception: object) -> None:
        self.release()


def acquire(path: str | os.PathLike[str], *, wait: bool = True, create: bool = True) -> FileLock:
    """Lock the file ``path``, which is created unless ``create`` is False, and wait for another process that holds it.

    Without ``wait``, raise BlockingIOError if another process holds the lock. Other OSErrors are raised if the file
    cannot be opened, or is a link. On a disk that knows no locks, everybody gets one that is not ``exclusive``.

    Use it as a context manager, or call :meth:`FileLock.release`::

        with acquire("/tmp/folder/lock"):
            ...
    """
    name, waited = os.fspath(path), False
    # Another user may have put a link or a pipe there: follow no link, and do not wait until somebody opens the pipe.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    while True:
        # Lock the file, waiting for its holder only if that is wanted.
        descriptor = os.open(name, flags, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                exclusive = True
            except BlockingIOError:
                if not wait:
                    raise
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                exclusive = waited = True
            except OSError:  # the disk knows no locks
                exclusive = False

            # While this process waited, the holder may have deleted the file, and another process may have made and
            # locked a new one. Then begin again with that: only the lock of the file in place counts.
            try:
                is_in_place = os.path.samestat(os.fstat(descriptor), os.stat(name, follow_symlinks=False))
            except FileNotFoundError:
                is_in_place = False
            if is_in_place or not exclusive:
                return FileLock(name, descriptor, exclusive, waited)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
