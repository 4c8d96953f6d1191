"""The use of the object stores comes from the head, which may not answer."""

from __future__ import annotations

import threading
from itertools import count

import pytest
from ray.exceptions import RpcError

from raytrain.launch.ray import nodes
from raytrain.launch.ray.nodes import ObjectStores
from raytrain.runs.machine_history import MachineUse

USE = MachineUse(rank=0, node="n", images_per_s=10.0, data_wait_fraction=0.0)


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "MEASURE_EVERY_S", 0.0)


def test_each_node_has_its_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "object_store_use", lambda timeout_s: {"a": (50, 200), "b": (0, 100)})
    stores = ObjectStores()
    known = stores.add_to(USE, "a")
    assert known == USE  # nobody waits for the answer
    while known == USE:
        known = stores.add_to(USE, "a")
    assert (known.object_store_bytes, known.object_store_total_bytes, known.images_per_s) == (50, 200, 10.0)


def test_a_head_that_does_not_answer_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    num_asked = count(1)
    asked_again = threading.Event()

    def answer(timeout_s: float) -> dict[str, tuple[int, int]]:
        if next(num_asked) > 2:  # the other test may have left a question
            asked_again.set()
        raise RpcError("deadline exceeded", 4)

    monkeypatch.setattr(nodes, "object_store_use", answer)
    stores = ObjectStores()
    while not asked_again.is_set():
        assert stores.add_to(USE, "a") == USE
