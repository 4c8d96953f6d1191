"""Decode images in a process beside this one: decoders are native code, and an image may kill the process."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from raytrain.data.images.crop_box import STRETCH, Crop, Pixels
from raytrain.data.images.decode import decode
from raytrain.data.images.image_format import BadImage, ImageShape

_MAX_BYTES = 1 << 30  # of memory for decoding: twice what one image may take
_MAX_S = 60.0  # for one image
# By default, glibc gives the memory of a large image back after each use; getting it again takes half as long as
# decoding. These thresholds make it keep the memory.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
_READY = b"ready"  # the first message of the process
_PIXELS, _REASON = b"+", b"-"  # how an answer begins: decoded pixels follow, or why there are none


class DecodeProcess(AbstractContextManager["DecodeProcess"]):
    """Decodes images to ``shape`` in another process. That starts with the first image, and again if it was killed."""

    def __init__(self, shape: ImageShape) -> None:
        self._shape = shape
        self._process: subprocess.Popen[bytes] | None = None

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._clean_up(self._process)

    def decode(self, data: bytes, crop: Crop = STRETCH) -> Pixels:
        """Return the pixels of an image file, as :func:`raytrain.data.images.decode.decode` does.

        Raises BadImage also if the image ends the process, or takes over a minute, twice. Raises RuntimeError if the
        process cannot start.
        """
        # Try twice, because the first time something else than the image may have killed the process.
        reason = ""
        for _ in range(2):
            process = self._process or self._start()
            try:
                self._pipe.send(crop)
                self._pipe.send_bytes(data)
                if not self._pipe.poll(_MAX_S):
                    raise TimeoutError
                answer = self._pipe.recv_bytes()
            except (EOFError, OSError) as error:
                # The process has died, or takes too long: end it, and start another one next time.
                is_slow = isinstance(error, TimeoutError)
                if is_slow:
                    process.kill()
                how_it_ended = self._clean_up(process)
                reason = f"takes over {_MAX_S:g} s" if is_slow else f"ends the process ({how_it_ended})"
            except BaseException:  # such as Ctrl-C: the answer to this image would be taken for that to the next one
                self.close()
                raise
            else:
                if answer.startswith(_REASON):
                    raise BadImage(answer[1:].decode())
                return np.frombuffer(answer, np.uint8, offset=1).reshape(self._shape)
        raise BadImage(f"decoding it {reason}")

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process, and wait until it is ready. Raise RuntimeError if it cannot start."""
        # What the process writes to standard error goes to a file: a pipe that nobody reads would fill up and stop it,
        # and only the last line is wanted.
        self._pipe, its_end = Pipe()
        arguments = (its_end.fileno(), *self._shape)
        with tempfile.TemporaryFile() as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raytrain.data.images.decode_process", *map(str, arguments)],
                pass_fds=[its_end.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # a Ctrl-C in the terminal is for the driver alone
                env={**_KEEP_MEMORY, **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"},
            )
            its_end.close()  # so that the pipe ends when the process does
            try:
                with suppress(EOFError, OSError):
                    self._pipe.recv_bytes()  # _READY
                    return self._process
            except BaseException:  # such as Ctrl-C, as in decode
                self.close()
                raise
            how_it_ended = self._clean_up(self._process)
            errors.seek(0)
            last_line = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        raise RuntimeError(
            f"The process that decodes images could not start ({how_it_ended}; {last_line or 'it said nothing'})."
        )

    def _clean_up(self, process: subprocess.Popen[bytes]) -> str:
        """Forget the process and close its pipe; wait until it has ended, and return how, in a few words."""
        self._process = None
        self._pipe.close()
        status = process.wait()
        return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


class DecodeProcesses:
    """A pool of processes that decode to ``shape``: one for each thread that decodes while all others are in use."""

    def __init__(self, shape: ImageShape) -> None:
        self._shape = shape
        self._idle: list[DecodeProcess] = []

    @contextmanager
    def one(self) -> Iterator[DecodeProcess]:
        """Lend a process that nobody else uses."""
        try:
            process = self._idle.pop()
        except IndexError:  # asking first would race with other threads
            process = DecodeProcess(self._shape)
        try:
            yield process
        finally:
            self._idle.append(process)

    def close(self) -> None:
        """End the processes that are not lent."""
        while self._idle:
            self._idle.pop().close()


def _serve(connection: Connection, shape: ImageShape) -> None:
    """Decode the images that come through the connection, until the other process closes it or ends."""
    # An image that takes all memory must end this process, before the kernel ends another one. So limit the address
    # space to what is used now, and some memory for decoding. Only Linux says how much that is, in pages.
    with suppress(OSError, ValueError):
        used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + _MAX_BYTES, hard_limit))
    connection.send_bytes(_READY)
    with suppress(EOFError, OSError):
        while True:
            crop, data = connection.recv(), connection.recv_bytes()
            try:
                answer = _PIXELS + decode(data, shape, crop).tobytes()
            except BadImage as error:
                answer = _REASON + str(error).encode()
            connection.send_bytes(answer)


if __name__ == "__main__":
    _handle, *_sides = map(int, sys.argv[1:])
    _serve(Connection(_handle), ImageShape(*_sides))
