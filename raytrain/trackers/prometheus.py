"""A run as Prometheus scrapes it: the last value of each metric, in Prometheus' text format, on a port of this machine.

``OTEL_EXPORTER_PROMETHEUS_HOST`` and ``OTEL_EXPORTER_PROMETHEUS_PORT`` are OpenTelemetry's variables for the same
purpose. By default only this machine can read the page.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Mapping
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Gauge, make_wsgi_app  # pyright: ignore[reportUnknownVariableType]

from raytrain.config.option_values import MAX_PORT
from raytrain.errors import UsageError
from raytrain.trackers.tracker import TrackedRun

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 9464  # OpenTelemetry's
_NOT_IN_NAMES = re.compile("[^a-zA-Z0-9_]")
_MAX_CONNECTIONS, _CONNECTION_S = 16, 5.0
"""Limits on the number of connections and on their silence, because each takes a descriptor and a thread."""


class _Handler(WSGIRequestHandler):
    """Answers the requests of one connection, until it has been silent for ``timeout`` seconds."""

    timeout = _CONNECTION_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, so that a stranger's request prints no line into the terminal of the run."""


class _Server(ThreadingMixIn, WSGIServer):
    """Answers a few scrapers at a time, and closes the connections of others."""

    daemon_threads = True
    request_queue_size = 64  # of connections that wait to be accepted or closed

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.getaddrinfo(*address)[0][0]
        self._free = BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__(address, handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Take one of the free places for connections; return False if there is none. Called by :mod:`socketserver`."""
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a request in a thread of its own."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a scraper has hung up."""


class PrometheusTracker:
    """Gauges ``raytrain_…`` with the label ``run``: ``raytrain_train_loss``, ``raytrain_step``, and so on.

    ``place`` is the URL of the page with the gauges. Raises UsageError if the environment names no port.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run.name
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", DEFAULT_HOST)
        port_text = os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", str(DEFAULT_PORT))
        if not (port_text.isdecimal() and int(port_text) <= MAX_PORT):
            raise UsageError(
                f"OTEL_EXPORTER_PROMETHEUS_PORT is {port_text!r}; a port is a number from 1 to {MAX_PORT}, "
                "or 0 for any that is free."
            )
        port = int(port_text)
        app: Any = make_wsgi_app(self._registry)  # pyright: ignore[reportUnknownVariableType]
        try:
            self._server = make_server(host, port, app, _Server, _Handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Another run on this machine has the port: take any free one.
            self._server = make_server(host, 0, app, _Server, _Handler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True, name="prometheus")
        self._thread.start()
        self.place = f"http://{host}:{self._server.server_port}/metrics"

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Do nothing: Prometheus has no place for options."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Set the gauge of each metric, and that of the step. A character that a name may not have becomes ``_``."""
        for metric, value in {**metrics, "step": step}.items():
            name = f"raytrain_{_NOT_IN_NAMES.sub('_', metric)}"
            if name not in self._gauges:
                title = f"{name} of the last row of metrics"
                self._gauges[name] = Gauge(name, title, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def finalize(self, status: str) -> None:
        """Close the port. From then on, the run's last values can no longer be scraped."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
