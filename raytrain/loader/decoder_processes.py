"""Processes beside a worker, whose threads fetch and decode its images. In the worker, they would slow its loop.

A step of a network on a GPU consists of hundreds of calls, and after each a thread that decodes may take the
interpreter's lock. Eight such threads made a step of ResNet-50 on an H100 2.5 times as long.

A block is read like this: the worker takes a part of the memory that it shares with the processes, and sends the
numbers of the block and of the part to one of them. A thread there decodes into the part, and sends back the shape and
the labels; or it reads files into the part, and sends back where each file is. Neither pixels nor files are copied. The
worker uses a part again once nobody has an array in it.

All messages go through one pipe for each process. A process sends the answer to a block, ``(number, answer)``, or a
report of images that cannot be used, ``(None, report)``. The worker sends a block to read, ``_HEARD`` when it has taken
a report, or ``_END``.

In a run, the processes are forked from the worker. That takes no time, and is safe because the worker has just started.
A process that somebody else has started may have threads that hold locks, or use a GPU; there, new processes are
started. They need a second for their imports, so start them early (:func:`start_processes`); they are told later what
to read, and get the memory for it.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib import import_module
from itertools import count, cycle
from multiprocessing import Pipe, get_context, reduction
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from raytrain.config.user_code import describe
from raytrain.data.blocks import Block, Files, lend
from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.malloc import keep_freed_memory
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import current_folder
from raytrain.loader.machine import cores, local_world_size
from raytrain.runs.metric_row import SkippedImage

Report = Callable[[list[SkippedImage], int], None]
"""Reports, from a process that reads, images that cannot be used, and the number of requests that were retried.

It returns when the worker's reporter has the report: only then may others use the images.
"""

_THREADS = 8  # of a process; more would wait for the interpreter
_END, _HEARD = "end", "heard"  # messages of the worker, besides blocks to read
_MAX_DECODERS = 32  # threads for a worker; this many decode more photographs than a GPU can use


class ImageReporter(Protocol):
    """Takes reports about images in the worker."""

    def note_skipped(self, images: list[SkippedImage], /) -> object:
        """Report images that cannot be used."""

    def note_retries(self, num_requests: int, /) -> object:
        """Report how many requests to storage were retried."""


class BlockReader(Protocol):
    """Reads blocks of one set of images, in a process beside the worker."""

    def read(self, draws: Int64s, epoch: int, pixels: Pixels | None = None) -> Block:
        """Read ``draws``, decoded for ``epoch``, into the bytes ``pixels`` if given."""
        ...

    def read_ahead(self) -> None:
        """Read the blocks that are to be kept in memory, if any; called by several threads and processes at once."""


OpenReaders = Callable[[Report], Sequence[BlockReader]]
"""Makes the readers of a process. It is pickled if the process is a new one."""


class DecoderKilled(Exception):
    """A signal has killed a process that decodes, because of a bad image or too little memory."""


def num_decoders() -> int:
    """Return the number of threads that decode for each of this machine's workers: its share of the cores, up to 32.

    Raises UsageError as :func:`local_world_size` does.
    """
    return max(1, min(_MAX_DECODERS, cores() // local_world_size()))


class NewProcess:
    """A new process for decoding. It imports the modules ``imports``, and then waits for :meth:`Decoders.start`."""

    def __init__(self, imports: Sequence[str]) -> None:
        self.connection, theirs = Pipe()
        # In a notebook and at a prompt, an empty name stands for the current folder, which may have the user's modules.
        path = os.pathsep.join(folder or current_folder() for folder in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "raytrain.loader.decoder_processes", str(theirs.fileno()), *imports],
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C in the terminal is for the worker alone
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
        theirs.close()

    def end(self) -> None:
        """Kill it, even while it imports. Its connection stays open, as a thread of :class:`Decoders` may use it."""
        self.process.kill()
        self.process.wait()


def start_processes(imports: Sequence[str], threads_per_process: int = _THREADS) -> list[NewProcess]:
    """Start the processes that decode for this worker, for :class:`Decoders`: as many as its threads need.

    They begin at once to import the modules ``imports``, and wait for :meth:`Decoders.start`.

    Example:
        >>> processes = start_processes(["raytrain.loader.machine_batches"])
        >>> with Decoders(reporter, block_bytes, processes) as decoders:
    """
    num_processes = -(-num_decoders() // threads_per_process)  # rounded up
    return [NewProcess(imports) for _ in range(num_processes)]


class _AskedBlock(NamedTuple):
    """A block that a process has been asked for: its future, the memory that it will be in, and its draws."""

    future: Future[Block]
    pixels: Pixels
    draws: Int64s


class Decoders(AbstractContextManager["Decoders"]):
    """Decodes blocks in processes beside this one, which end with it.

    ``block_bytes`` is the size of the largest block. ``reporter`` is called in this process with images that cannot be
    used and requests that were retried; None if the readers report neither. ``processes`` are those of
    :func:`start_processes`. Without them, processes are forked from this one; then a signal that kills one of them, for
    example because of a bad image, ends this process.

    Example:
        >>> with Decoders(reporter, block_bytes) as decoders:
        ...     decoders.start(lambda report: [images.reader(report)])
        ...     block = decoders.read(0, draws, epoch=0).result()
    """

    def __init__(
        self, reporter: ImageReporter | None, block_bytes: int, processes: Sequence[NewProcess] | None = None
    ) -> None:
        self._reporter = reporter
        self._new_processes = processes
        self._memory = SharedMemory(block_bytes)
        self._numbers = count()  # of the blocks that are asked for
        self._waiting: dict[int, _AskedBlock] = {}  # blocks without an answer yet, by number
        self._broken: Exception | None = None  # what has ended the decoding
        self._connections: list[Connection] = []
        self._sending = threading.Lock()  # several threads send through the same pipe

    def start(self, open_readers: OpenReaders) -> None:
        """Fork the processes, unless new ones were given, and have each make its readers with ``open_readers``.

        In each process, some threads read the blocks that this process asks for, and as many others call
        ``read_ahead``. If processes are forked, call this before this process uses a GPU and, if possible, before it
        has threads.
        """
        # Divide the threads evenly among the processes, whose number is rounded up.
        num_threads = num_decoders()
        num_processes = -(-num_threads // _THREADS) if self._new_processes is None else len(self._new_processes)
        waits: list[Callable[[], int | None]] = []  # each waits for a process to end, and returns its exit code
        for index in range(num_processes):
            threads = max(1, (num_threads + index) // num_processes)
            if self._new_processes is None:
                waits.append(self._fork(threads, open_readers))
                continue
            new = self._new_processes[index]
            self._connections.append(new.connection)
            waits.append(new.process.wait)
            with suppress(OSError):  # the process has ended, which the thread that receives its answers will notice
                new.connection.send((threads, self._memory.part_bytes, open_readers))
                reduction.send_handle(new.connection, self._memory.fileno(), new.process.pid)

        # Start the threads that receive answers, none before the last fork. Blocks go to the processes in turn.
        for connection, wait in zip(self._connections, waits, strict=True):
            threading.Thread(target=self._receive, args=(connection, wait), daemon=True, name="decoded").start()
        self._next_connection = cycle(self._connections)

    def _fork(self, num_threads: int, open_readers: OpenReaders) -> Callable[[], int | None]:
        """Fork a process of ``num_threads`` threads; return a function that waits for it and returns its exit code."""
        ours, theirs = Pipe()

        def serve() -> None:
            ours.close()
            _Server(theirs, self._memory, open_readers).serve(num_threads)

        process = get_context("fork").Process(target=serve, daemon=True, name="decode")
        process.start()
        theirs.close()
        self._connections.append(ours)

        def wait() -> int | None:
            process.join()
            return process.exitcode

        return wait

    def read(
        self, reader: int, draws: Int64s, epoch: int, images: npt.NDArray[np.uint8] | None = None
    ) -> Future[Block]:
        """Have reader number ``reader`` of a process make a block of ``draws`` for ``epoch``; return its future.

        A reader that transforms images gets their pixels, ``images``, uint8, which are copied into the memory that it
        gets. The future has an exception of the reader, or the one that has ended the decoding.
        """
        number, future = next(self._numbers), Future[Block]()
        with self._sending:
            part, pixels = self._memory.take()
            if images is not None:
                pixels[: images.size].reshape(images.shape)[:] = images
            self._waiting[number] = _AskedBlock(future, pixels, draws)
            with suppress(OSError):  # the process has ended, which the thread that receives its answers will notice
                next(self._next_connection).send((number, reader, draws, epoch, part))
        # If the decoding has ended meanwhile, perhaps nobody has given the exception to this future.
        if self._broken and self._waiting.pop(number, None):
            future.set_exception(self._broken)
        return future

    def check(self) -> None:
        """Raise the exception that has ended the decoding, if any: the reporter's, or that of a process's end.

        A block is kept in memory only after its bad images were reported to the reporter. So whoever calls this after
        getting a kept block learns if these were too many.
        """
        if self._broken is not None:
            raise self._broken

    def _receive(self, connection: Connection, wait: Callable[[], int | None]) -> None:
        """Receive all messages of a process until it ends, and then end the decoding; runs in a thread."""
        while True:
            try:
                number, answer = connection.recv()
            except (EOFError, OSError):
                break

            # A report has no number. The answer to a block is an exception, or the places of files, or the shape of
            # the pixels, each with the labels.
            try:
                if number is None:
                    self.report(*answer)
                elif asked := self._waiting.pop(number, None):
                    pixels = asked.pixels
                    match answer:
                        case Exception():
                            asked.future.set_exception(answer)
                        case starts, lengths, labels:
                            asked.future.set_result(Block(Files(pixels, starts, lengths), labels, asked.draws))
                        case shape, labels:
                            images = pixels[: int(np.prod(shape))].reshape(shape)
                            asked.future.set_result(Block(images, labels, asked.draws))
            except Exception as error:  # what the reporter raises
                self._fail(error)
            if number is None:
                with self._sending, suppress(OSError):
                    connection.send(_HEARD)

        # The process has ended; if nothing is broken yet, not because this one has told it to. A negative exit code is
        # the signal that has killed it, which ends this process, too, if the other one was its fork.
        exit_code = wait() or 0
        if self._broken is None:
            if exit_code < 0 and self._new_processes is None:
                os.kill(os.getpid(), -exit_code)
            if exit_code < 0:
                self._fail(DecoderKilled(signal.Signals(-exit_code).name))
            else:
                self._fail(RuntimeError(f"a process that decodes has ended with {exit_code}"))

    def report(self, skipped: list[SkippedImage], num_retries: int) -> None:
        """Pass a report of another process, or of this one, on to the reporter: the :data:`Report` of this process."""
        assert self._reporter is not None
        if num_retries:
            self._reporter.note_retries(num_retries)
        if skipped:
            self._reporter.note_skipped(skipped)

    def _fail(self, error: Exception) -> None:
        """Give ``error`` to whoever waits for a block, or asks for one from now on."""
        self._broken = error
        with suppress(KeyError):  # none is left; other threads may take some at the same time
            while True:
                _, asked = self._waiting.popitem()
                asked.future.set_exception(error)

    def __exit__(self, *exception: object) -> None:
        # From now on, asking for a block raises an exception.
        self._fail(self._broken or RuntimeError("the processes that decode have been closed"))
        with self._sending:
            for connection in self._connections:
                with suppress(OSError):  # it has ended already
                    connection.send(_END)


class _Server:
    """The loop of a process beside a worker: it reads the blocks that the worker asks for, and sends the answers."""

    def __init__(self, connection: Connection, memory: SharedMemory, open_readers: OpenReaders) -> None:
        self._connection, self._memory = connection, memory
        self._sending = threading.Lock()
        self._reporting, self._heard = threading.Lock(), threading.Event()
        self._readers = open_readers(self._report)

    def serve(self, num_threads: int) -> None:
        """Read the blocks that the worker asks for, in ``num_threads`` threads, until it sends ``_END``, or ends.

        As many other threads read ahead what is to be kept. Then this process ends.
        """
        keep_freed_memory()
        for _ in range(num_threads):
            threading.Thread(target=self._read_ahead, daemon=True, name="decode").start()
        threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        with suppress(EOFError, OSError):
            while (message := self._connection.recv()) != _END:
                if message == _HEARD:
                    self._heard.set()
                else:
                    threads.submit(self._read, *message)
        os._exit(0)  # without waiting for threads

    def _read_ahead(self) -> None:
        """Read all that is to be kept, in a thread."""
        for reader in self._readers:
            reader.read_ahead()

    def _read(self, number: int, reader: int, draws: Int64s, epoch: int, part: int) -> None:
        """Read a block into its part of the memory, in a thread, and send the answer, or the exception.

        The arguments are the message of :meth:`Decoders.read`.
        """
        try:
            block = self._readers[reader].read(draws, epoch, self._memory.part(part))
        except Exception as error:
            answer: Any = error
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # it is of a type that cannot be sent
                traceback.print_exception(error)
                answer = RuntimeError(describe(error))
        else:
            images = block.images
            layout = (images.starts, images.lengths) if isinstance(images, Files) else (images.shape,)
            answer = *layout, block.labels
        self._send(number, answer)

    def _report(self, skipped: list[SkippedImage], num_retries: int) -> None:
        """Send a report to the worker, and wait until it has been taken: see :data:`Report`."""
        if skipped or num_retries:
            with self._reporting:
                self._heard.clear()
                self._send(None, (skipped, num_retries))
                self._heard.wait()

    def _send(self, number: int | None, message: Any) -> None:
        """Send the answer for block ``number``, or a report if ``number`` is None."""
        with self._sending, suppress(OSError):  # the worker has ended
            self._connection.send((number, message))


class SharedMemory:
    """Memory that this process shares with those beside it, in parts of one size, which are used again when free.

    ``part_bytes`` is the least size of a part. ``file`` is the descriptor of another process's shared memory; without
    it, new memory is made.
    """

    def __init__(self, part_bytes: int, file: int | None = None) -> None:
        # The system maps whole pages, so round up to them.
        self.part_bytes = -(-max(part_bytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        # Not a file in /dev/shm, which is small in containers. macOS has no memfd, so take a temporary file there.
        if file is not None:
            self._file: Any = os.fdopen(file, "r+b")
        elif hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("images"), "r+b")
        else:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self._parts: dict[int, Pixels] = {}
        self._free: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor of the memory, to be sent to another process."""
        return self._file.fileno()

    def take(self) -> tuple[int, Pixels]:
        """Return the number and the bytes of a free part, uint8 (n,), with undefined content. Not thread-safe.

        The memory grows if no part is free. A part is free again once nobody refers to its bytes.
        """
        try:
            number = self._free.pop()
        except IndexError:  # none is free; asking first would race with the thread that frees one
            number = len(self._parts)
            self._file.truncate((number + 1) * self.part_bytes)
        return number, lend(self.part(number), partial(self._free.append, number))

    def part(self, number: int) -> Pixels:
        """Return the bytes of a part, uint8 (n,), which this or another process has taken."""
        if number not in self._parts:
            offset = number * self.part_bytes
            self._parts[number] = np.frombuffer(
                mmap.mmap(self._file.fileno(), self.part_bytes, offset=offset), np.uint8
            )
        return self._parts[number]


def serve_worker(connection: Connection, imports: Sequence[str]) -> None:
    """Run a new process: import the modules ``imports``, wait for :meth:`Decoders.start`, and decode until the end."""
    for name in imports:
        import_module(name)
    with suppress(EOFError, OSError):  # the worker has ended
        num_threads, part_bytes, open_readers = connection.recv()
        memory = SharedMemory(part_bytes, reduction.recv_handle(connection))
        _Server(connection, memory, open_readers).serve(num_threads)


if __name__ == "__main__":
    serve_worker(Connection(int(sys.argv[1])), sys.argv[2:])
