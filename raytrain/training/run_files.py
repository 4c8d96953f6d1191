"""A folder for files that a loop writes. Its content is kept in the run's storage, and is there again after a resume.

If the run is stored in a folder, the loop writes there directly. If it is stored in a bucket, the loop writes into a
temporary folder on worker 0's machine:

1. At its first use the folder gets what earlier attempts have left in the bucket.
2. Every half minute, between two batches, the files that have changed are copied beside the folder. At that moment the
   loop is not in the middle of writing one.
3. A thread sends these copies, and deletes files from the bucket that the loop has deleted. Training does not wait for
   the thread.
4. At the end of the run, also if it fails, the remaining changes are sent.

Under somebody's launcher, which may kill worker 0 as soon as another process has failed, a thread sends the remaining
changes meanwhile, even while the loop still writes. So whoever uses the folder holds a lock.

The other workers write into temporary folders that are removed at the end, so that all workers can make the same calls.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property
from pathlib import Path, PurePosixPath

from raytrain.errors import RaytrainError
from raytrain.monitor.events import DocumentLost, Event, Note
from raytrain.runs.background_and_throttle import Throttle
from raytrain.runs.documents import FILES
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

_SEND_EVERY_S = 30.0
_Version = tuple[int, int]  # size in bytes, and time of the last change in nanoseconds


class RunFiles:
    """The folder of one worker's loop. Only worker 0's is kept.

    ``report`` gets a note that the files are kept, and an event for each file that is lost or not fetched.

    Example:
        >>> files = RunFiles(store, rank=0, report=reporter.note_event)
        >>> torch.save(model.state_dict(), files.folder / "best.pt")
        >>> files.keep_changes()  # between two batches
        >>> files.close()
    """

    def __init__(self, store: Store, rank: int, report: Callable[[Event], None]) -> None:
        self._store = store
        self._is_kept = rank == 0
        self._report = report
        self._temporary: TemporaryFolder | None = None
        self._stored: dict[str, _Version] = {}  # by name: the files as the bucket has them
        self._lost: set[str] = set()  # names of files that could not be sent, each reported once
        self._throttle = Throttle()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._sending: Future[None] = Future()  # done while nothing is sent
        self._sending.set_result(None)
        self._using = threading.RLock()  # held by whoever sends changes or removes the folder

    @cached_property
    def folder(self) -> Path:
        """The folder, made at its first use, with the files of earlier attempts.

        Raises StorageError if files in a bucket cannot be read after a resume.
        """
        if self._is_kept:
            self._report(Note(f"files that the loop writes into run.folder are kept with the run, in {FILES}"))
        if self._is_kept and self._store.cloud is None:
            folder = Path(self._store.url, FILES)
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        self._temporary = TemporaryFolder()
        folder = self._temporary.path / "files"
        folder.mkdir()
        if self._is_kept:
            self._fetch(folder)
        return folder

    def keep_changes(self) -> None:
        """Start to send the files that have changed, at most every half minute, and not while others are being sent.

        To be called between two batches, when the loop is not in the middle of writing a file. Raises the exception
        that has ended the thread's last call, if any.
        """
        with self._using:
            if self._temporary is not None and self._sending.done() and self._throttle.due("send", _SEND_EVERY_S):
                self._send_changes(self._temporary.path)

    def send_rest(self, within_s: float | None = None) -> None:
        """Send the remaining changes, and wait for them. May be called from any thread.

        If ``within_s`` is given, it waits at most so many seconds for what is being sent, and so many again for the
        rest. What storage has not taken by then is reported as lost.
        """
        with self._using:
            if self._temporary is None:
                return
            if not wait([self._sending], within_s).not_done:
                self._send_changes(self._temporary.path)
            if wait([self._sending], within_s).not_done:
                self._report(DocumentLost(FILES, f"storage did not take all of it within {within_s:g} s"))

    def close(self, within_s: float | None = None) -> None:
        """Send the remaining changes as :meth:`send_rest` does, and remove the temporary folder."""
        with self._using:
            if self._temporary is None:
                return
            self.send_rest(within_s)
            self._sender.shutdown(wait=False)
            self._temporary.remove()
            self._temporary = None

    def _fetch(self, folder: Path) -> None:
        """Copy the files in the bucket into ``folder``. Those whose names cannot be files there are reported."""
        for stored in self._store.list(FILES):
            name = stored.path.removeprefix(FILES)
            file = folder / name
            # Others may be able to write to the bucket, and a key of theirs must not lead out of the folder.
            if ".." in PurePosixPath(name).parts or not name or name.startswith("/"):
                self._report(Note(f"{stored.path!r} is not fetched for the loop: it is not the name of a file"))
                continue
            content = self._store.get(stored.path)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            except OSError as error:  # such as a file that is also a folder, which a bucket allows
                self._report(Note(f"{stored.path!r} is not fetched for the loop: {error.strerror}"))
                continue
            status = file.stat()
            self._stored[name] = status.st_size, status.st_mtime_ns

    def _send_changes(self, copies_folder: Path) -> None:
        """Copy all files that have changed into ``copies_folder``, and start to send the copies in the thread.

        Copies are sent, because the loop may go on and write into the files. Files that it has removed are deleted from
        the bucket. This first waits until the thread's last call has ended, and raises its exception, if any.
        """
        self._sending.result()
        if not self._is_kept:
            return
        versions = dict(_regular_files(self.folder))
        copies: dict[str, tuple[Path, _Version]] = {}
        for name, version in versions.items():
            if self._stored.get(name) == version:
                continue
            copy = copies_folder / f"copy-{len(copies)}"
            try:
                shutil.copyfile(self.folder / name, copy)
            except FileNotFoundError:  # a thread of the loop's has removed it
                continue
            except OSError as error:
                self._note_lost(name, error.strerror or str(error))
                continue
            copies[name] = copy, version
        removed = self._stored.keys() - versions.keys()
        self._sending = self._sender.submit(self._send, copies, removed)

    def _send(self, copies: dict[str, tuple[Path, _Version]], removed: set[str]) -> None:
        """Put copies into the bucket, and delete ``removed`` files from it. Runs in a thread.

        ``copies`` are the paths and versions of the copies, by the names of the files. What storage refuses is
        reported, and tried again with the next changes.
        """
        for name, (copy, version) in copies.items():
            try:
                self._store.put_file(FILES + name, copy)
            except RaytrainError as error:  # training goes on: a later try may succeed
                self._note_lost(name, str(error))
                continue
            self._stored[name] = version
            self._lost.discard(name)
            copy.unlink(missing_ok=True)
        for name in removed:
            try:
                self._store.delete(FILES + name)
            except RaytrainError as error:
                self._note_lost(name, str(error))
                continue
            del self._stored[name]

    def _note_lost(self, name: str, reason: str) -> None:
        """Report, once for each file, that storage does not have it as the loop left it, and why."""
        if name not in self._lost:
            self._lost.add(name)
            self._report(DocumentLost(FILES + name, reason))


def _regular_files(folder: Path) -> Iterator[tuple[str, _Version]]:
    """Yield the names of all files below ``folder``, with forward slashes, and their versions."""
    for parent, _, names in os.walk(folder):
        for name in names:
            file = Path(parent, name)
            try:
                status = file.stat()
            except OSError:  # removed since, or a link to nothing or to itself
                continue
            if stat.S_ISREG(status.st_mode):
                yield file.relative_to(folder).as_posix(), (status.st_size, status.st_mtime_ns)
