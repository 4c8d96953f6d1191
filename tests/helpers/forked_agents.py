"""Agents and decoding processes that are forked from a process which has imported torch once for all tests.

The imports of a new agent take four seconds of a core, and most runs of the tests less than one. A forked agent is what
a new one is from the moment at which it reads its run: it has a session of its own, the environment and the output of
the process that asked for it, and ends with that. Commands in processes of their own start new agents, and so do the
tests that ask for ``new_agents``. The same holds for the processes beside a loader, whose imports take one second, and
for ``new_decoders``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, reduction
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, Any

from raytrain.launch.local.local_launch import AgentProcess
from raytrain.loader.decoder_processes import NewProcess, serve_worker
from tests.helpers.gloo_processes import forking_context


def start_forked(agent: AgentProcess, environment: Mapping[str, str]) -> None:
    """Do what ``agent`` does when it is made, but for how the process starts."""
    read, write = os.pipe()
    files = tuple(map(PassedFile, (read, 1, 2)))
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    environment = {**os.environ, **environment, "PYTHONPATH": path}
    process = forking_context().Process(target=_run_agent, args=(files, environment), daemon=False)
    process.start()
    os.close(read)
    agent.process = Started(process, os.fdopen(write, "wb"))  # pyright: ignore[reportAttributeAccessIssue]


def start_forked_decoder(decoder: NewProcess, imports: Sequence[str]) -> None:
    """Do what ``decoder`` does when it is made, but for how the process starts."""
    decoder.connection, theirs = Pipe()
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    context = forking_context()
    process = context.Process(target=_run_decoder, args=(theirs, list(imports), environment, os.getcwd()), daemon=True)
    process.start()
    theirs.close()
    decoder.process = Started(process)  # pyright: ignore[reportAttributeAccessIssue]


class Started:
    """A process of ``multiprocessing``, with the members of ``subprocess.Popen`` that those who start one use."""

    def __init__(self, process: BaseProcess, stdin: IO[bytes] | None = None) -> None:
        assert process.pid is not None
        self._process, self.pid, self.stdin = process, process.pid, stdin

    def poll(self) -> int | None:
        """Return the exit code, or a signal's number below 0; None if the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the process has ended, at most ``timeout`` seconds; return its exit code, as :meth:`poll` does."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """End the process at once, if it runs."""
        self._process.kill()


class PassedFile:
    """An open file of this process, which another process gets as one of its own."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _detached, (reduction.DupFd(self._number),)


def _detached(passed: Any) -> int:
    return passed.detach()


def _run_agent(files: tuple[int, int, int], environment: dict[str, str]) -> None:
    """Be an agent, with ``files`` as standard input, output and errors."""
    from raytrain.launch.local import agent

    gc.freeze()
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 ; that of a process of multiprocessing is empty
    os.environ.clear()
    os.environ.update(environment)
    os.chdir("/")
    agent.main()


def _run_decoder(connection: Connection, imports: list[str], environment: dict[str, str], folder: str) -> None:
    """Be a process beside a loader."""
    gc.freeze()
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    serve_worker(connection, imports)
