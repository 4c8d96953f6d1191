"""An S3 server whose responses a test defines, for responses that a healthy server never sends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Request:
    method: str
    path: str
    access_key_id: str
    number: int
    """The number of earlier requests."""
    headers: Message


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut_after_bytes: int | None = None
    """Close the connection after this many bytes of the body; 0 closes it before anything is sent."""


def refusal(status: int, code: str, message: str = "Words of the server.") -> Answer:
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, f"<?xml version='1.0' encoding='UTF-8'?>\n{error}".encode())


@contextmanager
def scripted_s3(answer: Callable[[Request], Answer]) -> Iterator[tuple[str, list[Request]]]:
    """Serve ``answer`` on a free port. Yield the URL and a list to which each request is appended."""
    requests: list[Request] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(
                int(self.headers.get("Content-Length", 0))
            )  # Otherwise the body would be read as the next request.
            signature = self.headers.get("Authorization", "")
            with lock:
                key = signature.partition("Credential=")[2].partition("/")[0]
                request = Request(self.command, self.path, key, len(requests), self.headers)
                requests.append(request)
            self.send(answer(request))

        do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

        def send(self, reply: Answer) -> None:
            if reply.cut_after_bytes != 0:
                self.send_response(reply.status)
                for name, value in {"Content-Length": str(len(reply.body)), "ETag": '"1"', **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
                self.end_headers()
                self.wfile.write(reply.body[: reply.cut_after_bytes])
            if reply.cut_after_bytes is not None:
                with suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
