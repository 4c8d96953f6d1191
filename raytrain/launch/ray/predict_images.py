"""Predict images on a Ray cluster: each actor reads and predicts every N-th block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray

from raytrain.launch.placement import Placement
from raytrain.launch.predict_request import PredictRequest, in_turn, predict_blocks
from raytrain.launch.ray.coordinator import serving_credentials
from raytrain.storage.lent_credentials import Scope

_RETRIES = 3  # of an actor whose process or node is lost


def predict_images(request: PredictRequest, placement: Placement, *, scope_keys: bool) -> Iterator[pa.Table]:
    """Predict on ``placement.num_workers`` actors; yields what :func:`predict_request.predict_here` does."""
    images, run_store = request.images, request.run_store
    scope = Scope(reads=(f"{images.url}/", f"{run_store.url}/"), writes=()) if scope_keys else None
    with serving_credentials([images, run_store], scope) as (served, lender):
        lent = (images.with_lent_credentials(served), run_store.with_lent_credentials(served))
        sent = ray.put(replace(request, images=lent[0], run_store=lent[1]))
        actors = [_start_actor(placement) for _ in range(placement.num_workers)]
        try:
            arguments = [(sent, placement, number) for number in range(len(actors))]
            sources = [actor.predict.remote(*each) for actor, each in zip(actors, arguments, strict=True)]
            for table in in_turn(sources):
                yield ray.get(table)
                lender.lend_if_due()
        finally:
            for actor in actors:
                ray.kill(actor)


class _Predictor:
    """A network in a process of its own, which sees no other GPU than its own. It starts again if its node is lost."""

    def predict(self, request: PredictRequest, placement: Placement, number: int) -> Iterator[pa.Table]:
        """Predict the blocks of actor ``number``."""
        num_readers = max(1, int(placement.data_cpus))
        yield from predict_blocks(request, placement.threads, num_readers, number, placement.num_workers)


def _start_actor(placement: Placement) -> Any:
    return (
        ray.remote(_Predictor)
        .options(
            num_cpus=round(placement.cpus + placement.task_cpus, 4),
            num_gpus=1 if placement.device == "cuda" else 0,
            max_restarts=_RETRIES,
            max_task_retries=_RETRIES,
        )
        .remote()
    )
