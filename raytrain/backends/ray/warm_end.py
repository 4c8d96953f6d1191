"""The end of the cluster of `raytrain up` while a command uses it: the runs of that one stop first."""

from __future__ import annotations

from contextlib import suppress

from raytrain.backends.ray.connection import connection_to_kept
from raytrain.backends.ray.warm_cluster import WarmRay, end, locked
from raytrain.runs.stop_request import StopRequest

_STOPPED_WITHIN_S = 120.0


def stop_runs_and_end(found: WarmRay, request: StopRequest) -> None:
    """Ask the runs in a kept cluster to stop with a checkpoint, and end it once the command that uses it has left.

    After two minutes, it ends anyway.
    """
    with suppress(ConnectionError, RuntimeError):  # it is about to end already
        stop_runs(found, request)
    with locked(_STOPPED_WITHIN_S):
        end(found)


def stop_runs(found: WarmRay, request: StopRequest) -> None:
    """Ask the runs in a kept cluster to stop with a checkpoint."""
    with connection_to_kept(found):
        from raytrain.backends.ray.coordinator import request_stop_of_all

        request_stop_of_all(request)
