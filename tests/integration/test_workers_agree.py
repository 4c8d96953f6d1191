"""Workers whose weights, buffers or measurements differ stop at once, with the names of what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD

from raytrain.errors import UsageError
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run, trained
from tests.helpers.own_loops import fit, learn

OPTIONS = config(batch_size=7, epochs=2, log_every=1)  # 6 steps per epoch
NUM_IMAGES = 38


class Centred(nn.Module):
    """Subtracts a moving average of the features, which it keeps in a buffer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.flat = nn.Flatten()
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(3 * 8 * 8))
        self.head = nn.Linear(3 * 8 * 8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.flat(images)
        if self.training:
            self.centre.lerp_(features.detach().mean(0), 0.5)
        return self.head(features - self.centre)


class Unsaved(Centred):
    """The same, with a buffer that is in no checkpoint."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("centre", torch.zeros(3 * 8 * 8), persistent=False)


class Sparse(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(256, num_classes, sparse=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.rows((images.flatten(1)[:, :6] * 9).long() % 256).mean(1)


class Queue(nn.Module):
    """Keeps the newest features in a buffer, as in momentum contrast."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.queue: Tensor
        self.register_buffer("queue", torch.zeros(16, 3 * 8 * 8))
        self.head = nn.Linear(3 * 8 * 8, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = images.flatten(1)
        if self.training:
            self.queue.copy_(torch.cat([features.detach(), self.queue])[:16])
        return self.head(features)


def train(run: Run, model: nn.Module, after_step: Callable[[int], None] = lambda step: None) -> None:
    model = run.prepare(model)
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            after_step(batch.step)


def moving_average(run: Run) -> None:
    train(run, Centred(run.num_classes))


def unsaved_average(run: Run) -> None:
    train(run, Unsaved(run.num_classes))


def sparse_gradients(run: Run) -> None:
    train(run, Sparse(run.num_classes))


def teacher_in_training_mode(run: Run) -> None:
    teacher = run.build_model().double()
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            with torch.no_grad():
                targets = teacher(batch.images).softmax(dim=1)
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), targets).backward()
            optimizer.step()


def queue(run: Run) -> None:
    train(run, Queue(run.num_classes))


def head_drawn_again(run: Run) -> None:
    """A worker's generators draw numbers of its own, so the new weights differ."""
    head = nn.Linear(3 * 8 * 8, run.num_classes)

    def renew(step: int) -> None:
        if step == 1:
            nn.init.normal_(head.weight)

    train(run, nn.Sequential(nn.Flatten(), head), renew)


def own_gradients(run: Run) -> None:
    """Writes gradients of torch.autograd.grad, which are those of this worker's images alone, into ``grad``."""
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs():
        for batch in epoch:
            loss = F.cross_entropy(model(batch.images), batch.labels)
            for weight, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
            ):
                weight.grad = gradient
            optimizer.step()


def own_evaluation(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))

    def measure() -> dict[str, float]:
        right = sum(float((model(batch.images).argmax(1) == batch.labels).sum()) for batch in run.evaluation_batches())
        return {"accuracy": right / (10 + run.rank)}

    fit(run, model, optimizer, evaluate=measure)


def step_and_then(
    run: Run,
    then: Callable[[Tensor], object],
    make: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] = lambda weights: SGD(weights, lr=0.1),
) -> None:
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, run.num_classes)))
    optimizer = run.prepare(make(model.parameters()))
    for epoch in run.epochs():
        for batch in epoch:
            loss = F.cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            then(loss)


class Divided(torch.optim.Optimizer):
    """Momentum, of which each process keeps that of every second weight, and sends what it has computed."""

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for index, weight in enumerate(self.param_groups[0]["params"]):
            owner = index % dist.get_world_size() if dist.is_initialized() else 0
            if not dist.is_initialized() or dist.get_rank() == owner:
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                weight.data.sub_(velocity.mul_(0.9).add_(weight.grad), alpha=0.1)
            if dist.is_initialized():
                dist.broadcast(weight.data, owner)


def divided_optimizer(run: Run) -> None:
    step_and_then(run, lambda loss: None, lambda weights: Divided(weights, {}))


def zero_redundancy(run: Run) -> None:
    step_and_then(run, lambda loss: None, lambda weights: ZeroRedundancyOptimizer(weights, SGD, lr=0.1, momentum=0.9))


def local_state(run: Run) -> None:
    def make(weights: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        nonlocal optimizer
        optimizer = SGD(weights, lr=0.1, momentum=0.9)
        return optimizer

    optimizer: Any = None
    step_and_then(run, lambda loss: optimizer.state[optimizer.param_groups[0]["params"][1]].update(loss=loss), make)


def log_on_worker_0(run: Run) -> None:
    step_and_then(run, lambda loss: run.log(loss=loss) if run.rank == 0 else None)


def log_other_names(run: Run) -> None:
    step_and_then(run, lambda loss: run.log(**{f"loss of worker {run.rank}": loss}))


def evaluate_on_worker_0(run: Run) -> None:
    step_and_then(run, lambda loss: run.evaluate() if run.rank == 0 else None)


def error_of(loop: Callable[[Run], None], folder: str) -> tuple[str, int]:
    """The error of a run with ``loop``, and the number of steps before it."""
    run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder())
    try:
        trained(run, loop)
    except UsageError as error:
        return str(error), run.progress.step
    return "", run.progress.step


@pytest.mark.parametrize(
    ("loop", "step", "what"),
    [
        (moving_average, 1, r"the workers differ in centre: .* by a layer or the loop"),
        (unsaved_average, 1, r"the workers differ in centre: "),
        (sparse_gradients, 0, r"A parameter of the shape \(256, 4\) gets a sparse gradient"),
        (teacher_in_training_mode, 0, r"A network that is not prepared has batch norm in training mode"),
        (queue, 1, r"the workers differ in queue: "),
        (head_drawn_again, 2, r"the workers differ in 1\.weight: .* random numbers"),
        (
            own_gradients,
            1,
            r"the workers differ in 1\.weight, 1\.bias: they .* as by gradients of torch\.autograd\.grad",
        ),
        (divided_optimizer, 1, r"in the state of an optimizer, velocity of 1\.weight, velocity of 1\.bias: .* resumed"),
        (zero_redundancy, 1, r"in the state of an optimizer, .*momentum_buffer of 1\.weight, .* that keeps all of its"),
        (local_state, 1, r"in the state of an optimizer, loss of 1\.bias: checkpoints hold that of worker 0"),
        (log_on_worker_0, 1, r"log different names \(worker 0: loss\)"),
        (log_other_names, 1, r"log different names \(worker 0: loss of worker 0\)"),
        (evaluate_on_worker_0, 0, r"called run\.evaluate\(\) on 1 of 2 workers"),
        (own_evaluation, 6, r"measured accuracy .* on worker 0 and .* on worker 1; .* run\.total"),
    ],
)
def test_workers_that_differ_stop_with_the_names_of_what_differs(
    loop: Callable[[Run], None], step: int, what: str, tmp_path: Path
) -> None:
    (error, stopped_at), (other, _) = run_in_processes(2, error_of, loop, str(tmp_path))
    assert error == other.replace("worker 1: none", "worker 0: loss").replace(
        "worker 1: loss of worker 1", "worker 0: loss of worker 0"
    )
    assert stopped_at == step
    with pytest.raises(UsageError, match=what):
        raise UsageError(error)


ALONE = (
    *(moving_average, unsaved_average, sparse_gradients, teacher_in_training_mode, queue, head_drawn_again),
    *(own_gradients, own_evaluation, divided_optimizer, local_state),
    *(log_on_worker_0, log_other_names, evaluate_on_worker_0),
)


@pytest.mark.parametrize("loop", ALONE)
def test_one_worker_has_nobody_to_agree_with(loop: Callable[[Run], None], tmp_path: Path) -> None:
    assert error_of(loop, str(tmp_path)) == ("", 12)
