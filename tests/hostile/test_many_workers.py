"""Hundreds of workers that wait for data keep nobody else from an answer of the run's coordinator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.launch.ray import coordinator
from raytrain.storage.open import open_store

NUM_WORKERS = 300


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The threads that the coordinator of a run with 300 workers has in each of its groups."""
    asked: dict[str, Any] = {}

    def remote(**options: Any) -> Any:
        asked.update(options)
        actor = SimpleNamespace(remote=lambda *run, **known: None)
        return lambda kind: SimpleNamespace(options=lambda **more: actor)

    monkeypatch.setattr("ray.remote", remote)
    monkeypatch.setattr(coordinator, "on_this_node", dict)
    store = open_store("runs/run")
    coordinator.start_coordinator("run", store, num_steps=10, steps_per_epoch=5, num_workers=NUM_WORKERS)
    return asked["concurrency_groups"]


def group_of(method: str) -> str:
    return getattr(coordinator.RayCoordinator, method).__ray_concurrency_group__


def test_each_worker_may_wait_for_training_and_test_images_while_others_wait_for_a_stop(
    threads: dict[str, int],
) -> None:
    assert {group_of(each) for each in ("blocks", "flush", "wait_for_stop_request")} == {"wait"}
    assert threads["wait"] >= 2 * NUM_WORKERS + 2


def test_keys_are_given_out_while_all_workers_wait_for_what_can_be_read_with_them(threads: dict[str, int]) -> None:
    assert group_of("credentials") != "wait" and threads[group_of("credentials")] > 1
