"""A script learns that its loop has changed variables which it does not see."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from raytrain.training.loop_checks.left_behind import note_on_changes, states_of_variables

HISTORY: list[float] = []
NAN = float("nan")
best = 0.0


def of_module() -> None:
    global best
    best += 1
    HISTORY.append(NAN)


class Trainer:
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.rate = 0.1

    def train(self) -> None:
        self.losses.append(self.rate)


def around() -> Callable[[], None]:
    seen: set[int] = set()

    def of_function() -> None:
        seen.add(len(seen))

    return of_function


def given(options: dict[str, int], limit: int) -> None:
    options["limit"] = limit


NETWORK = torch.nn.Linear(2, 2)


def training() -> None:
    optimizer = torch.optim.SGD(NETWORK.parameters(), lr=0.1)
    NETWORK(torch.ones(1, 2)).sum().backward()
    optimizer.step()


class Classifier(torch.nn.Module):
    def fit(self) -> None:
        self.layer = torch.nn.Linear(2, 2)
        self.register_forward_hook(lambda *_: None)
        torch.nn.init.zeros_(self.layer.weight)


def nothing() -> None:
    NETWORK(torch.ones(1, 2)).sum().backward()
    [*HISTORY, NAN, best].clear()


@pytest.mark.parametrize(
    ("loop", "names"),
    [
        (of_module, {"best", "HISTORY"}),
        (Trainer().train, {"self.losses"}),
        (around(), {"seen"}),
        (partial(given, options={}, limit=3), {"options"}),
        (training, {"NETWORK"}),
        (Classifier().fit, {"self"}),
        (nothing, None),
        (len, None),
    ],
)
def test_what_a_loop_has_changed_is_named(loop: Callable[..., Any], names: set[str] | None) -> None:
    before = states_of_variables(loop)
    loop(*[()] * (loop is len))
    note = note_on_changes(before, states_of_variables(loop))
    if names is None:
        assert note is None
        return
    assert note is not None
    changed = note.removeprefix("the loop has changed ").partition(" in the process of a worker")[0]
    assert set(changed.split(", ")) == names
    networks = {"NETWORK", "self"}
    assert ("raytrain.load" in note, "run.log" in note) == (names <= networks, not names <= networks)
