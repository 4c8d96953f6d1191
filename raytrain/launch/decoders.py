"""Processes beside a worker, whose threads fetch and decode its images: in the worker they would slow its loop.

After each of the hundreds of calls that are a step of a network on a GPU, a thread that decodes may take the
interpreter's lock. Eight of them made a step of ResNet-50 on an H100 2.5 times as long.

A block goes this way: the worker takes a part of the memory that it shares with the processes, and sends the number of
the block and of the part to one of them. A thread there decodes into the part, and sends back the shape and the labels.
Pixels are never copied. The worker uses a part again once nobody has an array of it.

All messages go through one pipe for each process. To the worker: the answer to a block, ``(number, answer)``, or a
report of images that cannot be used, ``(None, report)``. From the worker: a block to read, ``_HEARD`` when a report has
been taken, or ``_END``.
"""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import partial
from itertools import count, cycle
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np

from raytrain.config.user_code import describe
from raytrain.data.blocks import Block, lend
from raytrain.data.images.decode import Pixels
from raytrain.data.plan.permutation import Int64s
from raytrain.launch.placement import cores
from raytrain.runs.metric_row import SkippedImage

ReadBlock = Callable[[Int64s, int, Pixels | None], Block]
"""Reads some draws and decodes them for an epoch, into an array of bytes if there is one."""

_THREADS = 8  # of a process: more of them would wait for the interpreter
_END, _HEARD = "end", "heard"
_MAX_DECODERS = 32  # for a worker: they decode more photographs than a GPU can take


class ImageReporter(Protocol):
    """Takes reports about images, in the worker."""

    def skip(self, images: list[SkippedImage], /) -> object:
        """Note images that cannot be used."""

    def retried(self, num_requests: int, /) -> object:
        """Note requests to storage that were sent again."""


def num_decoders() -> int:
    """Return the number of threads that decode for each of this machine's workers."""
    return max(1, min(_MAX_DECODERS, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Decoders(AbstractContextManager["Decoders"]):
    """Decode blocks in processes that are forked from this one, and end with it.

    ``block_bytes`` is the size of the largest block. ``reporter`` hears, in this process, of images that cannot be used
    and of requests that were retried.

    Example:
        >>> with Decoders(reporter, block_bytes) as decoders:
        ...     decoders.start([images.read], lambda: None)
        ...     block = decoders.read(0, draws, epoch=0).result()
    """

    def __init__(self, reporter: ImageReporter, block_bytes: int) -> None:
        self._reporter = reporter
        self._memory = SharedMemory(block_bytes)
        self._numbers = count()
        self._waiting: dict[int, tuple[Future[Block], Pixels, Int64s]] = {}
        self._broken: Exception | None = None
        self._connections: list[Connection] = []
        self._to_worker: Connection | None = None  # None in the worker itself
        self._sending = threading.Lock()  # of several threads that send through the same pipe
        self._reporting, self._heard = threading.Lock(), threading.Event()

    # In the worker.

    def start(self, reads: Sequence[ReadBlock], read_ahead: Callable[[], None]) -> None:
        """Fork the processes. In each, as many threads call ``read_ahead`` as read what the worker asks for.

        Called before this process uses a GPU, and, as far as it can, before it has threads.
        """
        self._reads, self._read_ahead = reads, read_ahead
        num_threads = num_decoders()
        num_processes = -(-num_threads // _THREADS)
        processes: list[BaseProcess] = []
        for index in range(num_processes):
            ours, theirs = Pipe()
            self._connections.append(ours)
            arguments = theirs, ours, (num_threads + index) // num_processes
            process = get_context("fork").Process(target=self._serve, args=arguments, daemon=True, name="decode")
            process.start()
            theirs.close()
            processes.append(process)
        # No thread of this class before the last fork.
        for connection, process in zip(self._connections, processes, strict=True):
            threading.Thread(target=self._receive, args=(connection, process), daemon=True, name="decoded").start()
        self._next = cycle(self._connections)

    def read(self, which: int, draws: Int64s, epoch: int) -> Future[Block]:
        """Have ``reads[which]`` make a block of ``draws``."""
        number, future = next(self._numbers), Future[Block]()
        with self._sending:
            part, pixels = self._memory.take()
            self._waiting[number] = future, pixels, draws
            with suppress(OSError):  # the process has ended, as the thread that receives its answers knows, too
                next(self._next).send((number, which, draws, epoch, part))
        if self._broken and self._waiting.pop(number, None):
            future.set_exception(self._broken)
        return future

    def _receive(self, connection: Connection, process: BaseProcess) -> None:
        """Receive all messages of a process. A signal that ends it, such as that of a bad image, ends this one, too."""
        while True:
            try:
                number, answer = connection.recv()
            except (EOFError, OSError):
                break
            try:
                if number is None:
                    self.report(*answer)
                elif waiting := self._waiting.pop(number, None):
                    future, pixels, draws = waiting
                    if isinstance(answer, Exception):
                        future.set_exception(answer)
                    else:
                        shape, labels = answer
                        future.set_result(Block(pixels[: int(np.prod(shape))].reshape(shape), labels, draws))
            except Exception as error:  # what the reporter raises
                self._fail(error)
            if number is None:
                with self._sending, suppress(OSError):
                    connection.send(_HEARD)
        process.join()
        if self._broken is None:  # it was not asked to end
            if process.exitcode is not None and process.exitcode < 0:
                os.kill(os.getpid(), -process.exitcode)
            self._fail(RuntimeError(f"a process that decodes has ended with {process.exitcode}"))

    def _fail(self, error: Exception) -> None:
        self._broken = error
        while self._waiting:
            _, (future, _, _) = self._waiting.popitem()
            future.set_exception(error)

    def __exit__(self, *exception: object) -> None:
        self._broken = RuntimeError("the processes that decode have been closed")
        with self._sending:
            for connection in self._connections:
                with suppress(OSError):  # it has ended
                    connection.send(_END)

    # In the processes.

    def _serve(self, connection: Connection, workers_end: Connection, num_threads: int) -> None:
        """Read what the worker asks for, until it says that this is the end, or ends itself."""
        workers_end.close()
        self._to_worker = connection
        for _ in range(num_threads):
            threading.Thread(target=self._read_ahead, daemon=True, name="decode").start()
        threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        with suppress(EOFError, OSError):
            while (message := connection.recv()) != _END:
                if message == _HEARD:
                    self._heard.set()
                else:
                    threads.submit(self._read, *message)
        os._exit(0)  # without waiting for threads

    def _read(self, number: int, which: int, draws: Int64s, epoch: int, part: int) -> None:
        try:
            block = self._reads[which](draws, epoch, self._memory.part(part))
        except Exception as error:
            answer: Any = error
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # it is of a type that cannot be sent
                traceback.print_exception(error)
                answer = RuntimeError(describe(error))
        else:
            answer = block.images.shape, block.labels
        self._send_to_worker(number, answer)

    def _send_to_worker(self, number: int | None, message: Any) -> None:
        assert self._to_worker is not None
        with self._sending, suppress(OSError):  # the worker has ended
            self._to_worker.send((number, message))

    # In either.

    def report(self, skipped: list[SkippedImage], num_retries: int) -> None:
        """Report to the reporter, from any of the processes.

        Returns when the reporter has heard of it: only then may others use the images.
        """
        if self._to_worker is None:
            if num_retries:
                self._reporter.retried(num_retries)
            if skipped:
                self._reporter.skip(skipped)
        elif skipped or num_retries:
            with self._reporting:
                self._heard.clear()
                self._send_to_worker(None, (skipped, num_retries))
                self._heard.wait()


class SharedMemory:
    """Memory of this process and those that it forks, in parts of one size. Each is used again once nobody has it."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = -(-max(part_bytes, 1) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        # Not a file in /dev/shm, which is small in containers. macOS has no such memory.
        in_memory = hasattr(os, "memfd_create")
        self._file = os.fdopen(os.memfd_create("images"), "r+b") if in_memory else tempfile.TemporaryFile()  # noqa: SIM115
        self._parts: dict[int, Pixels] = {}
        self._free: list[int] = []

    def take(self) -> tuple[int, Pixels]:
        """Return a part's number, and its bytes, uint8 (n,), whose content is undefined. For one thread at a time."""
        try:
            number = self._free.pop()
        except IndexError:
            number = len(self._parts)
            self._file.truncate((number + 1) * self._part_bytes)
        return number, lend(self.part(number), partial(self._free.append, number))

    def part(self, number: int) -> Pixels:
        """Return the bytes, uint8 (n,), of a part that this process or another one has taken."""
        if number not in self._parts:
            offset = number * self._part_bytes
            self._parts[number] = np.frombuffer(
                mmap.mmap(self._file.fileno(), self._part_bytes, offset=offset), np.uint8
            )
        return self._parts[number]
