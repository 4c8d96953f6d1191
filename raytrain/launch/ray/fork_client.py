"""Worker program that asks the fork server for a process.

Only Python's own modules are imported here, since this runs for each process. Without a fork server, Ray's own program
runs instead.
"""

import contextlib
import json
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

FORK_SERVER = "RAYTRAIN_FORK_SERVER"
"""The variable that names the socket of the fork server."""


def main(arguments: list[str]) -> None:
    """Start the process that Ray starts with ``arguments``, with the variables and the output of this one."""
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode() + b"\n"
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[FORK_SERVER])
        nothing = os.open(os.devnull, os.O_RDONLY)
        socket.send_fds(server, [b" "], [nothing, sys.stdout.fileno(), sys.stderr.fileno()])
        server.sendall(request)
        if server.recv(1):
            return
    run_program(arguments)


def run_program(arguments: list[str]) -> None:
    """Become the program that Ray would have started."""
    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    programs = Path(ray.origin).parent / "_private" / "workers"
    names = ["setup_worker.py"] * any(word.startswith("--language") for word in arguments) + ["default_worker.py"]
    os.execv(sys.executable, [sys.executable, *(str(programs / name) for name in names), *arguments])


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules are not Python's own
    main([word for word in sys.argv[1:] if word != sys.argv[0]])  # Ray names two programs, and both are this one
