"""Loops that train more layers as they go on: groups added in mid-run resume, and a late ``run.prepare`` is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain.errors import UsageError
from raytrain.training.run import Run
from tests.helpers.memory_runs import Recorder, config
from tests.helpers.own_loops import WIDTH, Loop, cross_entropy, train_loop

OPTIONS = config(batch_size=12, epochs=3)  # 3 steps per epoch


def two_layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 4))


def unfreezing(run: Run, is_due: Callable[[int, int], bool], *, with_schedule: bool = False) -> None:
    """The last layer learns alone, and the first one from the second epoch on."""
    model: Any = run.prepare(two_layers())
    optimizer = run.prepare(torch.optim.SGD(model[3].parameters(), lr=0.1, momentum=0.9))
    if with_schedule:
        scheduler = run.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch))
    for epoch in run.epochs():
        if is_due(epoch.number, len(optimizer.param_groups)):
            optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.02})
        for batch in epoch:
            model.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()
        if with_schedule:
            optimizer.param_groups[0]["lr"] = scheduler.get_last_lr()[0] * 0.5


def from_then_on(number: int, num_groups: int) -> bool:
    return number >= 1 and num_groups == 1


def weights_after(loop: Loop, folder: Path, stops: list[int | None]) -> list[Tensor]:
    """The weights at the end of a run that is stopped after each of these steps, counted in its attempt."""
    for stop_after in stops:
        trained = train_loop(loop, folder, OPTIONS, Recorder(stop_after))
    return trained.weights  # pyright: ignore[reportPossiblyUnboundVariable]


@pytest.mark.parametrize("stops", [[1, None], [4, None], [6, None], [3, 1, 1, None]])
@pytest.mark.parametrize("with_schedule", [False, True])
def test_groups_that_a_loop_adds_again_after_a_resume_get_their_state(
    stops: list[int | None], with_schedule: bool, tmp_path: Path
) -> None:
    def loop(run: Run) -> None:
        unfreezing(run, from_then_on, with_schedule=with_schedule)

    whole = weights_after(loop, tmp_path / "whole", [None])
    torch.testing.assert_close(weights_after(loop, tmp_path / "resumed", stops), whole, rtol=1e-10, atol=1e-10)


def test_a_resume_that_does_not_add_them_says_what_to_write(tmp_path: Path) -> None:
    def loop(run: Run) -> None:
        unfreezing(run, lambda number, _: number == 1)

    weights_after(loop, tmp_path, [7])
    with pytest.raises(UsageError, match=r"has 2 groups of parameters, and the loop has only 1 group .*number >= 2"):
        weights_after(loop, tmp_path, [None])
    # Once it is mended, the run goes on, and ends as one that was not stopped.
    mended = weights_after(lambda run: unfreezing(run, from_then_on), tmp_path, [None])
    whole = weights_after(lambda run: unfreezing(run, from_then_on), tmp_path / "whole", [None])
    torch.testing.assert_close(mended, whole, rtol=1e-10, atol=1e-10)


def second_stage(run: Run) -> None:
    """The head first, then all layers with another optimizer."""
    model: Any = run.prepare(two_layers())
    optimizer: Any = run.prepare(torch.optim.SGD(model[3].parameters(), lr=0.1))
    for epoch in run.epochs():
        if epoch.number == 1:
            optimizer = run.prepare(torch.optim.Adam(model.parameters()))
        for batch in epoch:
            optimizer.zero_grad()
            cross_entropy(model, batch).backward()
            optimizer.step()


def test_what_is_prepared_after_the_first_epoch_has_begun_is_refused_at_once(tmp_path: Path) -> None:
    """A resume refused it before, when the run could no longer be saved."""
    with pytest.raises(UsageError, match=r"prepares Adam after its first epoch .* before `for epoch in run.epochs"):
        train_loop(second_stage, tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("freezes", "stop_after", "told"),
    [
        (lambda model, number: number == 1 and model[1].requires_grad_(True), 7, "are frozen now"),
        (lambda model, number: number == 1 and model[1].requires_grad_(True), 6, "are frozen now"),
        (lambda model, number: number >= 1 and model[1].requires_grad_(True), 7, None),
        (lambda model, number: number >= 1 and model[1].requires_grad_(True), 3, None),
        (lambda model, number: number == 1 and model[3].bias.requires_grad_(False), 7, "learn now"),
        (lambda model, number: number >= 1 and model[3].bias.requires_grad_(False), 7, None),
        (lambda model, number: number >= 1 and model[3].bias.requires_grad_(False), 2, None),
        (lambda model, number: number == 1 and model[1].requires_grad_(True), 5, "are frozen now"),
    ],
)
def test_layers_that_learn_only_on_one_side_of_a_resume_are_named(
    freezes: Callable[[Any, int], object], stop_after: int, told: str | None, tmp_path: Path
) -> None:
    def loop(run: Run) -> None:
        model: Any = run.prepare(two_layers())
        model[1].requires_grad_(False)
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for epoch in run.epochs():
            freezes(model, epoch.number)
            for batch in epoch:
                optimizer.zero_grad()
                (cross_entropy(model, batch) + 0 * sum(weight.sum() for weight in model.parameters())).backward()
                optimizer.step()

    train_loop(loop, tmp_path, OPTIONS, Recorder(stop_after))
    notes = [note for note in train_loop(loop, tmp_path, OPTIONS).notes if "this resume" in note]
    assert len(notes) == (told is not None)
    assert all(told in note for note in notes if told)
