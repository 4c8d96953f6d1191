"""Workers whose loops make different calls wait for each other for ever: the run ends with where each of them waits."""

from __future__ import annotations

import os
import queue
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain.errors import RaytrainError
from raytrain.launch import coordinator as coordinator_module
from raytrain.launch.coordinator import Coordinator
from raytrain.launch.local.coordinator_socket import CallAddress, Caller, CallServer
from raytrain.storage.open import open_store
from raytrain.training import waiting
from raytrain.training.batches.batch import Batch
from raytrain.training.protocols import Worker
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run, trained

OPTIONS = config(batch_size=7, epochs=2, log_every=1)  # 6 steps per epoch
Extra = Callable[[Run, nn.Module, Batch], object]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch.images), batch.labels)


def train(run: Run, before: Extra = lambda *of: None, between: Extra = lambda *of: None, step: int = 3) -> None:
    """Train; worker 0 alone does ``before`` the batch's forward and ``between`` its forward and its backward."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            alone = run.rank == 0 and batch.step == step
            optimizer.zero_grad()
            if alone:
                before(run, model, batch)
            loss = loss_of(model, batch)
            if alone:
                between(run, model, batch)
            loss.backward()
            optimizer.step()


def two_backwards(run: Run) -> None:
    train(run, lambda run, model, batch: loss_of(model, batch).backward())


def two_backwards_in_the_last_step(run: Run) -> None:
    train(run, lambda run, model, batch: loss_of(model, batch).backward(), step=11)


def two_backwards_without_batch_norm(run: Run) -> None:
    """The gradients of a worker that calls it once more meet those of the other worker's next step."""
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            for _ in range(2 if run.rank == 0 and batch.step == 2 else 1):
                loss_of(model, batch).backward()
            optimizer.step()


def forward_alone(run: Run) -> None:
    train(run, lambda run, model, batch: model(batch.images))


def total_alone(run: Run) -> None:
    train(run, lambda run, model, batch: run.total(torch.ones(1)))


def total_in_a_forward(run: Run) -> None:
    """Batch norm waits for sums, too, which must not meet this one."""
    train(run, between=lambda run, model, batch: run.total(torch.ones(1)))


def gather_in_a_forward(run: Run) -> None:
    train(run, between=lambda run, model, batch: run.gather(torch.ones(1, 1)))


def evaluate_in_a_forward(run: Run) -> None:
    train(run, between=lambda run, model, batch: run.evaluate())


def own_barrier(run: Run) -> None:
    train(run, lambda *of: dist.barrier())


def closures(run: Run) -> None:
    class Searching(torch.optim.SGD):
        """Computes the loss as often as its worker likes."""

        def step(self, closure: Any = None) -> Any:
            for _ in range(1 + run.rank):
                closure()
            super().step()

    model = run.prepare(run.build_model())
    optimizer = run.prepare(Searching(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:

            def closure(batch: Batch = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)


def other_networks(run: Run) -> None:
    run.prepare(nn.Linear(2, 2 + run.rank))


def other_sums(run: Run) -> None:
    run.total(torch.ones(1 + 30 * run.rank))


class Telling(Recorder):
    """Tells the test's coordinator where the worker waits, and ends this process once that has given the run up."""

    def __init__(self, calls: CallAddress) -> None:
        super().__init__()
        self._call = Caller(calls)

    def note_wait(self, rank: int, num_workers: int, place: str | None) -> None:
        self._call(Coordinator.note_wait, rank, num_workers, place)
        if self._call(Coordinator.ending).error is not None:
            os._exit(1)  # the worker would wait until torch's timeout


def work(loop: Callable[[Run], None], folder: str, calls: CallAddress) -> None:
    run = make_run(OPTIONS, images(38), folder, Telling(calls))
    with waiting.report_long_waits(run.steps, run.reporter, run.worker, poll_every_s=0.05):
        try:
            trained(run, loop)
        except RaytrainError as error:
            Caller(calls)(Coordinator.give_up, error)
        except RuntimeError:  # torch's: another worker has given up
            pass


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return Coordinator("run", open_store(str(tmp_path / "store")), num_steps=12, steps_per_epoch=6)


@pytest.fixture
def calls(coordinator: Coordinator) -> Iterator[CallAddress]:
    with tempfile.TemporaryDirectory() as folder:
        server = CallServer(Path(folder), coordinator)
        yield server.address
        server.close()


THIS = r"test_workers_out_of_step\.py, line \d+: "


@pytest.mark.parametrize(
    ("loop", "what"),
    [
        (two_backwards, rf"worker 0 after 3 steps .* at {THIS}.* and worker 1 after 4 steps .* at {THIS}`for batch in"),
        (two_backwards_in_the_last_step, rf"worker 0 after 11 steps .* and worker 1 after 12 steps .*{THIS}"),
        (two_backwards_without_batch_norm, rf"worker 0 after 2 steps .*{THIS}.* and worker 1 after 3 steps .*{THIS}"),
        (forward_alone, rf"worker 0 after 3 steps .*{THIS}.*worker 1 after 3 steps .* `loss\.backward\(\)`"),
        (total_alone, rf"worker 0 after 3 steps .*{THIS}.*run\.total\(torch"),
        (total_in_a_forward, rf"worker 0 after 3 steps .*{THIS}.*run\.total\(torch.* `loss\.backward\(\)`"),
        (gather_in_a_forward, rf"worker 0 after 3 steps .*{THIS}.*run\.gather\(torch.* `loss\.backward\(\)`"),
        (evaluate_in_a_forward, rf"worker 0 after 3 steps .*{THIS}.*run\.evaluate\(\).* `loss\.backward\(\)`"),
        (own_barrier, rf"worker 0 after 3 steps .*{THIS}.*dist\.barrier"),
        (closures, rf"worker 0 after 1 step .*{THIS}.*worker 1 after 0 steps .*{THIS}"),
        (other_networks, r"the loop called run\.prepare with other shapes on worker \d than on another: \[\(\d, 2\)"),
        (other_sums, r"the loop called run\.total with other shapes on worker \d than on another: \(\d+,\)"),
    ],
)
def test_loops_out_of_step_end_with_the_lines_that_wait(
    loop: Callable[[Run], None], what: str, tmp_path: Path, coordinator: Coordinator, calls: CallAddress
) -> None:
    with suppress(BrokenProcessPool):
        run_in_processes(2, work, loop, str(tmp_path / "run"), calls)
    with pytest.raises(RaytrainError, match=what):
        raise coordinator.ending().error or RaytrainError("nobody has given the run up")


def test_workers_that_wait_for_a_slow_one_or_stand_still_go_on(coordinator: Coordinator) -> None:
    for place in ("here", "here", "here"):
        coordinator.note_wait(1, 2, place)  # worker 0 is slow
    coordinator.note_wait(0, 2, None)  # it reads, and waits for nobody
    assert coordinator.ending().error is None
    coordinator.note_wait(0, 2, "there")  # it has come, and worker 1 is stopped, or on its way to there
    coordinator.note_wait(0, 2, "there")
    coordinator.note_wait(1, 2, None)
    for rank in (0, 1, 0, 1):
        coordinator.note_wait(rank, 2, "there")  # the network is down
    assert coordinator.ending().error is None
    for rank in (0, 1, 0, 1):
        coordinator.note_wait(rank, 2, f"line {rank}")
    assert "worker 0 line 0, and worker 1 line 1" in str(coordinator.ending().error)


def test_a_worker_for_which_the_others_wait_long_is_named_once(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for long_wait_s in (60.0, 0.0, 0.0):
        monkeypatch.setattr(coordinator_module, "LONG_WAIT_S", long_wait_s)
        for rank in (0, 2):
            coordinator.note_wait(rank, 3, "at line 7")
    [event] = [timed.event for timed in coordinator.snapshot().events]
    assert "worker 0 has waited half a minute for worker 1, at line 7; " in str(event)


def test_a_poll_of_a_stack_keeps_no_variable_until_the_next_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    read_stacks, begun, polled, ended = sys._current_frames, *(threading.Event() for _ in range(3))
    alive: queue.Queue[bool] = queue.Queue()
    held: list[weakref.ref[nn.Module]] = []

    def forward() -> None:
        variable = nn.Linear(1, 1)
        held.append(weakref.ref(variable))
        begun.set()
        polled.wait()

    def read() -> dict[int, Any]:
        if polled.is_set():
            ended.wait()
            alive.put(held[0]() is not None)
            return {}
        begun.wait()
        try:
            return read_stacks()
        finally:
            polled.set()

    monkeypatch.setattr(sys, "_current_frames", read)
    nothing: Any = None
    with waiting.report_long_waits(nothing, nothing, Worker(0, 2, torch.device("cpu")), poll_every_s=0.01):
        forward()
        ended.set()
        assert not alive.get(timeout=60)
