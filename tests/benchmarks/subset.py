"""Train on a selection of the images at a URL."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from raytrain.config import TrainConfig
from raytrain.launch.prepare import TrainRequest, prepare, settle_options
from raytrain.launch.ray.connection import Connection
from raytrain.launch.session import RunSession
from raytrain.training.run import Run


def train_on(config: TrainConfig, choose: Callable[[int], npt.NDArray[np.int64]], loop: Callable[[Run], None]) -> None:
    """Train like ``raytrain.train`` on the images with the indices ``choose(num_images)``, which may repeat."""
    config = settle_options(config)
    with Connection(config.address) as cluster, prepare(config, TrainRequest(loop=loop)) as prepared:
        manifest = prepared.data.train
        data = dataclasses.replace(prepared.data, train=manifest.select(choose(len(manifest))))
        cluster.connect()
        from raytrain.launch.ray.ray_launch import RayLaunch

        prepared = dataclasses.replace(prepared, data=data)
        with prepared.signals, RunSession(prepared, RayLaunch(prepared, cluster)) as session:
            session.watch()
