"""``raytrain.parallel`` in plain loops: any number of processes trains what one does, in float64 to 1e-12.

Each loop is run by one process with whole batches, and by two and three with slices of them: even, uneven and empty.
"""

from __future__ import annotations

import copy
import gc
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import raytrain
from raytrain.errors import UsageError
from raytrain.training.batches.batch import Batch
from tests.helpers.gloo_processes import run_in_processes, run_script

ROOT = Path(__file__).parents[2]
SIZES = {
    1: [(7,), (6,), (5,), (8,)],
    2: [(4, 3), (0, 6), (5, 0), (1, 7)],
    3: [(3, 2, 2), (0, 1, 5), (5, 0, 0), (2, 3, 3)],
}
NUM_STEPS = 12  # each size of a slice meets what some loops do in every second or third step
Slice = tuple[Tensor, Tensor, Tensor]
"""Images, float64 (m, 3, 6, 6), labels and samples, int64 (m,)."""


def num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def slices(num_steps: int = NUM_STEPS) -> Iterator[Slice]:
    """Yield this process's slice of each global batch."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for step in range(num_steps):
        sizes = SIZES[num_processes()][step % 4]
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(sum(sizes), 3, 6, 6, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, 4, (sum(sizes),), generator=generator)
        samples = torch.randperm(1000, generator=generator)[: sum(sizes)]
        yield images.split(sizes)[rank], labels.split(sizes)[rank], samples.split(sizes)[rank]


def body(width: int = 5) -> nn.Module:
    torch.manual_seed(width)
    layers = (nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten())
    return nn.Sequential(*layers).double()


def network(*, normed: bool = True) -> nn.Module:
    first = body() if normed else nn.Sequential(nn.Flatten(), nn.Linear(108, 80), nn.Dropout(0.2)).double()
    return nn.Sequential(first, nn.Linear(80, 4).double())


def weights(*networks: nn.Module) -> dict[str, Tensor]:
    """Return copies of all weights and running statistics, and of the last gradients."""
    found: dict[str, Tensor] = {}
    for number, each in enumerate(networks):
        found |= {f"{number} {name}": value.clone() for name, value in each.state_dict().items()}
        found |= {f"{number} {name}.grad": p.grad for name, p in each.named_parameters() if p.grad is not None}
    return found


def plain(*, normed: bool = True) -> dict[str, Tensor]:
    model = raytrain.parallel(network(normed=normed))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for images, labels, _ in slices():
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


def without_batch_norm() -> dict[str, Tensor]:
    return plain(normed=False)


def several_losses_and_a_penalty() -> dict[str, Tensor]:
    model = raytrain.parallel(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    for images, labels, _ in slices():
        optimizer.zero_grad()
        logits = model(images)
        F.cross_entropy(logits, labels).backward(retain_graph=True)
        (0.1 * logits.square().mean() + 0.01 * next(model.parameters()).square().sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return weights(model)


def accumulation(*, sends_late: bool = True) -> dict[str, Tensor]:
    model = raytrain.parallel(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    for number, (images, labels, _) in enumerate(slices(), start=1):
        with raytrain.no_sync(model, enabled=sends_late and number % 4 != 0):
            (F.cross_entropy(model(images), labels) / 4).backward()
        if number % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def accumulation_sent_each_time() -> dict[str, Tensor]:
    return accumulation(sends_late=False)


def accumulation_sent_by_the_step() -> dict[str, Tensor]:
    model = raytrain.parallel(network())
    optimizer = SGD(model.parameters(), lr=0.1)
    for images, labels, _ in slices():
        with raytrain.no_sync(model):
            F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def two_forwards_that_should_agree() -> dict[str, Tensor]:
    """As in R-Drop, dropout makes the difference between two forwards of the same images."""
    model = raytrain.parallel(network(normed=False))
    optimizer = SGD(model.parameters(), lr=0.1)
    for images, labels, _ in slices():
        first, second = model(images), model(images)
        assert not len(images) or not torch.equal(first, second)
        optimizer.zero_grad()
        (F.cross_entropy(first, labels) + (first - second).square().mean(1).sum() / max(len(images), 1)).backward()
        optimizer.step()
    return weights(model)


@dataclass
class Record:
    """What some networks get in place of a tensor."""

    name: str
    pixels: Tensor


class OfRecords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, record: Record) -> Tensor:
        return self.layers(record.pixels)


def images_in_a_record() -> dict[str, Tensor]:
    model = raytrain.parallel(OfRecords())
    optimizer = SGD(model.parameters(), lr=0.1)
    for images, labels, _ in slices():
        optimizer.zero_grad()
        F.cross_entropy(model(Record("batch", images)), labels).backward()
        optimizer.step()
    return weights(model)


class Padded:
    """As DETR's NestedTensor: no dataclass, and the images are not its first attribute."""

    def __init__(self, images: Tensor) -> None:
        self.size, self.tensors, self.mask = images.shape[-2:], images, torch.zeros(3, 6, 6)


class Settings:
    def __init__(self) -> None:
        self.mean = torch.zeros(3, 1)


class OfPadded(OfRecords):
    def forward(self, settings: Settings, images: Padded, targets: list[dict[str, Tensor]]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.layers(images.tensors)


class OfDictionaries(OfRecords):
    def forward(self, images: list[dict[str, Tensor]]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.layers(
            torch.stack([each["image"] for each in images]) if images else torch.empty(0, 3, 6, 6).double()
        )


def images_in_an_object() -> dict[str, Tensor]:
    model = raytrain.parallel(OfPadded())
    optimizer = SGD(model.parameters(), lr=0.1)
    for images, labels, _ in slices():
        optimizer.zero_grad()
        boxes = [{"boxes": torch.zeros(9, 4)} for _ in images]
        F.cross_entropy(model(Settings(), Padded(images), boxes), labels).backward()
        optimizer.step()
    return weights(model)


def images_in_dictionaries() -> dict[str, Tensor]:
    """As Detectron's networks get them."""
    model = raytrain.parallel(OfDictionaries())
    optimizer = SGD(model.parameters(), lr=0.1)
    for images, labels, _ in slices():
        optimizer.zero_grad()
        F.cross_entropy(model([{"height": 6, "image": image} for image in images]), labels).backward()
        optimizer.step()
    return weights(model)


def body_and_head() -> dict[str, Tensor]:
    """Features of several windows of each image go through the head, so it gets other numbers of rows."""
    backbone, head = raytrain.parallel(body(), nn.Sequential(nn.Dropout(0.2), nn.Linear(20, 4)).double())
    optimizer = SGD([*backbone.parameters(), *head.parameters()], lr=0.1)
    for images, labels, _ in slices():
        optimizer.zero_grad()
        logits = head(backbone(images).view(4 * len(images), 20)).view(len(images), 4, 4).mean(1)
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    return weights(backbone, head)


def adversaries(*, together: bool = True) -> dict[str, Tensor]:
    """As in a GAN, each network learns in its turn, from a backward through both."""
    maker, judge = nn.Sequential(nn.Flatten(), nn.Linear(108, 108), nn.BatchNorm1d(108)).double(), network()
    if together:
        maker, judge = raytrain.parallel(maker, judge)
    else:
        maker, judge = raytrain.parallel(maker), raytrain.parallel(judge)
    of_maker, of_judge = SGD(maker.parameters(), lr=0.05), SGD(judge.parameters(), lr=0.05)
    for images, labels, _ in slices():
        made = maker(images.flip(-1)).view_as(images)
        of_judge.zero_grad()
        (F.cross_entropy(judge(images), labels) - judge(made.detach())[:, 0].mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        F.cross_entropy(judge(made), labels).backward()
        of_maker.step()
    return weights(maker, judge)


def adversaries_apart() -> dict[str, Tensor]:
    return adversaries(together=False)


def evaluated_by_one_process() -> dict[str, Tensor]:
    """Process 0 measures with gradients on, and looks at the network's graph, which the others do not."""
    model = raytrain.parallel(network(normed=False))
    optimizer = SGD(model.parameters(), lr=0.1)
    for step, (images, labels, _) in enumerate(slices()):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if step in (4, 5) and (not dist.is_initialized() or dist.get_rank() == 0):
            model.eval()(torch.ones(3, 3, 6, 6, dtype=torch.float64))
            model.train()
    return weights(model)


def moved_and_partly_frozen() -> dict[str, Tensor]:
    model = raytrain.parallel(network().float()).double()
    optimizer = SGD(model.parameters(), lr=0.1)
    for step, (images, labels, _) in enumerate(slices()):
        model.get_submodule("0").requires_grad_(step % 3 != 1)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        model = model.float().double() if step == 9 else model
    return weights(model)


def checkpointed_whole() -> dict[str, Tensor]:
    model = raytrain.parallel(network(normed=False))
    optimizer = SGD(model.parameters(), lr=0.1)
    for images, labels, _ in slices():
        optimizer.zero_grad()
        logits: Any = checkpoint(model, images, use_reentrant=False)
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    return weights(model)


def named_samples() -> dict[str, Tensor]:
    """The batches name their samples, in an order of each process's own, and an empty one has a placeholder."""
    model = raytrain.parallel(network(), seed=3)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step, (images, labels, samples) in enumerate(slices()):
        num_used = len(images)
        if not num_used:
            images, labels, samples = images.new_full((1, 3, 6, 6), 5.0), labels.new_zeros(1), samples.new_zeros(1)
        order = torch.arange(len(images)).roll(num_processes())
        images, labels, samples = images[order], labels[order], samples[order]
        images, labels = Batch(images, labels, labels, samples, step, 0, num_used, (num_used,))
        optimizer.zero_grad()
        logits = model(images) + model(images * 2)  # the second tensor is another one
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
    return weights(model)


def compiled(steps: Collection[int], backend: str) -> dict[str, Tensor]:
    """Called through ``torch.compile``, which compiles again on a process that gets another number of images.

    The collectives of several batch norms, one of which has no weight, come in one order also without images.
    """
    torch.manual_seed(0)
    norms = nn.BatchNorm2d(5), nn.BatchNorm2d(6, affine=False), nn.BatchNorm2d(4)
    convolutions = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 6, 2), nn.Conv2d(6, 4, 2)
    layers = (layer for pair in zip(convolutions, norms, strict=True) for layer in (*pair, nn.ReLU()))
    model = raytrain.parallel(nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 4)).double())
    call = torch.compile(model, backend=backend) if backend else model
    optimizer = SGD(model.parameters(), lr=0.1)
    for step, (images, labels, _) in enumerate(slices(max(steps) + 1)):
        if step not in steps:
            continue
        optimizer.zero_grad()
        F.cross_entropy(call(images), labels).backward()
        optimizer.step()
    return weights(model)


def large_and_small() -> nn.Module:
    """A network whose gradients are written one by one, and together."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(108, 400), nn.ReLU(), nn.Linear(400, 4)).double()


def gradients_that_the_loop_keeps() -> dict[str, Tensor]:
    """Nothing is written over them later, in whatever way they are kept."""
    model = raytrain.parallel(large_and_small())
    optimizer = SGD(model.parameters(), lr=0.1)
    kept: dict[str, Tensor] = {}
    for step, (images, labels, _) in enumerate(slices(12)):
        F.cross_entropy(model(images), labels).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            kept[f"{step} {name}"] = (parameter.grad, parameter.grad.detach(), parameter.grad[:1])[step % 3]
        optimizer.step()
        optimizer.zero_grad()
    return kept


def layers_that_are_called_twice() -> dict[str, Tensor]:
    """Parts of a gradient come one after the other, with and without a sum between them."""
    model = raytrain.parallel(large_and_small())
    optimizer = SGD(model.parameters(), lr=0.1)
    for number, (images, labels, _) in enumerate(slices(12), start=1):
        with raytrain.no_sync(model, enabled=number % 3 != 0):
            rows = images.clone().requires_grad_()  # a checkpoint of this kind needs it
            again = checkpoint(model, rows, use_reentrant=True) if number % 2 else model(images * 2)
            F.cross_entropy(model(images) + again, labels).backward()
        if number % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def a_body_that_learns_alone_before_its_head() -> dict[str, Tensor]:
    """Two backwards before a sum have other shares, and the second one begins with other parameters."""
    torch.manual_seed(0)
    networks = raytrain.parallel(nn.Sequential(nn.Flatten(), nn.Linear(108, 6)).double(), nn.Linear(6, 4).double())
    first, head = networks
    optimizer = SGD([*first.parameters(), *head.parameters()], lr=0.1)
    for number, (images, labels, _) in enumerate(slices()):
        features = first(images)
        with raytrain.no_sync(first, enabled=number % 2 == 0):
            (F.cross_entropy(head(features), labels) if number % 2 else features.square().mean()).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return weights(*networks)


class FailsOnce(torch.autograd.Function):
    """Passes its input on, and fails in the next backward if ``is_armed``, as a GPU without memory does."""

    is_armed = False

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        if FailsOnce.is_armed:
            FailsOnce.is_armed = False
            raise ValueError("out of memory")
        return gradient


def a_backward_that_is_repeated_after_an_error() -> dict[str, Tensor]:
    """The error comes after the head has got its gradients, and no forward comes before the backward is repeated."""
    torch.manual_seed(0)
    model, head = raytrain.parallel(network(normed=False), nn.Linear(4, 4, dtype=torch.float64))
    optimizer = SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for number, (images, labels, _) in enumerate(slices()):
        optimizer.zero_grad()
        loss = F.cross_entropy(head(FailsOnce.apply(model(images))), labels)
        if number % 3 == 1:
            FailsOnce.is_armed = True
            with pytest.raises(ValueError, match="out of memory"):
                loss.backward(retain_graph=True)
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model, head)


def weights_of_a_function() -> dict[str, Tensor]:
    """The network is called with tensors that its weights are in, and inside of ``torch.func.grad``."""
    torch.manual_seed(0)
    model = raytrain.parallel(network(normed=False))
    optimizer, call = SGD(model.parameters(), lr=0.1), torch.func.functional_call
    for images, labels, _ in slices(8):
        if len(images):
            mean = partial(lambda rows, own: call(model, own, (rows,)).mean(), images)
            torch.func.grad(mean)(dict(model.named_parameters()))
        halved = {name: parameter / 2 for name, parameter in model.named_parameters()}
        optimizer.zero_grad()
        F.cross_entropy(call(model, halved, (images,)), labels).backward()
        optimizer.step()
    return weights(model)


def layers_that_come_later() -> dict[str, Tensor]:
    model = raytrain.parallel(network())
    for step, (images, labels, _) in enumerate(slices(12)):
        if step == 5:
            first = model.get_submodule("0")
            first[1], first[3] = nn.BatchNorm2d(5, dtype=torch.float64), nn.Dropout(0.4)  # type: ignore[index]
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        SGD(model.parameters(), lr=0.1).step()
    return weights(model)


class Stop(torch.autograd.Function):
    """Passes its input on, and gives it no gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


def gradients_that_a_function_stops() -> dict[str, Tensor]:
    """In every second step the layers before the head get no gradient."""
    torch.manual_seed(0)
    first, second, head = network(normed=False), nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    model, second, head = raytrain.parallel(first, second, head)
    for step, (images, labels, _) in enumerate(slices()):
        rows = model(images)
        rows = Stop.apply(second(rows)) if step % 2 else second(rows)
        optimizer = SGD([*model.parameters(), *second.parameters(), *head.parameters()], lr=0.1)
        optimizer.zero_grad()
        F.cross_entropy(head(rows), labels).backward()
        assert all((parameter.grad is None) == bool(step % 2) for parameter in model.parameters())
        optimizer.step()
    return weights(model, second, head)


def frames_that_a_thread_keeps() -> dict[str, Tensor]:
    """A thread that looks at this one's stack while the first backward searches all objects keeps what they are."""
    kept: list[object] = []
    get_objects = gc.get_objects

    def looked_at() -> list[Any]:
        kept.append(sys._getframe(1))
        return get_objects()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gc, "get_objects", looked_at)
        trained = without_batch_norm()
    assert bool(kept) == (num_processes() > 1)
    return trained


LOOPS: tuple[Callable[[], dict[str, Tensor]], ...] = (
    plain,
    without_batch_norm,
    several_losses_and_a_penalty,
    accumulation,
    accumulation_sent_each_time,
    accumulation_sent_by_the_step,
    two_forwards_that_should_agree,
    images_in_a_record,
    images_in_an_object,
    images_in_dictionaries,
    body_and_head,
    adversaries,
    adversaries_apart,
    evaluated_by_one_process,
    moved_and_partly_frozen,
    checkpointed_whole,
    a_backward_that_is_repeated_after_an_error,
    weights_of_a_function,
    layers_that_come_later,
    gradients_that_a_function_stops,
    frames_that_a_thread_keeps,
    named_samples,  # after those whose dropout goes by the place of a row: the last batch names rows until the next one
    gradients_that_the_loop_keeps,
    layers_that_are_called_twice,
    a_body_that_learns_alone_before_its_head,
)


def run_loops() -> dict[str, dict[str, Tensor]]:
    return {loop.__name__: loop() for loop in LOOPS}


@pytest.fixture(scope="module")
def of_one_process() -> dict[str, dict[str, Tensor]]:
    return run_loops()


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_several_processes_train_what_one_does(of_one_process: dict[str, dict[str, Tensor]], world_size: int) -> None:
    first, *others = run_in_processes(world_size, run_loops)
    for name, wanted in of_one_process.items():
        torch.testing.assert_close(first[name], wanted, rtol=1e-12, atol=1e-12, msg=f"{{}}\n{name}".format)
        for other in others:
            torch.testing.assert_close(other[name], first[name], rtol=0, atol=0)


# To compile again for each of three steps, also the backwards, takes 15 s of a core. In step 1 a process has no images.
@pytest.mark.parametrize(
    ("steps", "backend"), [((1,), "eager"), pytest.param((0, 1, 2), "aot_eager", marks=pytest.mark.slow)]
)
def test_two_processes_that_compile_train_what_one_does(steps: tuple[int, ...], backend: str) -> None:
    first, other = run_in_processes(2, compiled, steps, backend)
    torch.testing.assert_close(first, compiled(steps, ""), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(other, first, rtol=0, atol=0)


def addresses_of_gradients() -> list[int]:
    model = raytrain.parallel(large_and_small())
    addresses: list[int] = []
    for images, labels, _ in slices(4):
        F.cross_entropy(model(images), labels).backward()
        addresses += [each.grad.data_ptr() for each in model.parameters() if each.grad is not None][:1]
        model.zero_grad()
    return addresses


def test_gradients_get_the_memory_of_those_that_the_loop_has_dropped() -> None:
    for addresses in run_in_processes(2, addresses_of_gradients):
        assert len(addresses) == 4 and len(set(addresses)) == 1


def test_one_process_trains_what_plain_torch_does() -> None:
    models = [nn.Sequential(body()[:3], nn.Flatten(), nn.Linear(80, 4)).double() for _ in range(2)]  # type: ignore
    raytrain.parallel(models[0])
    for model in models:
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for images, labels, _ in slices():
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    torch.testing.assert_close(weights(models[0]), weights(models[1]), rtol=1e-12, atol=1e-12)


def test_a_network_keeps_its_names_and_its_copies_are_free() -> None:
    plain_network, model = network(), raytrain.parallel(network())
    assert list(model.state_dict()) == list(plain_network.state_dict())
    assert raytrain.parallel(model) is model  # a cell of a notebook that is run again
    images, labels, _ = next(slices())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        F.cross_entropy(copied(images), labels).backward()
        assert copied.training and all(parameter.grad is None for parameter in model.parameters())


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return "no error"


def backward_of(model: nn.Module, called: Callable[[Tensor], Tensor] | None = None, **options: Any) -> None:
    (called or model)(torch.ones(3, 3, 6, 6, dtype=torch.float64)).square().sum().backward(**options)


def mistakes() -> list[str]:
    """Return what is said to mistakes that all processes make alike, or find out alike."""
    rank = dist.get_rank()
    wrapped = raytrain.parallel(network())
    inner = raytrain.parallel(network(normed=False))
    outer = raytrain.parallel(nn.Sequential(inner, nn.Linear(4, 4).double()))
    return [
        error_of(lambda: raytrain.parallel(body(width=5 + rank))),
        error_of(lambda: raytrain.parallel(body(), seed=rank)),
        error_of(lambda: raytrain.parallel(DistributedDataParallel(network()))),
        error_of(lambda: backward_of(wrapped, DistributedDataParallel(wrapped))),
        error_of(lambda: backward_of(raytrain.parallel(network(normed=False)), create_graph=True)),
        error_of(lambda: backward_of(outer)),
    ]


def test_mistakes_of_all_processes_are_refused() -> None:
    for shapes, options, inside, around, twice, nested in run_in_processes(2, mistakes):
        assert "networks of other shapes or types, or other options, on worker 1 than on worker 0" in shapes
        assert options == shapes
        assert "raytrain.parallel got a DistributedDataParallel" in inside
        assert "into a DistributedDataParallel, which would sum gradients a second time" in around
        assert "create_graph=True" in twice
        assert "is in networks of two calls of raytrain.parallel" in nested


def warnings_on_a_hook() -> list[str]:
    """Train a step with a hook of a weight; return the warnings on it."""
    model = raytrain.parallel(network())
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward_of(model)
    return [str(warning.message) for warning in caught]


def test_a_hook_of_a_weight_is_told_what_it_gets() -> None:
    assert run_in_processes(1, warnings_on_a_hook) == [[]]
    for (warning,) in run_in_processes(2, warnings_on_a_hook):
        assert "a hook of a weight gets the gradient" in warning


def called_by_process_0_alone() -> str:
    model = raytrain.parallel(network(normed=False))
    if dist.get_rank() == 0:
        model(torch.ones(1, 3, 6, 6, dtype=torch.float64))
    try:
        return error_of(partial(backward_of, model))
    except RuntimeError as error:  # the other process has ended
        return str(error)
    finally:
        del model
        gc.collect()  # closes the connections of its groups, as the end of a process does


def test_a_forward_of_one_process_alone_is_refused() -> None:
    of_first, _ = run_in_processes(2, called_by_process_0_alone)
    assert "Worker 0 calls network 1 in training mode while worker 1 runs a backward" in of_first


def more_batches_on_process_0() -> str:
    model = raytrain.parallel(network(normed=False))
    backward_of(model)
    said = error_of(partial(backward_of, model)) if dist.get_rank() == 0 else ""
    del model
    gc.collect()  # closes the connections of its groups, as the end of a process does
    return said


def test_a_process_with_more_batches_than_the_others_says_so() -> None:
    of_first, _ = run_in_processes(2, more_batches_on_process_0)
    assert "every worker needs the same number of batches" in of_first


def test_mistakes_of_one_process_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = raytrain.parallel(network())
    assert "has not been called" in error_of(lambda: backward_of(model, model.get_submodule("0")))
    assert "got a str" in error_of(lambda: raytrain.parallel("resnet18"))  # pyright: ignore
    assert "got no network" in error_of(raytrain.parallel)
    assert "lazy layers" in error_of(lambda: raytrain.parallel(nn.LazyLinear(3)))
    assert "'none'" in error_of(lambda: raytrain.parallel(network(), batch_norm="none"))  # pyright: ignore
    assert "raytrain.no_sync got a Sequential" in error_of(lambda: raytrain.no_sync(network()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (lambda: raytrain.parallel(network()), lambda: backward_of(model)):
        assert "init_process_group() first" in error_of(call)
    for garbage in ("two", "-2", "2.0"):
        monkeypatch.setenv("WORLD_SIZE", garbage)
        assert f"WORLD_SIZE is '{garbage}' in the environment" in error_of(lambda: raytrain.parallel(network()))


def test_the_script_of_the_page_prints_the_same_on_any_number_of_processes(tmp_path: Path) -> None:
    page = (ROOT / "docs/from-pytorch.md").read_text()
    script = tmp_path / "train.py"
    script.write_text(next(re.finditer(r"```python\n(.*?)```", page, flags=re.DOTALL))[1])
    printed = [run_script(script, number) for number in (1, 2)]
    assert printed[0] == printed[1]
    assert "loss" in printed[0]
