"""``raytrain serve``: checks network and cluster, starts the HTTP server on Ray, and waits until it is stopped."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

from raytrain.config.extras import extra
from raytrain.config.option_values import MAX_PORT, Location
from raytrain.data.dataset import evaluation_format
from raytrain.data.plan.permutation import Floats
from raytrain.errors import UsageError
from raytrain.inference.classification_metrics import chosen_thresholds
from raytrain.inference.predictor import Predictor
from raytrain.inference.trained_run import TrainedRun, open_trained_run
from raytrain.launch.ray.connection import Connection
from raytrain.launch.ray.nodes import cluster_hardware
from raytrain.launch.served_model import ServedModel
from raytrain.monitor.stop_request import StopSignals
from raytrain.storage.scoped_keys import Scope
from raytrain.storage.store import Store

_POLL_EVERY_S = 0.5  # for a stop, and for credentials that expire soon


def serve(
    run: str,
    *,
    storage: Location = "./runs",
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    top_k: int = 5,
    threshold: float | Sequence[float] = (),
    address: str | None = None,
    trust: bool = False,
    ready: Callable[[str], object] = print,
) -> None:
    """Serve the best checkpoint of ``run`` with Ray Serve, until Ctrl-C, SIGTERM or SIGHUP.

    POST an image file to ``http://host:port/run``, and get JSON with its likeliest class (``label``, ``score``) and the
    ``top_k`` likeliest ones (``classes``). If an image may have several classes, it says in ``labels`` which it has.
    Whoever reaches the port may ask. In a cluster without room for the network, this waits for room.

    Args:
        run: the run's name.
        storage: where the run is stored.
        host: the address to listen on; ``0.0.0.0`` for all of the cluster's head.
        port: the port to listen on.
        workers: copies of the network, each on a GPU of its own if the cluster has any.
        top_k: number of classes in an answer, or all if there are fewer.
        threshold: as for :func:`raytrain.evaluate`.
        address: the Ray cluster; by default RAY_ADDRESS, else one that you started on this machine, else a new one.
        trust: whether a network that is a function of the run's author may run.
        ready: called with the URL when it answers.

    Raises:
        UsageError, StorageError: Ray Serve is not installed, there is no such run, it is not trusted, it cannot be
            served at that port, or a run of its name is served in the cluster.

    Example::

        raytrain.serve("first", port=8000)  # curl --data-binary @photo.jpg http://127.0.0.1:8000/first
    """
    if find_spec("starlette") is None or find_spec("grpc_reflection") is None:
        raise UsageError(f"raytrain serve needs Ray Serve, which is not installed; install {extra('serve')}.")
    for option, number in (("--top-k", top_k), ("--workers", workers)):
        if number < 1:
            raise UsageError(f"{option} is {number}; it must be at least 1.")
    trained = open_trained_run(run, os.fspath(storage), trust=trust)
    thresholds = chosen_thresholds(trained, threshold)

    # The port is tried before Ray starts, which takes seconds.
    with Connection(address, before_start=partial(_check_free, host, port)) as cluster:
        cluster.connect()
        from raytrain.launch.ray.http_server import serving
        from raytrain.launch.ray.serve_credentials import serving_credentials  # these import Ray

        placement = trained.placement(workers, cluster_hardware())

        # Replicas of the network get the credentials of this process, and new ones before those expire.
        scope = Scope.of([trained.store]) if trained.config.scope_keys else None
        with serving_credentials([trained.store], scope, for_run=run) as (served, lender):
            model = served_model(trained, trained.store.with_lent_credentials(served), top_k, thresholds)

            # Ctrl-C ends the loop, also while the network is still being loaded.
            with StopSignals() as signals, serving(model, placement, host, port, signals) as url:
                if signals.stop_request is None:
                    ready(url)
                while signals.stop_request is None:
                    time.sleep(_POLL_EVERY_S)
                    lender.lend_if_due()


def served_model(trained: TrainedRun, store: Store, top_k: int, thresholds: Floats) -> ServedModel:
    """Return the description of a run's network by which each replica loads it from ``store``.

    ``thresholds`` (C,) are the probabilities from which on an image has a class, if it may have several.
    """
    num_shown = min(top_k, len(trained.classes))
    return ServedModel(
        run=trained.name,
        checkpoint=trained.checkpoint,
        classes=trained.classes,
        format=evaluation_format(trained.config),
        store=store,
        load_predictor=partial(Predictor, run=trained.name, top_k=num_shown, trust=trained.trust),
        top_k=num_shown,
        thresholds=tuple(thresholds.tolist()) if trained.config.multi_label else None,
    )


def _check_free(host: str, port: int) -> None:
    """Raise UsageError unless a server may listen at ``host`` and ``port`` of this machine."""
    if not 1 <= port <= MAX_PORT:
        raise UsageError(f"--port is {port}; a port is a number from 1 to {MAX_PORT}.")

    # SO_REUSEADDR: a port whose last server has just ended counts as free.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(f"--host {host} --port {port} cannot be used: {error.strerror}; choose others.") from None
