"""Connections to a page: few of strangers, and for seconds, since each takes a descriptor of a process that trains.

Any user of the machine can connect to a port of 127.0.0.1, and a process may have about a thousand files open: whoever
connects often enough and says nothing would end the run. So a connection is a stranger's until a request on it has
shown the token. A stranger has a few seconds for that, and of many strangers the oldest are hung up on: whoever opens
the page needs no longer than its files take to load. Those with the token stay, also beside a thousand strangers.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

MAX_STRANGERS = 64  # connections that have not shown the token
MAX_CONNECTIONS = 320  # all together; whoever has the token may open many pages
STRANGER_S = 10.0  # seconds for the files of the page, and for the head of the first request with the token
KEPT_ALIVE_S = 60.0  # seconds that a connection with the token may be idle between two requests
BACKLOG = 32  # connections that are accepted at a time, before the oldest are ended


class Connections:
    """Makes the protocol of each new connection to ``server``, for which old ones make room."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._trusted: set[web.RequestHandler] = set()

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection; asyncio calls this in its loop."""
        # The oldest strangers go first, and those with the token only if all connections are theirs.
        self._trusted.intersection_update(self._server.connections)
        strangers = [each for each in self._server.connections if each not in self._trusted]
        num_all = len(self._server.connections) + 1
        num_ended = max(len(strangers) + 1 - MAX_STRANGERS, num_all - MAX_CONNECTIONS, 0)
        for connection in [*strangers, *self._server.connections][:num_ended]:
            _end(connection)

        connection = self._server()
        asyncio.get_running_loop().call_later(STRANGER_S, self._end_stranger, connection)
        return connection

    def trust(self, connection: web.RequestHandler) -> None:
        """Keep a connection, on which a request has shown the token."""
        self._trusted.add(connection)

    def _end_stranger(self, connection: web.RequestHandler) -> None:
        if connection not in self._trusted:
            _end(connection)


def _end(connection: web.RequestHandler) -> None:
    # Closing would wait until the other side has read what was sent to it, which may be never.
    if connection.transport is not None:
        connection.transport.abort()
