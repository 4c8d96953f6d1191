"""Starts and ends the process of torch's elastic agent, and what it is given."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import cloudpickle

from raytrain.config import ResolvedConfig
from raytrain.data.dataset import Dataset
from raytrain.launch.cache_choice import ImageCache
from raytrain.launch.local.calls import CallAddress
from raytrain.launch.prepare import Loop
from raytrain.storage.store import Store

_AGENT = "raytrain.launch.local.agent"


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """A run as its workers, and the agent that starts them, get it. ``folder`` is for their files. Holds no secret.

    ``loop`` is the caller's own; None if the options name one, or none.
    """

    config: ResolvedConfig
    loop: Loop | None
    data: Dataset
    store: Store  # of the run
    first_step: int
    num_workers: int
    cache: ImageCache
    calls: CallAddress
    folder: str


class AgentProcess:
    """Starts to import torch when it is made, and starts workers when it is given a task.

    ``environment`` is added to this process's. The agent and its workers end with this process, however it ends.
    """

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

    def start_workers(self, task: WorkerTask) -> None:
        """Start the workers of ``task``."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which whoever waits for it will see
            pickle.dump(os.getcwd(), self._process.stdin)
            cloudpickle.dump(task, self._process.stdin)  # pyright: ignore[reportUnknownMemberType]
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
