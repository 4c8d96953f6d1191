"""Ray Train's controller in the process of the coordinator: an abort is answered whatever the controller does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.launch.ray import coordinator as module
from raytrain.launch.ray.coordinator import RayCoordinator
from raytrain.storage.open import open_store

ANSWERED_WITHIN_S = 60.0


class Controller:
    """What the coordinator uses of Ray Train's, without Ray: one try to start workers after the other, in vain."""

    def __init__(self, in_try: threading.Event, goes_on: threading.Event, tries: float) -> None:
        self._in_try, self._goes_on, self._tries_left = in_try, goes_on, tries
        self.is_aborted = False

    async def run(self) -> None:
        while self._tries_left and not self.is_aborted:
            await self._run_control_loop_iteration()

    async def _run_control_loop_iteration(self) -> None:
        self._tries_left -= 1
        self._in_try.set()
        assert self._goes_on.wait(ANSWERED_WITHIN_S)  # in which Ray blocks the loop

    async def abort(self) -> None:
        self.is_aborted = True
        raise SystemExit

    def get_result(self) -> bool:
        return self.is_aborted


class LastIteration(Controller):
    """One that ends without another turn of its loop, so that nothing can come in between."""

    async def run(self) -> None:
        # Ray's own name of it, which is private, because the coordinator replaces the method of this name.
        await Controller._run_control_loop_iteration(self)


@pytest.mark.not_quick
@pytest.mark.parametrize(("kind", "tries", "is_aborted"), [(Controller, float("inf"), True), (LastIteration, 1, False)])
def test_an_abort_is_answered_between_two_tries_and_after_the_last(
    kind: type, tries: float, is_aborted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this: Any = SimpleNamespace(current_actor=SimpleNamespace(after_start=SimpleNamespace(remote=None)))
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: this)
    monkeypatch.setattr(module, "delay_barrier", lambda later: None)
    monkeypatch.setattr(module, "name_placement_groups", lambda prefix: None)
    scheduled = threading.Event()
    threadsafe = module.asyncio.run_coroutine_threadsafe
    monkeypatch.setattr(
        module.asyncio, "run_coroutine_threadsafe", lambda *given: (threadsafe(*given), scheduled.set())[0]
    )
    coordinator: Any = RayCoordinator("run", open_store(str(tmp_path)), num_steps=1, steps_per_epoch=1)
    in_try, goes_on = threading.Event(), threading.Event()
    arguments = {"in_try": in_try, "goes_on": goes_on, "tries": tries}
    with ThreadPoolExecutor() as threads:
        ends = threads.submit(coordinator.control, kind, arguments, {}, "raytrain-")
        assert in_try.wait(ANSWERED_WITHIN_S)
        answer = threads.submit(coordinator.abort)
        assert scheduled.wait(ANSWERED_WITHIN_S)
        goes_on.set()
        answer.result(ANSWERED_WITHIN_S)
        assert ends.result(ANSWERED_WITHIN_S) is is_aborted
