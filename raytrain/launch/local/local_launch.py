"""The workers of a run on this machine without Ray: torch's elastic agent starts them, they report over a socket."""

from __future__ import annotations

import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import cloudpickle

from raytrain.data.dataset import Dataset
from raytrain.launch.cache_choice import ImageCache, SharedImages, image_cache
from raytrain.launch.coordinator import Coordinator
from raytrain.launch.placement import machine_hardware, place
from raytrain.launch.prepare import PreparedRun
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.logs import WorkerLogs
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.training.run_spec import RunSpec


class LocalLaunch:
    """A :class:`Launch` on this machine with the workers of ``agent``; raises UsageError if it has too little."""

    def __init__(self, prepared: PreparedRun, agent: AgentProcess) -> None:
        placement = place(prepared.config, machine_hardware(prepared.config.gpus))
        self.num_workers = placement.num_workers
        self.config = prepared.resolve(placement.num_workers, placement.device)
        self._prepared = prepared
        self._shared: SharedImages | None = prepared.group and prepared.group.images
        self._agent = agent

    def start(self) -> Coordinator:
        """Start the workers."""
        prepared = self._prepared
        plan = prepared.data.plan(self.config)
        self._coordinator = Coordinator(
            prepared.name,
            prepared.store,
            num_steps=plan.num_steps,
            steps_per_epoch=plan.steps_per_epoch,
            skip_limit=prepared.skip_limit(),
            started_at=prepared.started_at,
        )
        with ExitStack() as opened:
            folder = opened.enter_context(TemporaryFolder())
            is_long = len(os.fsencode(folder)) > _MAX_SOCKET_FOLDER
            calls = CallServer(opened.enter_context(TemporaryFolder("/tmp")) if is_long else folder, self._coordinator)
            opened.callback(calls.close)
            cache = (self._shared and self._shared.cache) or image_cache(
                self.config, prepared.data, prepared.first_step, opened
            )
            opened.enter_context(WorkerLogs(prepared.store, folder))
            opened.callback(self._agent.close)
            self._agent.start_workers(
                RunSpec.of(self.config, prepared.data, prepared.store, prepared.loop, self.num_workers),
                Surroundings(
                    data=prepared.data.read_by(self.config),
                    first_step=prepared.first_step,
                    num_workers=self.num_workers,
                    cache=cache,
                    calls=calls.address,
                    folder=str(folder),
                ),
            )
            self._opened = opened.pop_all()
        return self._coordinator

    def look(self, snapshot: Snapshot) -> None:
        """Tell runs that share the images which of them cannot be used."""
        if self._shared is not None:
            self._shared.skip(self._coordinator.skipped_images())

    def wait(self, timeout_s: float) -> bool:
        """Wait until the agent has ended, or a worker has said how the run ends; returns whether the agent has."""
        self._coordinator.wait_for_end(timeout_s)
        return self._agent.has_ended

    def failure(self) -> str | None:
        """Nothing: the agent tells the coordinator whatever it knows."""
        return None

    def end_workers(self) -> None:
        """End all processes. What they have printed is copied when all is closed: the run is written down by then."""
        self._agent.close()
        if self._shared is not None:
            self._coordinator.skip(self._shared.skipped_images())

    def close(self, *, finished: bool) -> None:
        """Leave no process and no file of the workers behind."""
        self._opened.close()


_AGENT = "raytrain.launch.local.agent"
_MAX_SOCKET_FOLDER = 90  # bytes; the path of a socket may have 104, on Linux 108


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where the workers of a run get its images, and where they report. ``folder`` is for files of theirs."""

    data: Dataset
    first_step: int
    num_workers: int
    cache: ImageCache
    calls: CallAddress
    folder: str


class AgentProcess:
    """Imports torch when it is made, starts workers when it is given a run, and ends with this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        # Not in the current folder, where Python would look for modules first: a stranger's may hold a torch.py.
        self._process = subprocess.Popen(
            [sys.executable, "-m", _AGENT],
            stdin=subprocess.PIPE,
            cwd="/",
            env={**os.environ, **environment, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C is for this process, which asks the workers to stop
        )

    def start_workers(self, spec: RunSpec, here: Surroundings) -> None:
        """Start the workers of the run."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which whoever waits for it will see
            pickle.dump(os.getcwd(), self._process.stdin)
            cloudpickle.dump((spec, here), self._process.stdin)  # pyright: ignore[reportUnknownMemberType]
            self._process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        """Whether the agent has ended, and the workers with it."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the agent and all workers, whatever they do. May be called twice."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


@dataclass(frozen=True)
class CallAddress:
    """Where calls are answered, and the key that a caller must know."""

    path: str
    key: bytes = field(repr=False)


class CallServer:
    """Answers calls of the methods of ``target`` at a socket in ``folder``, each connection in a thread of its own."""

    def __init__(self, folder: Path, target: object) -> None:
        self.address = CallAddress(str(folder / "calls"), secrets.token_bytes(32))
        self._target = target
        self._closed = False
        self._listener = Listener(self.address.path, family="AF_UNIX", backlog=64, authkey=self.address.key)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="calls")
        self._thread.start()

    def close(self) -> None:
        """Accept no further connection."""
        self._closed = True
        # Wakes the thread that accepts, without waiting for its answer: it may have seen that the server is closed.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address.path)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            with suppress(OSError, EOFError, AuthenticationError):  # who called is gone, or a stranger
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="call").start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError):  # the caller ends
            while True:
                name, arguments = connection.recv()
                try:
                    answer = getattr(self._target, name)(*arguments), None
                except Exception as error:
                    answer = None, error
                connection.send(answer)


class Caller:
    """A connection to a :class:`CallServer`. Its calls may come from several threads, and wait for each other."""

    def __init__(self, address: CallAddress) -> None:
        self._connection = Client(address.path, authkey=address.key)
        self._lock = threading.Lock()

    def __call__(self, name: str, *arguments: Any) -> Any:
        """The answer of the method ``name`` to ``arguments``. Raises what it raises."""
        with self._lock:
            self._connection.send((name, arguments))
            answer, error = self._connection.recv()
        if error is not None:
            raise error
        return answer
