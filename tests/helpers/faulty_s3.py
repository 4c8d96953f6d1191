"""A proxy in front of an S3 server that makes some requests fail: busy, reset, cut or stalled."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("busy", "reset", "cut", "stall")
_BUSY = (
    b"<?xml version='1.0' encoding='UTF-8'?>"
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
Interfere = Callable[[BaseHTTPRequestHandler, bytes], "str | bytes | None"]
"""Called first with a request and its body.

``reset`` resets the connection, bytes are the body of a 403 response, and None means a random outcome.
"""
Sign = Callable[[str, str, Mapping[str, str], bytes], Mapping[str, str]]
"""Returns the headers for the server, given a request's method, path, headers and body."""
_SILENT_S = 120.0  # longer than any client waits
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER of 0 seconds: closing sends RST


@dataclass
class FaultyS3:
    """The fraction of requests that fail, and the requests so far by outcome: one of FAULTS, or ``passed``."""

    url: str = ""
    fraction: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    max_at_once: int = 0
    _at_once: int = 0
    _attempts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())

    def num_requests_for(self, suffix: str) -> int:
        """Return the number of requests whose path ends in ``suffix``."""
        return sum(number for request, number in self._attempts.items() if request.endswith(suffix))

    def begin(self, request: str, seed: int) -> str:
        """Draw the outcome of a request from its object and attempt number only, not from threads or ports."""
        method, _, path = request.partition("?")[0].partition(" ")
        with self._lock:
            draw = random.Random(f"{seed} {method} {path.split('/')[-2:]} {self._attempts[request]}")
            outcome = draw.choice(FAULTS) if draw.random() < self.fraction else "passed"
            self._attempts[request] += 1
            self.outcomes[outcome] += 1
            self._at_once += 1
            self.max_at_once = max(self.max_at_once, self._at_once)
            return outcome

    def end(self) -> None:
        with self._lock:
            self._at_once -= 1


@contextmanager
def faulty_s3(
    endpoint_url: str,
    fraction: float = 0.0,
    *,
    seed: int = 0,
    silent_s: float = _SILENT_S,
    interfere: Interfere = lambda request, body: None,
    sign: Sign | None = None,
) -> Iterator[FaultyS3]:
    """Forward requests to the S3 server at ``endpoint_url``, and make ``fraction`` of them fail.

    A stalled request gets no answer; its connection is closed after ``silent_s``. Signatures stay valid because the
    Host header is forwarded unchanged; ``sign`` replaces them.
    """
    proxy, closing, upstream = FaultyS3(fraction=fraction), threading.Event(), urlsplit(endpoint_url).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            outcome = proxy.begin(f"{self.command} {self.path}", seed)
            try:
                self.serve(interfere(self, body) or outcome, body)
            finally:
                proxy.end()
            if outcome == "stall":
                closing.wait(silent_s)
                self.close_connection = True

        do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

        def serve(self, outcome: str | bytes, body: bytes) -> None:
            if isinstance(outcome, bytes):
                self.answer(403, {"Content-Type": "application/xml"}, outcome)
            elif outcome == "busy":
                self.answer(503, {"Content-Type": "application/xml"}, _BUSY)
            elif outcome == "reset":
                self.reset_connection()
            elif outcome in ("passed", "cut"):
                self.forward(body, cut=outcome == "cut")

        def forward(self, body: bytes, *, cut: bool) -> None:
            """Forward the request; ``cut`` drops the second half of the response, or all of it if it has no body."""
            connection = http.client.HTTPConnection(upstream)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            headers = dict(self.headers.items())
            for name, value in (sign(self.command, self.path, headers, body) if sign else headers).items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            content, headers = (
                answer.read(),
                {name: value for name, value in answer.getheaders() if name != "Transfer-Encoding"},
            )
            connection.close()
            headers.setdefault("Content-Length", str(len(content)))
            if cut and not content:
                self.reset_connection()
            else:
                self.answer(answer.status, headers, content[: len(content) // 2] if cut else content)
                self.close_connection = self.close_connection or cut

        def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def reset_connection(self) -> None:
            with suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                self.connection.close()
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            """Ignore clients that gave up."""

    server = Server(("127.0.0.1", 0), Handler)
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield proxy
    finally:
        closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
