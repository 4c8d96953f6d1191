"""Loops as people write them for plain PyTorch: on one and on two workers they end as plain PyTorch does.

Each loop is written once. Plain PyTorch runs it with ``Plain``, which has torch's own calls in place of the run's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.checkpoint import checkpoint

from raytrain.config import ResolvedConfig
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.reference_loop import small_net
from tests.integration.test_exact import Recorder, config, images, make_run

OPTIONS = config(batch_size=7, epochs=2, log_every=1, flip="none", translate=0)  # 6 steps per epoch
NUM_IMAGES = 38
WIDTH = 3 * 8 * 8


@dataclass
class PlainBatch:
    images: Tensor
    labels: Tensor
    step: int
    num_used: int


class Plain:
    """Torch's own calls in place of a run's, on whole global batches."""

    num_classes, rank, world_size = 4, 0, 1

    def __init__(self, batches: list[PlainBatch], options: ResolvedConfig) -> None:
        self._batches, self._options = batches, options
        self._steps_per_epoch = len(batches) // 2

    def prepare(self, thing: Any) -> Any:
        dtype = getattr(torch, self._options.precision)
        return thing.to(self._options.device, dtype) if isinstance(thing, nn.Module) else thing

    def batches(self, evaluate: Callable[[], dict[str, float]] = dict) -> Iterator[PlainBatch]:
        for batch in self._batches:
            self._batch = batch
            yield batch
            if (batch.step + 1) % self._steps_per_epoch == 0:
                with torch.no_grad():
                    evaluate()

    def backward(self, loss: Tensor) -> None:
        (loss / len(self._batch.labels)).backward()

    def step(self, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure)
        optimizer.zero_grad()

    def log(self, **sums: Any) -> None: ...


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def small() -> nn.Module:
    return seeded(lambda: small_net(nn.BatchNorm2d, 3, 4))


def linear(width: int = 4) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, width)))


def sgd(run: Any, model: nn.Module, **options: Any) -> Any:
    return run.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options))


def gan(run: Any) -> list[nn.Module]:
    """Two networks and two losses; the critic has batch norm, and sees real and made images apart."""
    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))  # noqa: E731
    critic = run.prepare(seeded(make))
    generator = run.prepare(seeded(lambda: nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh())))
    judges, makes = (run.prepare(torch.optim.Adam(each.parameters(), lr=0.01)) for each in (critic, generator))
    for batch in run.batches(evaluate=dict):
        noise = batch.images.flatten(1)[:, :4]
        made = generator(noise)
        run.backward((F.softplus(-critic(batch.images)) + F.softplus(critic(made.detach()))).sum())
        run.step(judges)
        run.backward(F.softplus(-critic(generator(noise))).sum())
        run.step(makes)
        judges.zero_grad()
    return [critic, generator]


def clipped_critic(run: Any) -> list[nn.Module]:
    """Weights that are clipped after each step."""
    critic = run.prepare(linear(1))
    optimizer = run.prepare(torch.optim.RMSprop(critic.parameters(), lr=0.05))
    for batch in run.batches(evaluate=dict):
        run.backward((critic(batch.images)[:, 0] * (batch.labels * 2.0 - 3)).sum())
        run.step(optimizer)
        with torch.no_grad():
            for each in critic.parameters():
                each.clamp_(-0.02, 0.02)
    return [critic]


def weight_averaging(run: Any) -> list[nn.Module]:
    """torch's stochastic weight averaging, with a schedule, and batch norm that is measured anew at the end."""
    model = run.prepare(small())
    average = run.prepare(AveragedModel(model))
    optimizer = sgd(run, model)
    schedule = run.prepare(SWALR(optimizer, swa_lr=0.01, anneal_epochs=3))
    seen = []
    for batch in run.batches(evaluate=dict):
        seen.append(batch.images)
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        if batch.step >= 6:
            average.update_parameters(model)
            schedule.step()
    update_bn(seen, average)
    return [model, average]


def plateau(run: Any) -> list[nn.Module]:
    """A rate that falls when the loop's own evaluation gets no better."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    schedule = run.prepare(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0))

    def measure() -> dict[str, float]:
        schedule.step(1.0)
        return {"loss": 1.0}

    for batch in run.batches(evaluate=measure):
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
    model.rate = nn.Parameter(torch.tensor(optimizer.param_groups[0]["lr"]))
    return [model]


def added_group(run: Any) -> list[nn.Module]:
    """The head alone, then all layers."""
    model = run.prepare(small())
    *body, weight, bias = model.parameters()
    optimizer = run.prepare(torch.optim.SGD([weight, bias], lr=0.1, momentum=0.9))
    for batch in run.batches(evaluate=dict):
        if batch.step == 4:
            optimizer.add_param_group({"params": body, "lr": 0.01})
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
    return [model]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        norm = partial(nn.BatchNorm2d, 4, track_running_stats=False)  # plain PyTorch counts a batch twice
        self.block = nn.Sequential(norm(), nn.ReLU(), nn.Conv2d(4, 4, 3), norm())
        self.head = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, images: Tensor) -> Tensor:
        features: Any = checkpoint(self.block, self.stem(images), use_reentrant=self.reentrant)
        return self.head(features.mean((2, 3)))


def with_checkpoints(run: Any) -> list[nn.Module]:
    return trained(run, seeded(lambda: Checkpointed(reentrant=False)))


def with_reentrant_checkpoints(run: Any) -> list[nn.Module]:
    return trained(run, seeded(lambda: Checkpointed(reentrant=True)))


def trained(run: Any, network: nn.Module, edit: Callable[[nn.Module], object] = lambda model: None) -> list[nn.Module]:
    model = run.prepare(network)
    optimizer = sgd(run, model)
    for batch in run.batches(evaluate=dict):
        run.backward(cross_entropy(model(batch.images), batch.labels))
        edit(model)
        run.step(optimizer)
    return [model]


def clipped_by_hand(run: Any) -> list[nn.Module]:
    return trained(run, small(), lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def edited_gradients(run: Any) -> list[nn.Module]:
    """Gradients that are centred, replaced and taken away by hand."""

    def edit(model: nn.Module) -> None:
        for number, each in enumerate(model.parameters()):
            assert each.grad is not None
            each.grad.sub_(each.grad.mean())
            if number == 0:
                each.grad = each.grad.sign() * 0.01
            if number == 1:
                each.grad = None

    return trained(run, small(), edit)


def accumulated_by_hand(run: Any) -> list[nn.Module]:
    """Each batch in two halves, of which the second may be empty."""
    model = run.prepare(linear())
    optimizer = sgd(run, model)
    for batch in run.batches(evaluate=dict):
        for pictures, labels in zip(batch.images.tensor_split(2), batch.labels.tensor_split(2), strict=True):
            run.backward(cross_entropy(model(pictures), labels))
        run.step(optimizer)
    return [model]


def subset(run: Any) -> list[nn.Module]:
    """An optimizer of some weights; the others get gradients that nobody clears."""
    model = run.prepare(small())
    *_, weight, bias = model.parameters()
    optimizer = run.prepare(torch.optim.SGD([weight, bias], lr=0.1))
    for batch in run.batches(evaluate=dict):
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
    return [model]


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


def parametrized(run: Any) -> list[nn.Module]:
    def make() -> nn.Module:
        square = parametrize.register_parametrization  # of a weight
        middle = nn.Linear(8, 8)
        square(middle, "weight", Symmetric())
        first = parametrizations.spectral_norm(nn.Linear(WIDTH, 8))
        return nn.Sequential(nn.Flatten(), first, nn.Tanh(), middle, parametrizations.weight_norm(nn.Linear(8, 4)))

    return trained(run, seeded(make))


def modes(run: Any) -> list[nn.Module]:
    """Evaluation mode in every other step, and a look at the batch in evaluation mode after it."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for batch in run.batches(evaluate=dict):
        model.train(batch.step % 2 == 0)
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        model.eval()
        with torch.no_grad():
            right = (model(batch.images).argmax(1) == batch.labels).sum()
        model.train()
        run.log(right=right)
    return [model]


def prepared_teacher(run: Any) -> list[nn.Module]:
    teacher = run.prepare(small()).eval().requires_grad_(False)
    model = run.prepare(linear())
    optimizer = sgd(run, model)
    for batch in run.batches(evaluate=dict):
        run.backward(F.kl_div(model(batch.images).log_softmax(1), teacher(batch.images).softmax(1), reduction="sum"))
        run.step(optimizer)
    return [model, teacher]


class Momentum(nn.Module):
    """Momentum contrast: a slow copy of an encoder, and a queue of its newest features."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = linear(8), linear(8).requires_grad_(False)
        self.queue: Tensor
        self.register_buffer("queue", F.normalize(torch.linspace(-1, 1, 16 * 8).view(16, 8)))

    @torch.no_grad()
    def follow(self, keys: Tensor) -> None:
        for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
        self.queue.copy_(torch.cat([keys, self.queue])[:16])


def momentum_contrast(run: Any) -> list[nn.Module]:
    model = run.prepare(Momentum())
    optimizer = run.prepare(torch.optim.SGD(model.query.parameters(), lr=0.1))
    for batch in run.batches(evaluate=dict):
        query, key = F.normalize(model.query(batch.images)), F.normalize(model.key(batch.images.flip(3))).detach()
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ model.queue.T.clone()], dim=1) / 0.2
        run.backward(cross_entropy(logits, torch.zeros_like(batch.labels)))
        run.step(optimizer)
        model.follow(all_rows(run, key[: batch.num_used]))
    return [model]


def all_rows(run: Any, rows: Tensor) -> Tensor:
    return torch.from_numpy(run.gather(rows)).to(rows) if isinstance(run, Run) else rows


class OwnNorm(nn.BatchNorm2d):
    """Batch norm with another default and something around it."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-3, momentum=0.2)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def own_batch_norm(run: Any) -> list[nn.Module]:
    """A class of batch norm of the loop's own, and torch's, which needs a GPU otherwise."""

    def make() -> nn.Module:
        norm = nn.SyncBatchNorm(4)
        return nn.Sequential(nn.Conv2d(3, 4, 3), OwnNorm(4), nn.Conv2d(4, 4, 3), norm, nn.Flatten(), nn.Linear(64, 4))

    return trained(run, seeded(make))


def backward_for_each_head(run: Any) -> list[nn.Module]:
    """A backward for each loss, which reaches one head, and gradients that are kept while others are computed."""
    body = run.prepare(seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 8), nn.Tanh())))
    heads = run.prepare(seeded(lambda: nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 2)])))
    weights = [*body.parameters(), *heads.parameters()]
    optimizer = run.prepare(torch.optim.SGD(weights, lr=0.1, momentum=0.9))
    for batch in run.batches(evaluate=dict):
        run.backward(cross_entropy(heads[0](body(batch.images.flip(3))), batch.labels))
        kept = [each.grad for each in weights]
        optimizer.zero_grad()
        for head, labels in zip(heads, (batch.labels, batch.labels % 2), strict=True):
            run.backward(cross_entropy(head(body(batch.images)), labels))
        for weight, other in zip(weights, kept, strict=True):
            weight.grad = weight.grad if other is None else weight.grad + 0.3 * other
        run.step(optimizer)
    return [body, heads]


def caught(run: Any) -> list[nn.Module]:
    """An exception of the loop's own, caught by the loop."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for batch in run.batches(evaluate=dict):
        try:
            if batch.step == 3:
                raise RuntimeError("too large")
            loss = cross_entropy(model(batch.images), batch.labels)
        except RuntimeError:
            loss = cross_entropy(model(batch.images * 0.5), batch.labels)
        run.backward(loss)
        run.step(optimizer)
    return [model]


def looked_ahead(run: Any) -> list[nn.Module]:
    """Weights that go back half of the way every third step."""
    model = run.prepare(small())
    optimizer = sgd(run, model)
    slow = copy.deepcopy(model)
    for batch in run.batches(evaluate=dict):
        run.backward(cross_entropy(model(batch.images), batch.labels))
        run.step(optimizer)
        if batch.step % 3 == 2:
            with torch.no_grad():
                for old, new in zip(slow.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.5)
                    new.copy_(old)
    return [model]


LOOPS = (
    gan,
    clipped_critic,
    weight_averaging,
    plateau,
    added_group,
    with_checkpoints,
    with_reentrant_checkpoints,
    clipped_by_hand,
    edited_gradients,
    accumulated_by_hand,
    subset,
    parametrized,
    modes,
    prepared_teacher,
    momentum_contrast,
    own_batch_norm,
    backward_for_each_head,
    caught,
    looked_ahead,
)


def states(models: list[nn.Module]) -> list[Tensor]:
    return [each.detach().clone() for model in models for each in model.state_dict().values()]


Loops = tuple[Callable[[Any], list[nn.Module]], ...]


def with_a_run(folder: str, loops: Loops, options: ResolvedConfig = OPTIONS) -> dict[str, list[Tensor]]:
    found = {}
    for loop in loops:
        run = make_run(options, images(NUM_IMAGES), f"{folder}/{loop.__name__}", Recorder())
        models = loop(run)
        assert run.finish().status == "finished"
        found[loop.__name__] = states(models)
    return found


def with_torch(folder: str, loops: Loops, options: ResolvedConfig = OPTIONS) -> dict[str, list[Tensor]]:
    run = make_run(options, images(NUM_IMAGES), folder, Recorder())
    model = run.prepare(linear())
    optimizer = sgd(run, model)
    batches = []
    for batch in run.batches(evaluate=dict):
        batches.append(PlainBatch(batch.images.clone(), batch.labels.clone(), batch.step, batch.num_used))
        run.backward(model(batch.images).sum())
        run.step(optimizer)
    return {loop.__name__: states(loop(Plain(batches, options))) for loop in loops}


def check(loops: Loops, folder: Path) -> None:
    """Assert that they end as plain PyTorch does: on one worker, also with its own batch norm, and on two."""
    wanted = with_torch(str(folder / "torch"), loops)
    both = run_in_processes(2, with_a_run, str(folder / "two"), loops)
    own_norm = dataclasses.replace(OPTIONS, batch_norm="aggregate")
    one = with_a_run(str(folder / "one"), loops), with_a_run(str(folder / "own norm"), loops, own_norm)
    for found in (*one, *both):
        for name, ours in found.items():
            torch.testing.assert_close(
                ours, wanted[name], rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
            )


def test_they_end_as_with_plain_pytorch(tmp_path: Path) -> None:
    check(LOOPS, tmp_path)
