"""Fork server: imports Ray and torch once, and forks Ray's processes of one user on one node.

Without it, about ten processes would import the same modules, which takes each of them five to ten seconds of a core.
The first ``fork_client.py`` starts it, and it ends when it has had no process for a while.

The protocol, over an abstract socket, at which each end checks that the other one belongs to the same user:

1. The client sends the descriptors of its streams, and a line of JSON with everything that the process takes over from
   it. Only the forked process reads these, because the variables may hold keys, and a client may be slow.
2. The process takes them over and answers ``ready``. If it ends instead, the client runs Ray's own program.
3. The client sends ``go`` and ends, and the process becomes Ray's worker. If the client has died before, it ends.

A client that connects and sends nothing keeps the server alive.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.path[0]  # modules in this folder must not take the place of Python's own
    _ROOT = str(Path(__file__).resolve().parents[3])
    if _ROOT not in sys.path:  # this raytrain came with a job, and another version may be installed
        sys.path.insert(0, _ROOT)

import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import SimpleNamespace
from typing import Any

from raytrain.launch.ray.fork_client import GO, READY, ray_program, user_of
from raytrain.launch.ray.own_cluster import lean_imports
from raytrain.launch.ray.private_api import FORKED_PROCESSES, LATE_VARIABLES, read_variables

IDLE_S = 15.0
_NEEDED_IN_A_STEP = "torch._dynamo"  # every optimizer imports it in its first step
_FIRST_REQUESTS = 2  # on the driver's node: the driver's own connection, and its coordinator, for which all wait


def serve(listener: socket.socket) -> socket.socket:
    """Fork a process for each connection; the function returns only in the forked process, with the connection.

    The server itself ends when it has had no process for 15 seconds.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # otherwise ended processes stay as zombies, which look alive to Ray
    listener.settimeout(IDLE_S)
    num_requests = 0
    while True:
        # Import the rest, which takes half a second of a core, once the first processes start and no client waits.
        import_is_due = num_requests >= _FIRST_REQUESTS and _NEEDED_IN_A_STEP not in sys.modules
        if import_is_due and not select.select([listener], [], [], 0)[0]:
            with importing():
                importlib.import_module(_NEEDED_IN_A_STEP)

        # The server outlives its processes by some seconds, because a start is faster while it runs.
        try:
            request, _ = listener.accept()
        except TimeoutError:
            if has_processes():
                continue
            os._exit(0)

        # Any user of the node can connect to an abstract socket, but the process would have this user's rights.
        if user_of(request) != os.getuid():
            request.close()
            continue
        if not os.fork():
            os.setpgid(0, 0)  # when a process ends, Ray kills its whole group
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return request
        request.close()
        num_requests += 1


def has_processes() -> bool:
    """Return whether a forked process still runs."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


@contextmanager
def unseeded_ids() -> Iterator[None]:
    """Have the system draw the ID of each class that is declared an actor during the ``with`` block.

    Ray itself draws it from a generator that it seeds at the first use. If that happened before the fork, all forked
    processes would draw the same IDs for their tasks, and an actor that gets two tasks with one ID crashes. Raises
    ImportError if this Ray has no such class of IDs.
    """
    api = FORKED_PROCESSES.find()
    if api is None:
        raise ImportError(FORKED_PROCESSES.lost)
    _, id_class = api
    module: Any = importlib.import_module("ray.actor")
    module.ActorClassID = SimpleNamespace(from_random=lambda: id_class(os.urandom(id_class.size())))
    try:
        yield
    finally:
        module.ActorClassID = id_class


def import_all() -> None:
    """Import the packages that coordinator, controller, workers and data tasks need from their start."""
    with importing(), lean_imports(), unseeded_ids():
        import raytrain.launch.ray.coordinator
        import raytrain.launch.ray.worker  # noqa: F401


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage in this context, and none of what it imports afterwards.

    Garbage collection takes a quarter of the time of imports, and finds next to nothing. Afterwards, the first one in
    each forked process would copy all objects.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def receive_traits(request: socket.socket) -> dict[str, Any]:
    """Return the traits that the client sends, and take over its streams: input, output and errors.

    Ends this process if the client sends nothing, as one does that only keeps the server alive.
    """
    message, streams, _, _ = socket.recv_fds(request, 1, 3)
    if not message:
        os._exit(0)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with request.makefile("rb") as line:
        return json.loads(line.readline())


def take_over(traits: dict[str, Any]) -> None:
    """Become like the client, which ``traits`` describe, and end with its raylet, if it has one.

    Raises OSError or ValueError if this process may not become like the client, and ImportError if its PYTHONPATH has
    other versions of what is imported here.
    """
    import numpy as np
    import torch

    def end_with(raylet: int) -> None:
        select.select([raylet], [], [])  # waits until the process of this descriptor has ended
        os._exit(1)

    # The properties that the system keeps for a process.
    os.chdir(traits["folder"])
    os.umask(traits["umask"])
    Path("/proc/self/oom_score_adj").write_text(traits["oom_score"])
    os.setpriority(os.PRIO_PROCESS, 0, traits["niceness"])
    os.sched_setaffinity(0, traits["cores"])
    for kind, soft, hard in traits["limits"]:
        resource.setrlimit(kind, (soft, hard))
    os.environ.clear()
    os.environ.update(traits["variables"])
    read_variables()
    time.tzset()  # TZ
    tempfile.tempdir = None  # Python reads TMPDIR at the first use, which was during an import

    # Ray's workers end with the raylet, which is normally their parent; this process has to watch it.
    if raylet := os.environ.get("RAY_RAYLET_PID"):
        threading.Thread(target=end_with, args=(os.pidfd_open(int(raylet)),), daemon=True).start()

    # The state of Python and its libraries.
    np.random.seed()  # otherwise all processes would draw the same numbers; Python reseeds its own after a fork
    torch.seed()
    sys.argv = traits["arguments"]
    sys.path[:0] = [os.path.dirname(sys.argv[0]), *python_path()]


def python_path() -> list[str]:
    """Return the folders of PYTHONPATH; raise ImportError if one has another file for a module that is imported."""
    folders = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    for folder in filter(os.path.isdir, folders):
        for name in {entry.partition(".")[0] for entry in os.listdir(folder)} & sys.modules.keys():
            # Most entries of such a name are no module: logging.yaml, or a folder without Python files, such as site,
            # which Python imports only if no other folder has a module of this name.
            spec = PathFinder.find_spec(name, [folder])
            file = getattr(sys.modules[name], "__file__", None)
            if spec and spec.loader and spec.origin and file and not os.path.samefile(file, spec.origin):
                raise ImportError(f"{name} of {folder} would be imported in place of {file}")
    return folders


def main() -> None:
    """Serve at the socket that the first client has passed on; each forked process becomes what its client asks for.

    Raises ImportError, which ends the server, if this Python has another Ray than the client's, or one whose processes
    cannot be forked.
    """
    _, descriptor, program = sys.argv
    with socket.socket(fileno=int(descriptor)) as listener:
        if not os.path.samefile(ray_program(), program):
            raise ImportError(f"{program} is of another Ray")
        import_all()
        if LATE_VARIABLES.find() is None:
            raise ImportError(LATE_VARIABLES.lost)
        request = serve(listener)
    with request:
        take_over(receive_traits(request))
        request.sendall(READY)
        if request.recv(len(GO)) != GO:
            os._exit(0)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
