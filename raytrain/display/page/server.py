"""Serves the page of some runs on this machine: its files, changes as server-sent events, and the Stop button.

Only viewers with the token may see or stop a run. The token is in the fragment of the page's address, which browsers do
not send to any server; the page sends it in a header of its own, which no other site can. There is no cookie.

Any user of the machine can connect to a port of 127.0.0.1, and a process may have about a thousand files open, so many
silent connections could end the run. That is why a connection is a stranger's until a request on it has shown the
token. A stranger has a few seconds for that, as long as the files of the page take to load; if there are too many
strangers, the oldest connections are ended. Those with the token stay, also beside a thousand strangers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from raytrain.config.option_values import MAX_PORT
from raytrain.display.page.feed import FeedCursor, RunFeed
from raytrain.display.page.watched_runs import HomeRuns, WatchedRuns
from raytrain.errors import RaytrainError, UsageError
from raytrain.runs.documents import warn_once
from raytrain.runs.redact import one_line

DEFAULT_PORT = 8266  # next to that of Ray's dashboard
TOKEN_HEADER = "X-Raytrain-Token"
_HOST = "127.0.0.1"
MAX_STRANGERS = 64  # connections that have not shown the token
MAX_CONNECTIONS = 320  # all together; whoever has the token may open many pages
STRANGER_S = 10.0  # seconds for the files of the page, and for the head of the first request with the token
KEPT_ALIVE_S = 60.0  # seconds that a connection with the token may be idle between two requests
BACKLOG = 32  # connections that are accepted at a time, before the oldest are ended
_UPDATE_EVERY_S = 0.5  # the shortest time between two messages to a viewer
_COMMENT_EVERY_S = 10.0  # without a change: see _send_updates
_SLOWEST_WRITE_S = 30.0  # a viewer that takes longer is gone; its page would reconnect
_LAST_WORDS_S = 3.0  # seconds for the last messages to viewers, and for what their pages ask because of them
_STEP_DIGITS = 18  # as many as fit into 64 bits
_STATIC = files("raytrain.display.page") / "static"
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_QUIET = logging.Logger("aiohttp.server", logging.CRITICAL)  # aiohttp logs each malformed request with a traceback
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Query = Mapping[str, str]


class PageServer:
    """Serves the page of ``runs`` to this machine, in a thread, while it is open.

    ``port`` 0 is any that is free; None is :data:`DEFAULT_PORT`, or any if that is taken. Raises UsageError if
    ``port`` is no number of a port, and, when it is opened, if the port cannot be used.
    """

    def __init__(self, runs: WatchedRuns, port: int | None = None) -> None:
        if port is not None and not 0 <= port <= MAX_PORT:
            raise UsageError(f"--port is {port}; a port is a number from 1 to {MAX_PORT}, or 0 for any that is free.")
        self._runs = runs
        self._port = port
        self._token = secrets.token_urlsafe(24)
        # Only the thread of the event loop uses what follows, apart from calls that are safe from any thread.
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._closing = False
        self._viewers: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="page")

    def __enter__(self) -> PageServer:
        self._thread.start()
        try:
            self._port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self._end_thread()
            raise
        self._runs.on_change = lambda: self._loop.call_soon_threadsafe(self._wake_viewers)
        return self

    def __exit__(self, *exception: object) -> None:
        """Send every viewer the last state of the runs, and close."""
        self._runs.on_change = lambda: None
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._end_thread()

    @property
    def url(self) -> str:
        """The address of the page, with the token: ``http://127.0.0.1:8266/#token=…``."""
        return f"http://{_HOST}:{self._port}/#token={self._token}"

    async def _start(self) -> int:
        """Listen, and return the port; raise UsageError if that cannot be used."""
        app = web.Application(middlewares=[self._guard], client_max_size=10_000)

        # The files of the page.
        app.router.add_get("/", _file)
        for file in _STATIC.iterdir():
            app.router.add_get(f"/{file.name}", _file)

        # Changes, as long as a viewer listens.
        app.router.add_get("/api/events", self._events)

        # Requests of the page, most of them about ``?run=NAME``.
        runs = self._runs
        questions: dict[tuple[str, str], Callable[[Query], object]] = {
            ("GET", "curves"): self._curves,
            ("GET", "documents"): lambda query: runs.documents(self._feed(query).name),
            ("GET", "machines"): lambda query: runs.machine_history(self._feed(query).name),
            ("POST", "stop"): lambda query: runs.stop(self._feed(query).name) or {},
        }
        if isinstance(runs, HomeRuns):
            questions["GET", "runs"] = lambda query: runs.all_runs()
            questions["POST", "open"] = lambda query: {"runs": runs.open(query.get("run", ""))}
        for (method, path), ask in questions.items():
            app.router.add_route(method, f"/api/{path}", partial(_answer, ask))

        # Neither a stranger's requests nor broken connections may fill the terminal of the run with tracebacks.
        self._loop.set_exception_handler(lambda loop, context: _warn_of(context.get("exception"), context["message"]))
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_QUIET,
            keepalive_timeout=KEPT_ALIVE_S,
            shutdown_timeout=_LAST_WORDS_S,
            handler_cancellation=True,  # a page that is closed, or has all that it wants, ends its handler at once
        )
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = _Connections(self._runner.server)

        # If nobody has named a port, try the usual one, and then any that is free.
        reason = "used by another program"
        for port in [DEFAULT_PORT, 0] if self._port is None else [self._port]:
            try:
                self._listener = await self._loop.create_server(self._connections, _HOST, port, backlog=BACKLOG)
                return self._listener.sockets[0].getsockname()[1]
            except PermissionError:
                reason = "allowed for administrators only"
            except OSError:
                continue
        await self._runner.cleanup()
        raise UsageError(f"--port is {self._port}, which is {reason}; give another one, or leave it out.")

    async def _stop(self) -> None:
        """Stop listening, once all viewers have gone: see _send_updates."""
        self._closing = True
        self._wake_viewers()
        if self._viewers:
            await asyncio.wait(self._viewers, timeout=_LAST_WORDS_S)
        self._listener.close()
        await self._runner.cleanup()

    def _end_thread(self) -> None:
        """Stop the event loop, wait for its thread, and close the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _wake_viewers(self) -> None:
        """Wake the viewers that wait for a change; whoever waits from now on waits for the next one."""
        self._changed.set()
        self._changed = asyncio.Event()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests about runs without the token, and set the security headers of all answers.

        A connection counts as trusted once a request on it has the token. An unexpected exception becomes an answer of
        status 500, and a warning in the terminal.
        """
        # The page itself is no secret, and is loaded without the token: only requests to /api/ need one.
        token = request.headers.get(TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
        has_token = secrets.compare_digest(token, self._token.encode())
        is_allowed = not request.path.startswith("/api/") or (has_token and _is_same_origin(request))
        if is_allowed and has_token:
            self._connections.trusted.add(request.protocol)
        try:
            response = await handler(request) if is_allowed else web.json_response({"error": "wrong token"}, status=403)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=error.reason)
        except (ConnectionError, asyncio.TimeoutError):
            raise  # the viewer is gone
        except Exception as error:
            _warn_of(error, f"{request.method} {request.path}")
            response = web.json_response({"error": "unexpected; the terminal says more"}, status=500)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send everything about the chosen runs, and then their changes, as long as the viewer listens."""
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._viewers.add(task)

        # A viewer that is gone or too slow is cut off at once; its page connects again.
        try:
            await self._send_updates(response, request.query.getall("run", None))
        except (OSError, asyncio.TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._viewers.discard(task)
        return response

    async def _send_updates(self, response: web.StreamResponse, chosen: Sequence[str] | None) -> None:
        """Send a viewer what changes in the ``chosen`` runs (all if None), until the page closes."""
        cursors: dict[str, FeedCursor] = {}
        sent = b""
        while True:
            # Both are noted before the runs are read, so that a change from now on wakes this viewer again.
            changed, closing = self._changed, self._closing

            # Send the list of runs if it has changed, and of each run what the viewer lacks.
            description = json.dumps(self._runs.description(chosen)).encode()
            if description != sent:
                sent = description
                await _send(response, "runs", description)
            for feed in self._runs.feeds_of(chosen):
                message, cursors[feed.name] = feed.since(cursors.get(feed.name, FeedCursor()))
                if message is not None:
                    await _send(response, "run", message)
            if closing:
                await _send(response, "closed", b"{}")
                # The page hangs up, which cancels this handler, when it has read what the last messages are about, such
                # as the last evaluation.
                await asyncio.sleep(_LAST_WORDS_S)
                return

            # Send at most twice a second; without a change, a comment now and then keeps proxies from hanging up.
            await asyncio.sleep(0 if self._closing else _UPDATE_EVERY_S)
            try:
                await asyncio.wait_for(changed.wait(), _COMMENT_EVERY_S)
            except asyncio.TimeoutError:
                await _write(response, b":\n\n")

    def _curves(self, query: Query) -> object:
        """Return a part of a run's curves: ``?run=NAME&first=STEP&last=STEP``; raise HTTPBadRequest without numbers."""
        try:
            first, last = (int(query.get(name, "")[:_STEP_DIGITS]) for name in ("first", "last"))
        except ValueError:
            raise web.HTTPBadRequest from None
        return self._feed(query).between(first, last)

    def _feed(self, query: Query) -> RunFeed:
        """Return the feed of the run that a request is about; raise HTTPNotFound if there is none."""
        for feed in self._runs.feeds:
            if feed.name == query.get("run"):
                return feed
        raise web.HTTPNotFound


async def _answer(ask: Callable[[Query], object], request: web.Request) -> web.Response:
    """Answer with the result of ``ask``, which runs in a thread, or with the sentence that it raises."""
    try:
        return web.json_response(await asyncio.to_thread(ask, request.query))
    except RaytrainError as error:
        return web.json_response({"error": str(error)}, status=409)


async def _file(request: web.Request) -> web.Response:
    """Answer with a file of the page. Only the names of files that exist have a route."""
    name = request.path.rpartition("/")[2] or "index.html"
    text = (_STATIC / name).read_text("utf-8")
    return web.Response(text=text, content_type=_TYPES.get(name.rpartition(".")[2], "text/plain"))


def _warn_of(error: BaseException | None, where: str) -> None:
    """Warn of an unexpected exception, in one line and once in each process."""
    warn_once(one_line(f"the page, {where}: {type(error).__name__}: {error}" if error else f"the page: {where}"))


def _is_same_origin(request: web.Request) -> bool:
    """Return True if a request comes from the page itself, and not from another site.

    What the browser says in Sec-Fetch-Site counts more than the host of the request, which a proxy may have changed.
    """
    site, origin = request.headers.get("Sec-Fetch-Site"), request.headers.get("Origin")
    if site is not None:
        return site in ("same-origin", "none")  # none: a person has typed the address
    return origin is None or urlsplit(origin).netloc == request.host


async def _send(response: web.StreamResponse, event: str, message: bytes) -> None:
    """Send a server-sent event, whose ``message`` is one line of JSON."""
    await _write(response, b"event: %s\ndata: %s\n\n" % (event.encode(), message))


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Write ``data``; raise asyncio.TimeoutError if the viewer is too slow."""
    await asyncio.wait_for(response.write(data), _SLOWEST_WRITE_S)


class _Connections:
    """Makes the protocol of each new connection to ``server``, and ends old connections if there are too many.

    A connection whose protocol is not in ``trusted`` is ended after ten seconds.
    """

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self.trusted: set[web.RequestHandler] = set()  # on which a request has shown the token

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection; asyncio calls this in its loop."""
        # The oldest strangers go first, and connections with the token only if there are no strangers.
        self.trusted.intersection_update(self._server.connections)
        strangers = [connection for connection in self._server.connections if connection not in self.trusted]
        num_all = len(self._server.connections) + 1
        num_ended = max(len(strangers) + 1 - MAX_STRANGERS, num_all - MAX_CONNECTIONS, 0)
        for connection in [*strangers, *self._server.connections][:num_ended]:
            _hang_up(connection)

        connection = self._server()
        asyncio.get_running_loop().call_later(STRANGER_S, self._end_stranger, connection)
        return connection

    def _end_stranger(self, connection: web.RequestHandler) -> None:
        """End a connection on which no request has shown the token."""
        if connection not in self.trusted:
            _hang_up(connection)


def _hang_up(connection: web.RequestHandler) -> None:
    """End a connection at once. Closing would wait, perhaps forever, until the other side has read what was sent."""
    if connection.transport is not None:
        connection.transport.abort()
