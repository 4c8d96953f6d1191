"""How full Ray's object store is on each node, as the head of the cluster knows it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from ray.exceptions import RayError

from raytrain.backends.ray.private_api import object_store_use
from raytrain.runs.background import Background
from raytrain.runs.machine_use import MEASURE_EVERY_S, MachineUse
from raytrain.runs.throttle import Throttle

_ANSWER_WITHIN_S = 10.0


class ObjectStores:
    """Asks the head every few seconds, for all nodes at once and without waiting for it."""

    def __init__(self) -> None:
        self._ask = Background(_ask_head)  # a question takes long if nobody answers
        self._throttle = Throttle()
        self._uses: dict[str, tuple[int, int]] = {}

    def add_to(self, use: MachineUse, node_id: str) -> MachineUse:
        """``use`` with what the object store of its node holds, as of the last question; unknown without an answer."""
        if self._throttle.due("ask", MEASURE_EVERY_S):
            self._uses = self._ask(_ANSWER_WITHIN_S) or {}
        if node_id not in self._uses:
            return use
        used, total = self._uses[node_id]
        return replace(use, object_store_bytes=used, object_store_total_bytes=total)


def _ask_head(timeout_s: float) -> dict[str, tuple[int, int]]:
    with suppress(RayError):
        return object_store_use(timeout_s)
    return {}
