"""Calls from workers to the process that started them, over a socket of this user's."""

from __future__ import annotations

import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class CallAddress:
    """Where calls are answered, and the key that a caller must know."""

    path: str
    key: bytes = field(repr=False)


class CallServer:
    """Answers calls of the methods of ``target`` at a socket in ``folder``, each connection in a thread of its own."""

    def __init__(self, folder: Path, target: object) -> None:
        self.address = CallAddress(str(folder / "calls"), secrets.token_bytes(32))
        self._target = target
        self._closed = False
        self._listener = Listener(self.address.path, family="AF_UNIX", backlog=64, authkey=self.address.key)
        self._thread = threading.Thread(target=self._accept, daemon=True, name="calls")
        self._thread.start()

    def close(self) -> None:
        """Accept no further connection."""
        self._closed = True
        # Wakes the thread that accepts, without waiting for its answer: it may have seen that the server is closed.
        with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address.path)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            with suppress(OSError, EOFError, AuthenticationError):  # who called is gone, or a stranger
                connection = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True, name="call").start()

    def _serve(self, connection: Connection) -> None:
        with connection, suppress(OSError, EOFError):  # the caller ends
            while True:
                name, arguments = connection.recv()
                connection.send(self._answer(name, arguments))

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        try:
            return getattr(self._target, name)(*arguments), None
        except Exception as error:
            return None, error


class Caller:
    """A connection to a :class:`CallServer`. Its calls may come from several threads, and wait for each other."""

    def __init__(self, address: CallAddress) -> None:
        self._connection = Client(address.path, authkey=address.key)
        self._lock = threading.Lock()

    def __call__(self, name: str, *arguments: Any) -> Any:
        """The answer of the method ``name`` to ``arguments``. Raises what it raises."""
        with self._lock:
            self._connection.send((name, arguments))
            answer, error = self._connection.recv()
        if error is not None:
            raise error
        return answer
