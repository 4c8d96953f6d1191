"""Calls of the coordinator by the workers of this machine, over a socket."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class CallAddress:
    """The path of the socket where calls are answered, and the key that a caller must know, which is never printed."""

    path: str
    key: bytes = field(repr=False)


class CallServer:
    """Answers calls of the methods of ``target`` at a socket in ``folder``, each connection in a thread of its own.

    A :class:`Caller` makes such calls. ``address`` is what it needs. An exception of a method is sent to the caller.
    """

    def __init__(self, folder: Path, target: object) -> None:
        self.address = CallAddress(str(folder / "calls"), secrets.token_bytes(32))
        self._target = target
        self._closed = False
        self._listener = Listener(self.address.path, family="AF_UNIX", backlog=64, authkey=self.address.key)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="calls")
        self._thread.start()

    def close(self) -> None:
        """Accept no further connection. Those that are open end with their callers."""
        self._closed = True
        # Connect once to wake the thread that accepts connections.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address.path)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        """Accept connections until this is closed, and serve each in a thread of its own."""
        while not self._closed:
            with suppress(OSError, EOFError, AuthenticationError):  # the caller is gone, or does not know the key
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="call").start()

    def _serve(self, connection: Connection) -> None:
        """Call the methods that a caller names, and send back the result or the exception of each, until it ends."""
        with connection, suppress(OSError, EOFError):  # the caller ends
            while True:
                name, arguments, options = connection.recv()
                try:
                    answer = (getattr(self._target, name)(*arguments, **options), None)
                except Exception as error:
                    answer = (None, error)
                connection.send(answer)


class Caller:
    """A connection to a :class:`CallServer`. Its calls may come from several threads, and wait for each other."""

    def __init__(self, address: CallAddress) -> None:
        self._connection = Client(address.path, authkey=address.key)
        self._lock = threading.Lock()

    def __call__(self, method: Callable[Concatenate[Any, P], T], *arguments: P.args, **options: P.kwargs) -> T:
        """Call ``method`` of the server's object; return its result, or raise its exception.

        Example: ``call(Coordinator.note_event, Note("worker 1 waits"))``
        """
        with self._lock:
            self._connection.send((method.__name__, arguments, options))
            answer, error = self._connection.recv()
        if error is not None:
            raise error
        return answer
