"""Agents of the local backend that are forked from a process which has imported torch once for all tests.

The imports of a new agent take four seconds of a core, and most runs of the tests less than one. A forked agent is what
a new one is from the moment at which it reads its run: it has a session of its own, the environment and the output of
the process that asked for it, and ends with that. Commands in processes of their own start new agents, and so do the
tests that ask for ``new_agents``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from typing import IO, Any

from raytrain.launch.local.local_launch import AgentProcess
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
    # Private, as the start alone is another: all that is done with the process is the agent's own code.
    agent._process = Started(process, os.fdopen(write, "wb"))  # pyright: ignore[reportAttributeAccessIssue]


class Started:
    """A process of ``multiprocessing``, with the members of ``subprocess.Popen`` that an agent's starter uses."""

    def __init__(self, process: BaseProcess, stdin: IO[bytes]) -> None:
        assert process.pid is not None
        self._process, self.pid, self.stdin = process, process.pid, stdin

    def poll(self) -> int | None:
        """Return the exit code, or a signal's number below 0; None if the process runs."""
        return self._process.exitcode

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.join()


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

    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 ; that of a process of multiprocessing is empty
    os.environ.clear()
    os.environ.update(environment)
    os.chdir("/")
    agent.main()
