"""Predict images on a Ray cluster: each actor reads and predicts every N-th block.

An actor sends what its process prints, the network above all, with the next block, and the rest after the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray

from raytrain.launch.placement import Placement
from raytrain.launch.predict_blocks import PredictRequest, in_turn, predict_blocks
from raytrain.launch.ray.nodes import check_readers
from raytrain.launch.ray.serve_credentials import serving_credentials
from raytrain.runs.logs import PrintedLine, ProcessLog, print_line
from raytrain.storage.scoped_keys import Scope

_RETRIES = 3  # if an actor's process or node is lost


def predict_images(request: PredictRequest, placement: Placement, *, scope_keys: bool) -> Iterator[pa.Table]:
    """Predict on ``placement.num_workers`` actors; yield the same tables as :func:`predict_blocks.predict_here`.

    What the actors print is printed here. With ``scope_keys``, they get keys that are only good for reading the images
    and the run. Raises RaytrainError if an actor is lost too often, and UsageError if STS issues no such keys, or if a
    node does not have the images.
    """
    check_readers([(request.images, request.manifest)])
    # Lend the actors credentials for both stores.
    images, run_store = request.images, request.run_store
    scope = Scope.of([images, run_store]) if scope_keys else None
    with serving_credentials([images, run_store], scope) as (served, lender):
        images, run_store = images.with_lent_credentials(served), run_store.with_lent_credentials(served)
        request_ref = ray.put(replace(request, images=images, run_store=run_store))

        # An actor asks Ray for the CPUs that compute, and for those of one data task.
        predictor: Any = ray.remote(_Predictor).options(
            num_cpus=round(placement.cpus + placement.task_cpus, 4),
            num_gpus=1 if placement.device == "cuda" else 0,
            max_restarts=_RETRIES,
            max_task_retries=_RETRIES,
        )
        actors = [predictor.remote() for _ in range(placement.num_workers)]
        try:
            # Each actor yields its blocks in order, so taking one from each in turn gives the order of the images.
            streams = [actor.predict.remote(request_ref, placement, number) for number, actor in enumerate(actors)]
            for printed_lines, table in map(ray.get, in_turn(streams)):
                for line in printed_lines:
                    print_line(line)
                if table is not None:
                    yield table
                lender.lend_if_due()
        finally:
            for actor in actors:
                ray.kill(actor)


class _Predictor:
    """An actor with a network, which sees only its own GPU. Ray starts it again if its node is lost."""

    def predict(
        self, request: PredictRequest, placement: Placement, number: int
    ) -> Iterator[tuple[list[PrintedLine], pa.Table | None]]:
        """Predict the blocks of actor ``number``; yield the table of each, with the lines that were printed before it.

        At last, what was printed since then is yielded without a table, also if an exception follows.
        """
        num_readers = max(1, int(placement.data_cpus))
        printed: deque[PrintedLine] = deque()

        def take_printed() -> list[PrintedLine]:
            return [printed.popleft() for _ in range(len(printed))]  # the log's thread may append meanwhile

        failure: Exception | None = None
        with ProcessLog(None, number, printed.extend) as log:
            try:
                for table in predict_blocks(request, placement.threads, num_readers, number, placement.num_workers):
                    log.read()
                    yield take_printed(), table
            except Exception as error:
                failure = error
            log.show_rest()
            yield take_printed(), None
        if failure is not None:
            raise failure
