"""A run as Prometheus scrapes it: the last value of each metric, in Prometheus' text format, on a port of this machine.

``OTEL_EXPORTER_PROMETHEUS_HOST`` and ``OTEL_EXPORTER_PROMETHEUS_PORT`` are OpenTelemetry's variables for the same
purpose. By default only this machine can read the page.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from raytrain.trackers.tracker import TrackedRun

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 9464  # OpenTelemetry's
_NOT_IN_NAMES = re.compile("[^a-zA-Z0-9_]")


class PrometheusTracker:
    """Gauges ``raytrain_…`` with the label ``run``: ``raytrain_train_loss``, ``raytrain_step``, and so on."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run.name
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", DEFAULT_HOST)
        port = int(os.environ.get("OTEL_EXPORTER_PROMETHEUS_PORT", DEFAULT_PORT))
        try:
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            # Another run on this machine has the port: take any free one.
            self._server, self._thread = start_http_server(0, host, self._registry)
        self.place = f"http://{host}:{self._server.server_port}/metrics"

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Do nothing: Prometheus has no place for options."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Set the gauges."""
        for metric, value in {**metrics, "step": step}.items():
            name = f"raytrain_{_NOT_IN_NAMES.sub('_', metric)}"
            if name not in self._gauges:
                title = f"{name} of the last row of metrics"
                self._gauges[name] = Gauge(name, title, ["run"], registry=self._registry)
            self._gauges[name].labels(self._run).set(value)

    def finalize(self, status: str) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
