"""Train on a selection of the images at a URL."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from raytrain.backends.prepare import prepare
from raytrain.backends.ray.connection import connection
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train_request import TrainRequest
from raytrain.config import TrainConfig
from raytrain.training.run import Run


def train_on(config: TrainConfig, choose: Callable[[int], npt.NDArray[np.int64]], loop: Callable[[Run], None]) -> None:
    """Train like ``raytrain.train`` on the images with the indices ``choose(num_images)``, which may repeat."""
    with connection(config.address) as cluster:
        prepared = prepare(config)
        manifest = prepared.data.train
        data = dataclasses.replace(prepared.data, train=manifest.select(choose(len(manifest))))
        cluster.connect()
        from raytrain.backends.ray.session import RunSession

        with StopSignals() as signals:
            request = TrainRequest(
                config=config, loop=loop, view=None, signals=signals, trackers=(), started_at=time.monotonic()
            )
            prepared = dataclasses.replace(prepared, data=data)
            with RunSession(prepared, request, cluster) as session:
                session.watch()
