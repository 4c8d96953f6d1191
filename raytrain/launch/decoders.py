"""Processes beside a worker, whose threads fetch and decode its images: in the worker they would slow its loop.

After each of the hundreds of calls that are a step of a network on a GPU, a thread that decodes may take the
interpreter's lock. Eight of them made a step of ResNet-50 on an H100 2.5 times as long.
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
from typing import Any

import numpy as np

from raytrain.config.user_code import describe
from raytrain.data.blocks import Block, lend
from raytrain.data.images.decode import Pixels
from raytrain.data.plan.permutation import Int64s
from raytrain.launch.placement import cores
from raytrain.runs.metric_row import SkippedImage

ReadBlock = Callable[[Int64s, int, Pixels | None], Block]
"""Reads some samples and decodes them for an epoch, into an array of bytes if there is one."""

_THREADS = 8  # of a process: more of them would wait for the interpreter
_END, _HEARD = "end", "heard"
_MOST = 32  # for a worker: they decode more photographs than a GPU can take


def num_decoders() -> int:
    """Threads that decode for each of this machine's workers."""
    return max(1, min(_MOST, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class Decoders(AbstractContextManager["Decoders"]):
    """Decodes blocks in processes that are forked from this one, and end with it.

    ``reporter`` hears, in this process, of images that cannot be used and of requests that were retried.
    """

    def __init__(self, reporter: Any, block_bytes: int) -> None:
        self._reporter = reporter
        self._memory = SharedMemory(block_bytes)
        self._numbers = count()
        self._waiting: dict[int, tuple[Future[Block], Pixels, Int64s]] = {}
        self._broken: Exception | None = None
        self._connections: list[Connection] = []
        self._answers: Connection | None = None  # to the worker; None in the worker
        self._sending = threading.Lock()  # of several threads that ask, or answer
        self._reporting, self._heard = threading.Lock(), threading.Event()

    def __exit__(self, *exception: object) -> None:
        self._broken = RuntimeError("the processes that decode have been closed")
        with self._sending:
            for connection in self._connections:
                with suppress(OSError):  # it has ended
                    connection.send(_END)

    def start(self, reads: Sequence[ReadBlock], read_ahead: Callable[[], None]) -> None:
        """Fork the processes, in each of which as many threads call ``read_ahead`` beside those that do what is asked.

        Called before this process uses a GPU, and, as far as it can, before it has threads.
        """
        self._reads, self._read_ahead = reads, read_ahead
        processes = [self._fork(num_threads) for num_threads in _shares(num_decoders())]
        for connection, process in zip(self._connections, processes, strict=True):
            threading.Thread(target=self._receive, args=(connection, process), daemon=True, name="decoded").start()
        self._next = cycle(self._connections)

    def read(self, which: int, samples: Int64s, epoch: int) -> Future[Block]:
        """The block that ``reads[which]`` makes of ``samples``."""
        number, future = next(self._numbers), Future[Block]()
        with self._sending:
            part, pixels = self._memory.take()
            self._waiting[number] = future, pixels, samples
            with suppress(OSError):  # it has ended, which the thread that waits for its answers knows, too
                next(self._next).send((number, which, samples, epoch, part))
        if self._broken and self._waiting.pop(number, None):
            future.set_exception(self._broken)
        return future

    def report(self, skipped: list[SkippedImage], num_retries: int) -> None:
        """Tell the reporter, from any of the processes; returns when it knows: only then may others use the images."""
        if self._answers is not None:
            if skipped or num_retries:
                with self._reporting:
                    self._heard.clear()
                    self._answer(None, (skipped, num_retries))
                    self._heard.wait()
            return
        if num_retries:
            self._reporter.retried(num_retries)
        if skipped:
            self._reporter.skip(skipped)

    def _fork(self, num_threads: int) -> BaseProcess:
        ours, theirs = Pipe()
        self._connections.append(ours)
        arguments = (theirs, ours, num_threads)
        process = get_context("fork").Process(target=self._serve, args=arguments, daemon=True, name="decode")
        process.start()
        theirs.close()
        return process

    def _receive(self, connection: Connection, process: BaseProcess) -> None:
        """Take the answers of a process; if a signal ends it, such as that of an image, it ends this process, too."""
        while True:
            try:
                number, answer = connection.recv()
            except (EOFError, OSError):
                break
            try:
                self._take(number, answer)
            except Exception as error:  # what the reporter raises
                self._fail(error)
            if number is None:
                with self._sending, suppress(OSError):
                    connection.send(_HEARD)
        process.join()
        if self._broken is None:  # it has not been told to end
            if process.exitcode is not None and process.exitcode < 0:
                os.kill(os.getpid(), -process.exitcode)
            self._fail(RuntimeError(f"a process that decodes has ended with {process.exitcode}"))

    def _take(self, number: int | None, answer: Any) -> None:
        if number is None:
            self.report(*answer)
        elif asked := self._waiting.pop(number, None):
            future, pixels, samples = asked
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                shape, labels = answer
                future.set_result(Block(pixels[: int(np.prod(shape))].reshape(shape), labels, samples))

    def _fail(self, error: Exception) -> None:
        self._broken = error
        while self._waiting:
            _, (future, _, _) = self._waiting.popitem()
            future.set_exception(error)

    def _serve(self, connection: Connection, others_end: Connection, num_threads: int) -> None:
        """Answer until the worker closes its end, or ends."""
        others_end.close()
        self._answers = connection
        for _ in range(num_threads):
            threading.Thread(target=self._read_ahead, daemon=True, name="decode").start()
        threads = ThreadPoolExecutor(num_threads, thread_name_prefix="decode")
        with suppress(EOFError, OSError):
            while (asked := connection.recv()) != _END:
                if asked == _HEARD:
                    self._heard.set()
                else:
                    threads.submit(self._read, *asked)
        os._exit(0)  # without waiting for threads

    def _read(self, number: int, which: int, samples: Int64s, epoch: int, part: int) -> None:
        try:
            block = self._reads[which](samples, epoch, self._memory.part(part))
        except Exception as error:
            self._answer(number, _portable(error))
        else:
            self._answer(number, (block.images.shape, block.labels))

    def _answer(self, number: int | None, answer: Any) -> None:
        """Send the answer to what was asked under ``number``; without a number, a report."""
        assert self._answers is not None
        with self._sending, suppress(OSError):  # the worker has ended
            self._answers.send((number, answer))


def _shares(num_threads: int) -> list[int]:
    """The threads of each process."""
    num_processes = -(-num_threads // _THREADS)
    return [(num_threads + index) // num_processes for index in range(num_processes)]


def _portable(error: Exception) -> Exception:
    """The error, or one with its text if it is of a type that cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        traceback.print_exception(error)
        return RuntimeError(describe(error))
    return error


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
        """A part's number, and its bytes, uint8 (n,), whose content is undefined. For one thread at a time."""
        try:
            number = self._free.pop()
        except IndexError:
            number = len(self._parts)
            self._file.truncate((number + 1) * self._part_bytes)
        return number, lend(self.part(number), partial(self._free.append, number))

    def part(self, number: int) -> Pixels:
        """The bytes of a part that this process or another one has taken."""
        if number not in self._parts:
            offset = number * self._part_bytes
            self._parts[number] = np.frombuffer(
                mmap.mmap(self._file.fileno(), self._part_bytes, offset=offset), np.uint8
            )
        return self._parts[number]
