"""Forwards to a server on this machine as if it were far away: each answer waits, and all of them share one line."""

from __future__ import annotations

import asyncio
import random
import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """How far away a server is."""

    first_byte_s: float = 0.03
    slow_fraction: float = 0.05
    slow_first_byte_s: float = 0.4
    bytes_per_s: float = 125e6


class SlowLine:
    """Forwards a free port of this machine to port ``target`` while it is open, in a thread of its own."""

    def __init__(self, target: int, line: Line | None = None) -> None:
        self._target = target
        self.line = line or Line()
        self.free_at = 0.0
        """When the line has carried all that was sent, by the clock of ``loop``."""
        self.random = random.Random(0)
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)

    def __enter__(self) -> SlowLine:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._serve(), self.loop).result()
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *exception: object) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def _serve(self) -> asyncio.Server:
        return await self.loop.create_server(lambda: _Near(self), "127.0.0.1", 0, backlog=1024)

    async def connect(self, near: _Near) -> None:
        await self.loop.create_connection(lambda: _Far(self, near), "127.0.0.1", self._target)

    def wait_s(self) -> float:
        """Seconds until the first byte of the next answer."""
        slow = self.random.random() < self.line.slow_fraction
        return self.line.slow_first_byte_s if slow else self.line.first_byte_s

    def carried_at(self, num_bytes: int) -> float:
        """When the line has carried the next bytes, too."""
        self.free_at = max(self.free_at, self.loop.time()) + num_bytes / self.line.bytes_per_s
        return self.free_at


class _Near(asyncio.Protocol):
    """A client's connection. A request waits before it is passed on, in place of its answer."""

    def __init__(self, line: SlowLine) -> None:
        self.line = line
        self.asking = False  # since the last answer
        self.pass_at = 0.0
        self.far: _Far | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport
        self._connecting = self.line.loop.create_task(self.line.connect(self))

    def data_received(self, data: bytes) -> None:
        if not self.asking:
            self.asking = True
            self.pass_at = self.line.loop.time() + self.line.wait_s()
        self.line.loop.call_at(self.pass_at, self.pass_on, data)

    def pass_on(self, data: bytes) -> None:
        if self.far is None:
            self.early.append(data)
        else:
            self.far.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.far is not None:
            self.far.transport.close()


class _Far(asyncio.Protocol):
    """The connection to the server. What comes back takes its time on the line."""

    def __init__(self, line: SlowLine, near: _Near) -> None:
        self.line = line
        self.near = near

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.Transport = transport
        self.near.far = self
        for data in self.near.early:
            transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.near.asking = False
        self.line.loop.call_at(self.line.carried_at(len(data)), self.near.transport.write, data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.line.loop.call_at(self.line.carried_at(0), self.near.transport.close)
