"""Have a command carried out by a process that is forked from the one which `raytrain up` keeps.

That one has imported Ray and torch, so the command starts at once. This process passes signals on, and waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from raytrain.backends.ray.forked_command import Command, do_nothing
from raytrain.backends.ray.warm_cluster import import_variables, running, this_version

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def carry_out(function: str, arguments: Mapping[str, Any]) -> int | None:
    """The exit code of ``function`` (``module:function``), which is called with ``arguments`` (JSON values).

    None if there is no process to fork, or if it has been started with other versions or variables. Then nothing has
    been done.
    """
    kept = running()
    if kept is None or not kept.fork_server:
        return None
    fits = kept.version == this_version() and kept.variables == import_variables()
    return _carry_out(kept.fork_server, function, arguments) if fits else None


def is_ready(fork_server: str) -> bool:
    """Wait until processes can be forked at this socket; False if they cannot be, because nobody listens."""
    return _carry_out(fork_server, f"{do_nothing.__module__}:{do_nothing.__name__}", {}) == 0


def _carry_out(fork_server: str, function: str, arguments: Mapping[str, Any]) -> int | None:
    umask = os.umask(0)
    os.umask(umask)
    command = Command(function, dict(arguments), [folder or os.getcwd() for folder in sys.path], umask)
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(fork_server)
            socket.send_fds(server, [b" "], [0, 1, 2])
            server.sendall(json.dumps([[], dict(os.environ), os.getcwd(), command]).encode() + b"\n")
        except OSError:  # it has just ended
            return None
        return _wait(server)


def _wait(server: socket.socket) -> int | None:
    """The exit code that the server tells; None if it has ended before it could fork."""
    with server.makefile("rb") as told:
        if not (child := told.readline()):
            return None
        with _signals_to(int(child)):
            server.sendall(b"\n")
            code = int(told.readline() or -signal.SIGKILL)
    if code < 0:
        print(f"raytrain: the command was ended by {signal.Signals(-code).name}.", file=sys.stderr)
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals_to(child: int) -> Iterator[None]:
    """While open, the signals of this process are passed on, but for those that it ignores, as under nohup.

    If the user stops it with Ctrl-Z, the child stops, too.
    """

    def pass_on(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    def stop(number: int, frame: FrameType | None) -> None:
        pass_on(signal.SIGSTOP, frame)
        os.kill(os.getpid(), signal.SIGSTOP)  # this process goes on from here
        pass_on(signal.SIGCONT, frame)

    handlers = {**dict.fromkeys(_PASSED_ON, pass_on), signal.SIGTSTP: stop}
    heard = {number: handler for number, handler in handlers.items() if signal.getsignal(number) != signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
