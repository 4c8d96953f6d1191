"""Loops of a run, and the same in plain PyTorch on one process: both end with the same weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.config import ResolvedConfig
from raytrain.monitor.events import Note
from raytrain.training.assembly import train_run
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Recorder, config, images, make_run, make_spec
from tests.helpers.reference_loop import small_net

OPTIONS = config(batch_size=7, epochs=2, log_every=1, flip="none", translate=0)  # 6 steps per epoch
NUM_IMAGES = 38
NUM_IMAGES_WITH_EMPTY_SLICES = 36  # the last global batch of an epoch has one image, so the second worker has none
WIDTH = 3 * 8 * 8
_RIGHT_NOTES = (  # which say nothing against a loop
    "which the loop does not call",  # of options that the built-in loop uses
    "the evaluation calls no prepared network",  # of a loop whose own evaluation makes numbers up
    "the loop has changed found",  # where its weights are kept for the comparison
    "the loop carries ",  # which matters to a resume alone, as the next one does
    "the epochs of this attempt",
)


@dataclass
class PlainBatch:
    images: Tensor
    labels: Tensor
    step: int
    num_used: int


@dataclass
class PlainEpoch:
    number: int
    batches: list[PlainBatch]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[PlainBatch]:
        return iter(self.batches)


class Plain:
    """Stands for a run in plain PyTorch: it has the same epochs, and its one worker has all rows."""

    num_classes, rank, world_size = 4, 0, 1

    def __init__(self, epochs: list[PlainEpoch], options: ResolvedConfig) -> None:
        self._epochs, self._options = iter(epochs), options
        self.device = torch.device(options.device)

    def prepare(self, thing: Any) -> Any:
        if not isinstance(thing, nn.Module):
            return thing
        model = thing.to(self.device)
        return model.double() if self._options.precision == "float64" else model.float()  # complex ones stay complex

    def epochs(self, evaluate: Callable[[], dict[str, float]] = dict) -> Iterator[PlainEpoch]:
        for epoch in self._epochs:
            yield epoch
            with torch.no_grad():
                evaluate()

    def gather(self, rows: Tensor) -> Tensor:
        return rows

    def mean(self, numerator: Tensor, denominator: Tensor) -> Tensor:
        return numerator / denominator

    def log(self, **means: Any) -> None: ...


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def small() -> nn.Module:
    return seeded(lambda: small_net(nn.BatchNorm2d, 3, 4))


def linear(width: int = 4) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, width)))


def sgd(run: Any, model: nn.Module, **options: Any) -> Any:
    return run.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options))


def states(models: list[nn.Module]) -> list[Tensor]:
    return [value.detach().clone() for model in models for value in model.state_dict().values()]


Loop = Callable[[Any], list[nn.Module]]
Loops = tuple[Loop, ...]


def with_a_run(
    folder: str, loops: Loops, options: ResolvedConfig = OPTIONS, num_images: int = NUM_IMAGES
) -> dict[str, list[Tensor]]:
    """The weights with which the loops end in runs, by the loops' names."""
    found: dict[str, list[Tensor]] = {}
    for loop in loops:
        name = loop.__name__

        def train(run: Run, loop: Loop = loop, name: str = name) -> None:
            models = loop(run)
            found[name] = states(models)

        place = f"{folder}/{name}"
        recorder = Recorder()
        run = make_run(options, images(num_images), place, recorder)
        spec = dataclasses.replace(make_spec(options, images(num_images), place), loop=train)
        assert train_run(spec, run).status == "finished"
        notes = [event.text for event in recorder.events if isinstance(event, Note)]
        wrong = [note for note in notes if not any(right in note for right in _RIGHT_NOTES)]
        assert not wrong, f"{name} is right, and is told otherwise: {wrong}"
    return found


def with_torch(
    folder: str, loops: Loops, options: ResolvedConfig = OPTIONS, num_images: int = NUM_IMAGES
) -> dict[str, list[Tensor]]:
    """The same in plain PyTorch, on the global batches of a run of one worker."""
    run = make_run(options, images(num_images), folder, Recorder())
    epochs = [
        PlainEpoch(
            epoch.number,
            [PlainBatch(batch.images.clone(), batch.labels.clone(), batch.step, batch.num_used) for batch in epoch],
        )
        for epoch in run.epochs(evaluate=dict)
    ]
    assert [len(epoch) for epoch in epochs] == [run.plan.steps_per_epoch] * 2
    return {loop.__name__: states(loop(Plain(epochs, options))) for loop in loops}


def check(loops: Loops, folder: Path, num_images: int = NUM_IMAGES) -> None:
    """Assert that they end as plain PyTorch does: on one worker, also with its own batch norm, and on two."""
    wanted = with_torch(str(folder / "torch"), loops, OPTIONS, num_images)
    both = run_in_processes(2, with_a_run, str(folder / "two"), loops, OPTIONS, num_images)
    own_norm = dataclasses.replace(OPTIONS, batch_norm="aggregate")
    one = (
        with_a_run(str(folder / "one"), loops, OPTIONS, num_images),
        with_a_run(str(folder / "own norm"), loops, own_norm, num_images),
    )
    for found in (*one, *both):
        assert tuple(found) == tuple(loop.__name__ for loop in loops)
        for name, ours in found.items():
            torch.testing.assert_close(
                ours, wanted[name], rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}"
            )
