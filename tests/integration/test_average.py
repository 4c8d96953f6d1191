"""A moving average of the weights: what a run is evaluated and loaded with, exact after a resume, also by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from raytrain import Run
from raytrain.runs.documents import run_store
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.evaluation import evaluate
from raytrain.training.prepared_models import WeightAverage
from tests.helpers.folder_runs import Weights, folder_run, largest_difference, train_here

DECAY = 0.8


def averaging_loop(run: Run) -> None:
    network = run.build_model()
    model = run.prepare(network)
    average = run.prepare(WeightAverage(network, DECAY))
    optimizer = run.prepare(run.build_optimizer(model))
    for batch in run.batches(evaluate=lambda: evaluate(run, average.model)):
        loss = F.cross_entropy(model(batch.images), batch.labels, reduction="sum")
        run.backward(loss)
        run.log(loss=loss)
        run.step(optimizer)
        average.update(batch.step)


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
