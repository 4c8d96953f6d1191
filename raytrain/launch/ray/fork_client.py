"""The program that Ray runs for each worker process, and which asks the fork server for the process.

A Ray that a run starts gets it as its worker program. A Ray that a run joins gets it as ``py_executable`` in the
runtime environment of the run's job, which takes a third of a second more for each process. Because it runs once for
each process, it imports only modules of Python's own. If anything goes wrong, it runs Ray's own program. The protocol
is described in ``fork_server.py``.
"""

import os
import sys

if __name__ == "__main__":  # modules in this folder must not take the place of Python's own
    sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(__file__)]

import contextlib
import hashlib
import json
import resource
import shlex
import socket
import struct
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

READY, GO = b"ready\n", b"go\n"
_RAYS_LIMIT, _RAYS_DEFAULT_S = "RAY_worker_register_timeout_seconds", "60"  # Ray's variable: how long a start may take
_BACKLOG = 128
CONNECTS_WITHIN_S = 10  # while the server imports, it accepts no connection, and its queue may be full
_ROOT = Path(__file__).resolve().parents[2]  # the package
_SERVER = Path(__file__).with_name("fork_server.py")
_AT_START = (
    *("HOME", "LANG", "LC_", "LD_", "MALLOC_", "GLIBC_TUNABLES", "PYTHON"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NPY_", "NUMEXPR_", "ARROW_", "ATEN_", "DNNL_", "ONEDNN_"),
    *("TORCH", "PYTORCH_", "AOT_", "AOTINDUCTOR_", "TRITON_"),  # also TORCHDYNAMO_, TORCHINDUCTOR_
)
"""Prefixes of variables that a running process cannot take over, because a library reads them when it is loaded."""
_WAITS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "2000"}
"""As in ``raytrain.launch``, so that driver and raylet ask the same server."""
_ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Ray calls a loop in a thread of its own. By default, glibc returns a thread's memory to the system as soon as 64 MiB
of it are free, so each step gets it anew, page by page: up to 19,000 page faults and 5 % of the time of a step."""
_FOR_RAY = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": "1"}
"""Ray reads these once, when it is imported: no job yet, and a process that never ends in place of the raylet."""
_OF_A_CONTAINER = "ns/mnt", "ns/pid", "ns/net", "ns/user", "cgroup"  # files in /proc/self that identify a container
_STARTED: list[subprocess.Popen[bytes]] = []  # kept, because Python warns if a Popen of a running process is deleted
_OOM_SCORE = "/proc/self/oom_score_adj"


def worker_program() -> str | None:
    """Return the Python program that a new Ray should run for each process; None if this system cannot fork."""
    return __file__ if sys.platform == "linux" else None  # the system libraries of macOS do not survive a fork


def py_executable() -> str | None:
    """Return the shell command that a running Ray should use as Python for its worker program; None without fork.

    On a node without this Python or raytrain, the command runs the Python in which Ray is installed.
    """
    if worker_program() is None:
        return None
    python, client = shlex.quote(sys.executable), shlex.quote(__file__)
    script = (
        f'[ -x {python} ] && [ -f {client} ] && exec {python} -I -S {client} "$@"; '
        'exec "${1%/lib/python*}/bin/python" "$@"'
    )
    return f"sh -c {shlex.quote(script)} sh"


def keep_server() -> contextlib.AbstractContextManager[Any]:
    """Start this node's fork server unless it runs; it lives at least as long as the returned connection is open.

    If that fails, or on another system than Linux, the returned context does nothing.
    """
    with contextlib.suppress(OSError):
        if sys.platform == "linux":
            return connect(ray_program())
    return contextlib.nullcontext()


def ray_program() -> str:
    """Return Ray's own worker program in this Python; see ``FORKED_PROCESSES`` in ``private_api.py``."""
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    return str(Path(ray.origin).parent / "_private" / "workers" / "default_worker.py")


def connect(program: str) -> socket.socket:
    """Return a connection to this user's fork server, which is started if there is none.

    Raises OSError if another user listens in its place, or if the connection is not made within 10 seconds.
    """
    address = server_address(program)
    with socket.socket(socket.AF_UNIX) as listener, contextlib.suppress(OSError):  # if the address is in use, it runs
        listener.bind(address)
        listener.listen(_BACKLOG)
        # The server inherits the socket, where requests wait while it imports.
        server = subprocess.Popen(
            [sys.executable, str(_SERVER), str(listener.fileno()), program],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # if it fails, Ray's own program runs, and reports what is wrong
            start_new_session=True,
            cwd="/",
            env=start_variables(),
        )
        _STARTED.append(server)
    connection = socket.socket(socket.AF_UNIX)
    try:
        # Not settimeout(): then connect() would fail at once if the queue is full.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CONNECTS_WITHIN_S, 0))
        connection.connect(address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        if user_of(connection) != os.getuid():
            raise PermissionError("another user listens in place of this user's fork server")
    except OSError:
        connection.close()
        raise
    return connection


def user_of(connection: socket.socket) -> int:
    """Return the ID of the user whose process is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _process, user, _group = struct.unpack("3i", credentials)
    return user


def start_variables() -> dict[str, str]:
    """Return the variables with which a fork server starts.

    These are the variables of this process that libraries read when they are loaded, and raytrain's settings of such
    variables, unless the user has set them. None contains keys or the address of a cluster: a forked process takes over
    all other variables from its client.
    """
    present = {name: value for name, value in os.environ.items() if name.startswith(_AT_START) and name != "PYTHONPATH"}
    waits = {} if _WAITS.keys() & present.keys() else _WAITS  # a user who sets one of them decides on both
    return _ONE_ARENA | waits | present | _FOR_RAY


def server_address(program: str) -> bytes:
    """Return the abstract socket of the fork server that fits this process.

    A process with another user, code, Python, Ray, container, control group or other start variables gets another
    address, because what this server forks would not fit it.
    """
    files_of_container = [Path(f"/proc/self/{name}") for name in _OF_A_CONTAINER]
    features = [
        os.getuid(),
        sys.executable,
        str(_SERVER),
        max(file.stat().st_mtime_ns for file in _ROOT.rglob("*.py")),  # changes with the code of raytrain
        program,
        Path(program).parents[3].stat().st_mtime_ns,  # changes with the packages that are installed
        [os.readlink(file) if file.is_symlink() else file.read_text() for file in files_of_container],
        sorted(start_variables().items()),
    ]
    return b"\0raytrain-" + hashlib.sha256(json.dumps(features).encode()).hexdigest()[:32].encode()


def main(arguments: list[str]) -> None:
    """Start the process that Ray wants with ``arguments``, with the variables and the output of this one.

    ``arguments`` are the path of Ray's worker program and its options. If the fork server cannot start the process,
    this one becomes Ray's program.
    """
    with contextlib.suppress(OSError, IndexError), connect(arguments[0]) as server:
        # Ray's own program needs the rest of the time in which Ray expects the process.
        server.settimeout(float(os.environ.get(_RAYS_LIMIT, _RAYS_DEFAULT_S)) * 2 / 3)
        with open(os.devnull) as no_input:
            streams = [no_input.fileno(), sys.stdout.fileno(), sys.stderr.fileno()]
            socket.send_fds(server, [b" "], streams)
        server.sendall(json.dumps(traits(arguments)).encode() + b"\n")
        if server.recv(len(READY)) == READY:
            server.sendall(GO)  # the forked process takes the place of this one
            return
    run_program(arguments)


def traits(arguments: list[str]) -> dict[str, Any]:
    """Return everything that the forked process takes over from this one, but for its streams."""
    mask = os.umask(0o077)  # the only call that returns the mask also sets another one
    os.umask(mask)
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "arguments": arguments,
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "umask": mask,
        "limits": [(getattr(resource, name), *resource.getrlimit(getattr(resource, name))) for name in names],
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "cores": sorted(os.sched_getaffinity(0)),
        "oom_score": Path(_OOM_SCORE).read_text(),
    }


def run_program(arguments: list[str]) -> None:
    """Become the program that Ray would have started, in the Python in which that Ray is installed.

    This program's own Python is used if that one is not found.
    """
    python = arguments[0].rpartition("/lib/python")[0] + "/bin/python"
    if not os.access(python, os.X_OK):
        python = sys.executable
    os.execv(python, [python, *arguments])


if __name__ == "__main__":
    # A worker program gets Ray's options only; a py_executable gets Ray's own program before them.
    words = sys.argv[1:]
    main([ray_program(), *words] if words[0].startswith("-") else words)
