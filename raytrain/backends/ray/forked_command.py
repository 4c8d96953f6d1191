"""A command that was given to the fork server: the process that carries it out, and the one that watches over that."""

from __future__ import annotations

import importlib
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn


class Command(NamedTuple):
    """A function (``module:function``) with its arguments; it returns an exit code. ``path`` and ``umask`` are those
    of the process that the user started.
    """

    function: str
    arguments: dict[str, Any]
    path: list[str]
    umask: int


def carry_out(command: Command, client: socket.socket) -> NoReturn:
    """Carry out a command in a child of this process. Tells the client the child's number, and how it has ended.

    The child begins when the client has answered that it passes signals on. If the client ends, the child gets a
    SIGTERM, which ends a run with a checkpoint.
    """
    begins, begin = os.pipe()
    child = os.fork()
    if not child:
        client.close()
        os.close(begin)
        os.read(begins, 1)
        os._exit(_call(command))
    client.sendall(f"{child}\n".encode())
    client.recv(1)
    os.close(begin)
    _wait(child, client)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):  # the client has ended
        client.sendall(f"{code}\n".encode())
    os._exit(0)


def do_nothing() -> int:
    """A command that says by its end that commands can be carried out."""
    return 0


def _wait(child: int, client: socket.socket) -> None:
    """Return when the child has ended."""
    ended = os.pidfd_open(child)
    with selectors.DefaultSelector() as events:
        events.register(ended, selectors.EVENT_READ)
        events.register(client, selectors.EVENT_READ)
        while not any(key.fileobj == ended for key, _ in events.select()):
            events.unregister(client)  # it never writes again: this is its end
            os.kill(child, signal.SIGTERM)


def _call(command: Command) -> int:
    """Be the process that the user started, as far as the command can tell."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # whoever keeps Ray ignores some
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.umask(command.umask)
    sys.path[:] = command.path
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream.isatty() or stream is sys.stderr)  # pyright: ignore
    module, _, name = command.function.partition(":")
    code: int = getattr(importlib.import_module(module), name)(**command.arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    return code
