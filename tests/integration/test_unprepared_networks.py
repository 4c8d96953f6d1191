"""A run reports the networks that its loop changes and has not prepared, as no checkpoint holds them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from raytrain.monitor.events import Note
from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.run import Run
from tests.helpers.memory_runs import Recorder, config
from tests.helpers.own_loops import cross_entropy, learn, prepared, train_loop

OPTIONS = config(batch_size=12, epochs=2)


class Average:
    """A moving average as many scripts have it, without a state."""

    def __init__(self, model: nn.Module) -> None:
        self.network = copy.deepcopy(model).eval()

    def update(self, model: nn.Module) -> None:
        for old, new in zip(self.network.parameters(), model.parameters(), strict=True):
            old.data = old.data * 0.9 + new.data * 0.1


class Stateful(Average):
    """One that has a state, of copies."""

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.network.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.network.load_state_dict(state)


class Centred(nn.Module):
    """A loss with a buffer that is replaced."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, logits: Tensor) -> Tensor:
        self.centre = self.centre * 0.9 + logits.detach().mean(0) * 0.1
        return (logits - self.centre).square().mean()


def with_object(run: Run) -> None:
    model, optimizer = prepared(run)
    ema = Average(model)
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
            ema.update(model)


def once_an_epoch(run: Run) -> None:
    model, optimizer = prepared(run)
    swa = AveragedModel(model)
    for epoch in run.epochs():
        for batch in epoch:
            learn(model, optimizer, batch)
        swa.update_parameters(model)


def with_probe(run: Run) -> None:
    model, optimizer = prepared(run)
    probes = [nn.Linear(3 * 8 * 8, 4).to(torch.float64)]
    of_probe = torch.optim.SGD(probes[0].parameters(), lr=0.1)
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            of_probe.zero_grad()
            (cross_entropy(model, batch) + F.cross_entropy(probes[0](batch.images.flatten(1)), batch.labels)).backward()
            optimizer.step()
            of_probe.step()


def with_buffer(run: Run) -> None:
    model, optimizer = prepared(run)
    criterion = Centred().double()
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            (cross_entropy(model, batch) + criterion(model(batch.images))).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("loop", "name"),
    [(with_object, "ema.network"), (once_an_epoch, "swa"), (with_probe, "probes"), (with_buffer, "criterion")],
)
def test_a_network_that_changes_and_is_not_prepared_is_told_once(
    loop: Callable[[Run], None], name: str, tmp_path: Path
) -> None:
    assert [note.partition(",")[0] for note in notes_of(loop, tmp_path)] == [f"the loop changes the weights of {name}"]


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute, and takes shorter ones with time."""

    def __init__(self, weights: Any) -> None:
        self.num_steps = 0
        super().__init__(weights, lr=0.1)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.num_steps += 1
        self.param_groups[0]["lr"] = 0.1 / self.num_steps
        super().step()


class Remembering(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.num_steps = state_dict["num_steps"]


@pytest.mark.parametrize("kind", [Counting, Remembering])
def test_a_counter_of_an_optimizer_that_its_state_lacks_is_told(kind: type[Counting], tmp_path: Path) -> None:
    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(kind(model.parameters()))
        for epoch in run.epochs():
            for batch in epoch:
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()

    told = [note.partition(",")[0] for note in notes_of(loop, tmp_path) if "state_dict" in note]
    assert told == (["the steps of an optimizer change Counting.num_steps"] if kind is Counting else [])


def with_what_is_prepared(run: Run) -> None:
    model, optimizer = prepared(run)
    average, ema, swa = run.prepare(WeightAverage(model, 0.9)), run.prepare(Stateful(model)), AveragedModel(model)
    inner, teacher, swa = ema.network, copy.deepcopy(model).requires_grad_(False), run.prepare(swa)
    criterion = run.prepare(Centred())
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            fast = copy.deepcopy(model)  # another one in each batch
            (cross_entropy(model, batch) + criterion(model(batch.images)) + cross_entropy(fast, batch)).backward()
            optimizer.step()
            average.update(batch.step)
            ema.update(model)
            swa.update_parameters(model)
            assert inner(batch.images).shape == teacher.eval()(batch.images).shape


def test_what_is_prepared_or_does_not_change_is_told_nothing(tmp_path: Path) -> None:
    assert notes_of(with_what_is_prepared, tmp_path) == []


def notes_of(loop: Callable[[Run], None], folder: Path) -> list[str]:
    recorder = Recorder()
    train_loop(loop, folder, OPTIONS, recorder=recorder)
    return [event.text for event in recorder.events if isinstance(event, Note)]
