"""A moving average of the weights: what a run is evaluated and loaded with, exact after a resume, also by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from raytrain import Run
from raytrain.monitor.events import Note
from raytrain.runs.documents import run_store
from raytrain.runs.stored_checkpoints import list_checkpoints
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.evaluation import evaluate
from raytrain.training.networks.weight_average import WeightAverage
from tests.helpers.folder_runs import Weights, folder_run, largest_difference, train_here

DECAY = 0.8


def averaging_loop(run: Run) -> None:
    model = run.prepare(run.build_model())
    average = run.prepare(WeightAverage(model, DECAY))
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs():
        for batch in epoch:
            loss = F.cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update(batch.step)
            run.log(loss=loss)


def measured_by(
    run: Run, average: Any, network: nn.Module, measured: list[Weights], update: Callable[[nn.Module, int], object]
) -> None:
    """Train, and measure the run with ``network``, whose weights are noted then; also after the last step."""
    model = next(iter(run.models.trained))
    optimizer = run.prepare(run.build_optimizer(model))

    def measure() -> dict[str, float]:
        measured.append(copy.deepcopy(network.state_dict()))
        return evaluate(run, network)

    for epoch in run.epochs(evaluate=measure):
        for batch in epoch:
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            update(model, batch.step)
    if isinstance(average, AveragedModel):
        update_bn([torch.randn(8, 3, *run.config.full_image_size, dtype=torch.float64)], average)
    run.evaluate()


def torchs_average(run: Run, measured: list[Weights]) -> None:
    average = run.prepare(AveragedModel(run.prepare(run.build_model()), multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    measured_by(run, average, average, measured, lambda model, step: average.update_parameters(model))


def inside_torchs_average(run: Run, measured: list[Weights]) -> None:
    average = run.prepare(AveragedModel(run.prepare(run.build_model())))
    measured_by(run, average, average.module, measured, lambda model, step: average.update_parameters(model))


def own_average_that_is_not_measured(run: Run, measured: list[Weights]) -> None:
    model = run.prepare(run.build_model())
    average = run.prepare(WeightAverage(model, DECAY))
    measured_by(run, average, model, measured, lambda model, step: average.update(step))


def second_network(run: Run, measured: list[Weights]) -> None:
    run.prepare(run.build_model())
    second = run.prepare(run.build_model())

    @torch.no_grad()
    def follow(model: nn.Module, step: int) -> None:
        for slow, fast in zip(second.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.1)

    measured_by(run, None, second, measured, follow)


@pytest.mark.parametrize(
    "loop", [torchs_average, inside_torchs_average, own_average_that_is_not_measured, second_network]
)
def test_what_the_run_has_measured_is_what_later_commands_use(
    loop: Callable[[Run, list[Weights]], None], images: Path, tmp_path: Path
) -> None:
    measured: list[Weights] = []
    for options in ({"stop_after": 7}, dict[str, Any]()):  # the second attempt resumes the first one
        train_here(folder_run(images, tmp_path, "run", loop=lambda run: loop(run, measured), **options))
    store = run_store(str(tmp_path), "run")
    checkpoint = read_checkpoint(store, list_checkpoints(store)[-1].path)
    assert checkpoint.progress.validation_loss is not None
    weights = {name.removeprefix("module."): each for name, each in measured[-1].items() if name != "n_averaged"}
    assert checkpoint.weights is not None
    assert checkpoint.weights.keys() == weights.keys()
    for name, each in checkpoint.weights.items():
        torch.testing.assert_close(each, weights[name], rtol=0, atol=0)


def unprepared_average(run: Run) -> None:
    model = run.prepare(run.build_model())
    average = AveragedModel(model)
    measured_by(run, average, average, [], lambda model, step: average.update_parameters(model))


def test_an_average_that_is_not_prepared_is_told_once(images: Path, tmp_path: Path) -> None:
    _, recorded = train_here(folder_run(images, tmp_path, "run", loop=unprepared_average))
    notes = [event.text for event in recorded.events if isinstance(event, Note)]
    assert [note for note in notes if "calls no prepared network" in note] == notes[-1:]


def state(storage: Path, name: str, what: str) -> Weights:
    store = run_store(str(storage), name)
    return read_checkpoint(store, "checkpoints/step-000000010.pt").state[what]


def test_a_run_is_evaluated_and_resumed_with_its_average(images: Path, tmp_path: Path) -> None:
    _, whole = train_here(folder_run(images, tmp_path, "whole", ema_decay=DECAY))
    train_here(folder_run(images, tmp_path, "stopped", ema_decay=DECAY, stop_after=7))
    train_here(folder_run(images, tmp_path, "stopped", ema_decay=DECAY))
    _, by_hand = train_here(folder_run(images, tmp_path, "by-hand", loop=averaging_loop))
    average = state(tmp_path, "whole", "average")
    assert largest_difference(average, state(tmp_path, "stopped", "average")) < 1e-12
    assert largest_difference(average, state(tmp_path, "whole", "model")) > 1e-4
    assert largest_difference(average, state(tmp_path, "by-hand", "average")) < 1e-12
    losses = [[row.metrics["loss"] for row in rows.rows if row.kind == "evaluation"] for rows in (whole, by_hand)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_tied_weights_and_shared_layers_are_averaged_once() -> None:
    layer, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.weight = layer.weight
    average = WeightAverage(torch.nn.Sequential(layer, layer, other), 0.5)
    before = layer.weight.detach().clone()
    torch.nn.init.zeros_(layer.weight)
    average.update(100)
    assert torch.allclose(average.state_dict()["2.weight"], before / 2)


def test_the_average_follows_the_weights_with_its_decay() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, 0.5)
    expected = model.weight.item()
    for step, value in enumerate([1.0, 2.0, 3.0], start=100):
        torch.nn.init.constant_(model.weight, value)
        average.update(step)
        expected = 0.5 * expected + 0.5 * value
    assert average.state_dict()["weight"].item() == pytest.approx(expected)
