"""A port that forwards to another one, as `ssh -L` does, and can lose its connections."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class DroppingProxy:
    """Forwards an address of this machine, by default a free port of it, to port ``target`` while it is open."""

    def __init__(self, target: int, at: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = target
        self._listener = socket.create_server(at)
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> DroppingProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.close()
        self.drop()

    def drop(self) -> None:
        """Lose all connections; new ones are accepted."""
        while self._sockets:
            with suppress(OSError):
                self._sockets.pop().shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
