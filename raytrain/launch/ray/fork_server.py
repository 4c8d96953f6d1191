"""Fork server: imports Ray and torch once, and forks Ray's processes.

Otherwise some ten processes would import the same, which takes each of them five to ten seconds of a core.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass

from raytrain.launch.ray.fork_client import run_program
from raytrain.launch.ray.private_api import (
    RUNTIME_ENVIRONMENT,
    SETUP_ARGUMENTS,
    UPDATE_VARIABLES,
    WORKER_PROGRAM,
    unseeded_ids,
)


@dataclass(frozen=True)
class Process:
    """A process that Ray starts with these ``arguments``, with its variables and folder, for the ``client``."""

    arguments: list[str]
    variables: dict[str, str]
    folder: str
    client: socket.socket


def serve(path: str) -> socket.socket:
    """Fork a process at each connection to the socket at ``path``. Ends this process when its standard input ends.

    Returns in each of the forked processes, with the connection. Only that process reads the request: the variables in
    it may hold keys, and who sends it may be slow.
    """
    with socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as requests:
        server.bind(path)
        server.listen()  # requests wait from now on
        import_all()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # otherwise Ray would take a process that has ended for alive
        requests.register(server, selectors.EVENT_READ)
        requests.register(sys.stdin, selectors.EVENT_READ)
        while all(key.fileobj is server for key, _ in requests.select()):
            request, _ = server.accept()
            if not os.fork():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return request
            request.close()
    os._exit(0)


def import_all() -> None:
    """Import what coordinator, controller, workers and data tasks need."""
    import torch._dynamo  # noqa: F401 ; every optimizer imports it in its first step

    with unseeded_ids():
        import raytrain.launch.ray.coordinator
        import raytrain.launch.ray.worker  # noqa: F401

        for private in (WORKER_PROGRAM, SETUP_ARGUMENTS, RUNTIME_ENVIRONMENT, UPDATE_VARIABLES):
            private.load()
    gc.collect()
    gc.freeze()  # otherwise the first collection in each process would copy all objects


def read(request: socket.socket) -> Process:
    """What this process is to be, which was forked for a request, and has its streams from now on."""
    _, streams, _, _ = socket.recv_fds(request, 1, 3)
    with request.makefile("rb") as line:
        arguments, variables, folder = json.loads(line.readline())
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return Process(arguments, variables, folder, request)


def become(process: Process) -> None:
    """Be the process that was asked for, in one that was forked."""
    import numpy as np
    import torch

    os.chdir(process.folder)
    os.environ.clear()
    os.environ.update(process.variables)
    np.random.seed()  # otherwise all processes would draw the same; Python's own numbers differ already
    process.client.sendall(b"forked\n")
    process.client.close()
    of_job, arguments = SETUP_ARGUMENTS.load().parse_known_args(process.arguments)
    context = RUNTIME_ENVIRONMENT.load().deserialize(of_job.serialized_runtime_env_context or "{}")
    if context.command_prefix or context.py_executable != sys.executable or torch.cuda._is_in_bad_fork():
        run_program(process.arguments)
    UPDATE_VARIABLES.load()(context.env_vars)
    program: str = WORKER_PROGRAM.load()
    sys.argv = [program, *arguments]
    sys.path[0] = os.path.dirname(program)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    become(read(serve(sys.argv[1])))
