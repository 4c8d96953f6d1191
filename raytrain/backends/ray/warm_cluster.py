"""A Ray cluster of this machine that outlives commands: who keeps it, whether it is in use, and how a command uses it.

One command uses it at a time, as long as it holds a lock. A second one starts a cluster of its own, as without this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

import raytrain
from raytrain.backends.ray.local_cluster import driver_variables
from raytrain.backends.ray.ray_start import ray_start_address
from raytrain.errors import UsageError

_READ_AT_IMPORT = (
    *("PYTHON", "LD_", "LANG", "LC_", "TZ", "TMP", "RAY_"),
    *("TORCH", "PYTORCH", "CUDA", "NVIDIA", "NCCL", "GLOO", "OMP", "GOMP", "KMP", "MKL", "ONEDNN", "DNNL", "OPENBLAS"),
)
_KEEPER = "raytrain.backends.ray.warm_keeper"
_ENDS_WITHIN_S = 30.0
_LOCKED_WITHIN_S, _LOCK_AGAIN_S = 1.0, 0.05  # who keeps it locks it once a second, for a moment
_LOG = logging.getLogger("raytrain")


@dataclass(frozen=True)
class WarmRay:
    """A cluster that is kept on this machine: its address, the process that keeps it, and how it was started."""

    address: str
    pid: int
    version: str
    gpus: str | None
    idle_minutes: float
    variables: str
    """See :func:`import_variables`."""
    fork_server: str
    """The socket at which commands can be forked; empty if they cannot be."""


class WarmCluster:
    """The kept cluster, as one command uses it: until it is closed, no other command does."""

    def __init__(self, found: WarmRay, lock: contextlib.ExitStack) -> None:
        self._found = found
        self._opened = lock
        self._opened.enter_context(driver_variables())

    @classmethod
    def take(cls) -> WarmCluster | None:
        """The kept cluster; None if there is none for the GPUs of this process, or if another command uses it.

        One that was started by another version is started anew.
        """
        found = running()
        if found is None or found.gpus != visible_gpus():
            return None
        with contextlib.ExitStack() as lock:
            if not lock.enter_context(locked()):
                _LOG.warning("The Ray of `raytrain up` is in use; this command starts one of its own.")
                return None
            if found.version != this_version():
                _LOG.warning("The Ray of `raytrain up` is of another version of raytrain, and is started anew.")
                end(found)
                found = start(found.idle_minutes)
            _LOG.warning("Using the Ray that `raytrain up` keeps; --address local starts a new one.")
            return cls(found, lock.pop_all())

    def address(self) -> str:
        """The cluster's address."""
        return self._found.address

    def close(self) -> None:
        """Leave the cluster to other commands, and put this process's variables back."""
        self._opened.close()


def keep_warm(idle_minutes: float) -> WarmRay:
    """The cluster that is kept on this machine, which is started if there is none of this version.

    Raises UsageError if commands would use another cluster of this machine, or if Ray cannot be started.
    """
    if not idle_minutes > 0:
        raise UsageError(f"--idle-minutes is {idle_minutes:g}; give a number above 0.")
    if (other := ray_start_address()) is not None:
        raise UsageError(
            f"A Ray cluster that was started with `ray start` answers at {other}, and commands use that one; "
            "`ray stop` ends it."
        )
    with locked() as free:
        found = running()
        if found is not None and (found.version == this_version() or not free):
            return found
        if not free:
            raise UsageError("Another `raytrain up` is under way; wait for it.")
        if found is not None:
            end(found)
        return start(idle_minutes)


def running() -> WarmRay | None:
    """The cluster that is kept on this machine; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, psutil.Error):
        noted = json.loads(_file("json").read_text())  # another version may note more, or less
        found = WarmRay(**{field.name: noted.get(field.name) for field in dataclasses.fields(WarmRay)})
        if _KEEPER in psutil.Process(found.pid).cmdline():
            return found
    return None


def start(idle_minutes: float) -> WarmRay:
    """Have a cluster kept, and wait until it is there; raises UsageError with the reason if it cannot be.

    It ends when nobody has used it for ``idle_minutes``.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        keeper = subprocess.Popen(
            [sys.executable, "-m", _KEEPER, str(idle_minutes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
            cwd="/",
        )
        assert keeper.stdout is not None
        try:
            keeper.stdout.readline()
        except BaseException:
            keeper.terminate()
            raise
        if (found := running()) is None:
            keeper.wait()
            stderr.seek(0)
            reason = (stderr.read().strip().splitlines() or [f"exit status {keeper.returncode}"])[-1]
            raise UsageError(reason.removeprefix("raytrain.errors.UsageError: "))
    return found


def end(found: WarmRay) -> None:
    """End a kept cluster, and wait until it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        keeper = psutil.Process(found.pid)
        keeper.terminate()
        try:
            keeper.wait(_ENDS_WITHIN_S)
        except psutil.TimeoutExpired:
            keeper.kill()  # its Ray ends when its pipe closes


@contextlib.contextmanager
def locked(within_s: float = _LOCKED_WITHIN_S) -> Iterator[bool]:
    """Lock the kept cluster for this process, unless another one has it for longer than that; says whether it could."""
    until = time.monotonic() + within_s
    with open(_file("lock"), "w") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            if time.monotonic() >= until:
                yield False
                return
            time.sleep(_LOCK_AGAIN_S)


def remember(kept: WarmRay) -> None:
    """Note where the cluster is, for all commands of this user on this machine."""
    new = _file("new")
    new.write_text(json.dumps(dataclasses.asdict(kept)))
    new.rename(_file("json"))


def forget() -> None:
    """Remove the note of this process, if there is one."""
    if (found := running()) is not None and found.pid == os.getpid():
        _file("json").unlink(missing_ok=True)


def visible_gpus() -> str | None:
    """The GPUs that this process may use, and a cluster that it starts; None for all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def this_version() -> str:
    """What a kept cluster must have been started with: its processes have imported all that a run uses."""
    changed = max(file.stat().st_mtime for file in Path(raytrain.__path__[0]).rglob("*.py"))
    packages = " ".join(f"{name} {version(name)}" for name in ("raytrain", "ray", "torch"))
    return f"{packages}, {sys.executable}, {changed}"


def import_variables() -> str:
    """A digest of the variables that Python, Ray and torch may read when they are imported."""
    read = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)}
    return hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()


def _file(kind: str) -> Path:
    """A file of this user for this machine; several machines may share a home folder."""
    folder = Path.home() / ".ray"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder / f"raytrain-{socket.gethostname()}.{kind}"
