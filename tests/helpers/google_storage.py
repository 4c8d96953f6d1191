"""A stand-in for Google Cloud Storage: what its XML API does of what stores use, as Google's documents describe it."""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.message import Message
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 7  # names, so that listings of a few objects have several pages


@dataclass(frozen=True)
class Stored:
    content: bytes
    generation: int
    modified: datetime

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.content).hexdigest()}"'


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def refusal(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code><Message>Words of the server.</Message></Error>".encode())


class GoogleStorage:
    """A bucket ``tests`` for whoever shows one of ``tokens``."""

    def __init__(self) -> None:
        self.endpoint_url = ""
        self.tokens = {"anonymous"}
        self.shown: list[str] = []
        """The tokens of all requests."""
        self.before_conditional_put: Callable[[], None] = lambda: None
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def answer(self, method: str, url: str, headers: Message, body: bytes) -> Answer:
        """What the server says to a request."""
        parts = urlsplit(url)
        bucket, _, name = unquote(parts.path[1:]).partition("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        if "x-goog-if-generation-match" in headers:
            self.before_conditional_put()
        with self._lock:
            self.shown.append(token)
            if token not in self.tokens:
                return refusal(401, "AuthenticationRequired")
            if bucket != "tests":
                return refusal(404, "NoSuchBucket")
            if not name:
                return self._list(query)
            if "uploads" in query or "uploadId" in query:
                return self._upload(method, name, query, body)
            return self._one(method, name, headers, body)

    def _one(self, method: str, name: str, headers: Message, body: bytes) -> Answer:
        found = self._objects.get(name)
        if method == "PUT":
            wanted = headers.get("x-goog-if-generation-match")
            if wanted is not None and int(wanted) != (found.generation if found else 0):
                return refusal(412, "PreconditionFailed")
            return self._put(name, body)
        if found is None:
            return refusal(404, "NoSuchKey")
        if method == "DELETE":
            del self._objects[name]
            return Answer(204)
        return self._read(found, headers.get("Range"))

    def _put(self, name: str, content: bytes) -> Answer:
        self._objects[name] = stored = Stored(content, next(self._numbers), datetime.now(timezone.utc))
        return Answer(headers={"ETag": stored.etag, "x-goog-generation": str(stored.generation)})

    def _read(self, found: Stored, asked: str | None) -> Answer:
        about = {
            "ETag": found.etag,
            "x-goog-generation": str(found.generation),
            "Last-Modified": format_datetime(found.modified, usegmt=True),
        }
        if asked is None:
            return Answer(200, found.content, about)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = found.content[int(first) : int(last) + 1]
        span = f"bytes {first}-{int(first) + len(part) - 1}/{len(found.content)}"
        return Answer(206, part, {**about, "Content-Range": span})

    def _upload(self, method: str, name: str, query: Mapping[str, str], body: bytes) -> Answer:
        if "uploads" in query:
            upload = f"upload-{next(self._numbers)}"
            self._uploads[upload] = {}
            return Answer(
                body=f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>".encode()
            )
        parts = self._uploads[query["uploadId"]]
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return Answer(headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if method == "DELETE":
            return Answer(204)
        answer = self._put(name, b"".join(parts[number] for number in sorted(parts)))
        etag = answer.headers["ETag"]
        return Answer(
            body=f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>".encode(),
            headers=answer.headers,
        )

    def _list(self, query: Mapping[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = max(query.get("start-after", ""), query.get("continuation-token", ""))
        entries: dict[str, str] = {}
        for name, stored in sorted(self._objects.items()):
            rest = name[len(prefix) :]
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                folder = prefix + rest.partition(delimiter)[0] + delimiter
                entries[folder] = f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            else:
                entries[name] = (
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(stored.content)}</Size>"
                    f"<LastModified>{stored.modified.isoformat()}</LastModified><ETag>{stored.etag}</ETag></Contents>"
                )
        left = [name for name in sorted(entries) if name > after]
        more = f"<NextContinuationToken>{escape(left[PAGE - 1])}</NextContinuationToken>" if len(left) > PAGE else ""
        listed = "".join(entries[name] for name in left[:PAGE])
        return Answer(body=f"<ListBucketResult>{listed}{more}</ListBucketResult>".encode())


@contextmanager
def google_storage() -> Iterator[GoogleStorage]:
    """Serve the stand-in on a free port."""
    storage = GoogleStorage()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = storage.answer(self.command, self.path, self.headers, body)
            self.send_response(answer.status)
            for name, value in {**answer.headers, "Content-Length": str(len(answer.body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        do_PUT = do_HEAD = do_DELETE = do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        storage.endpoint_url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield storage
        finally:
            server.shutdown()
