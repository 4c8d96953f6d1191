"""Networks in a loop: layers keep their modes, compute in the run's precision, and draw repeatable random numbers."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raytrain.errors import UsageError
from raytrain.training.networks.weight_average import WeightAverage
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import config
from tests.helpers.own_loops import TwoPaths, assert_same_weights, cross_entropy, learn, prepared, train_loop


def test_layers_that_their_author_keeps_in_evaluation_mode_stay_so(tmp_path: Path) -> None:
    def loop(run: Run) -> None:
        model, teacher = (run.prepare(run.build_model()) for _ in range(2))
        norm: Any = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)).eval()
        before = norm.running_mean.clone()
        teacher.eval()
        optimizer = run.prepare(run.build_optimizer(model))
        for epoch in run.epochs():
            for batch in epoch:
                learn(model, optimizer, batch)
                assert (model.training, norm.training, teacher.training) == (True, False, False)
        assert torch.equal(norm.running_mean, before)

    train_loop(loop, tmp_path)


def test_mixed_precision_is_that_of_the_loop_for_methods_copies_and_nested_outputs(tmp_path: Path) -> None:
    def loop(run: Run) -> None:
        model = run.prepare(TwoPaths(run.num_classes))
        norm = run.prepare(nn.BatchNorm2d(3))
        for epoch in run.epochs(evaluate=dict):
            for batch in epoch:
                outputs = model(batch.images)
                assert outputs["logits"].dtype == torch.float32 and outputs["step"] == 1
                assert model.encode(batch.images).dtype == torch.bfloat16
                other = copy.deepcopy(model)
                nn.init.zeros_(other.head.weight)
                assert torch.equal(other(batch.images)["logits"], other.head.bias.bfloat16().expand(7, -1).float())
                assert isinstance(norm, nn.BatchNorm2d)
                assert pickle.loads(pickle.dumps(run.models.trained[1])).training
                return

    outcome = train_loop(loop, tmp_path, config(batch_size=7, precision="bfloat16")).outcome
    assert outcome.progress.step == 1


def test_an_optimizers_step_leaves_autocast_as_it_was(tmp_path: Path) -> None:
    seen: list[bool] = []

    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs():
            for batch in epoch:
                cross_entropy(model, batch).backward()
                optimizer.step()
                seen.append(torch.is_autocast_enabled("cpu"))
        seen.append(torch.is_autocast_enabled("cpu"))
        optimizer.step()
        seen.append(torch.is_autocast_enabled("cpu"))

    train_loop(loop, tmp_path, config(batch_size=64, epochs=1, precision="bfloat16"))
    assert seen[0] and not any(seen[-2:])


def weights_after_a_forward_before_the_first_batch(folder: str) -> list[Tensor]:
    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        model(torch.zeros(2, 3, 8, 8, dtype=torch.float64, device=run.device))
        run.evaluate()
        optimizer = run.prepare(run.build_optimizer(model))
        for epoch in run.epochs():
            for batch in epoch:
                learn(model, optimizer, batch)

    return train_loop(loop, folder).weights


def test_a_network_may_be_called_before_the_first_batch_on_several_workers(tmp_path: Path) -> None:
    (alone,) = run_in_processes(1, weights_after_a_forward_before_the_first_batch, str(tmp_path / "1"))
    together = run_in_processes(2, weights_after_a_forward_before_the_first_batch, str(tmp_path / "2"))
    for name, weights in zip(("worker 0", "worker 1"), together, strict=True):
        assert_same_weights(name, weights, alone, 1e-9)


def all_draws(folder: str) -> list[list[tuple[float, ...]]]:
    """The numbers that each step of two runs draws from each generator."""
    drawn: list[list[tuple[float, ...]]] = []

    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        drawn.append([])
        for epoch in run.epochs():
            for batch in epoch:
                drawn[-1].append((random.random(), float(np.random.rand()), float(torch.rand(()))))
                learn(model, optimizer, batch)

    for name in ("a", "b"):
        train_loop(loop, f"{folder}/{name}")
    return drawn


def test_every_generator_repeats_in_a_repeated_run_and_differs_between_steps_and_workers(tmp_path: Path) -> None:
    (first, again), (other, _) = run_in_processes(2, all_draws, str(tmp_path))
    assert first == again
    numbers = [number for step in (*first, *other) for number in step]
    assert len(set(numbers)) == len(numbers) == 2 * 12 * 3


@pytest.mark.parametrize("decay", [1.0, 9, -0.1, None, "0.9"])
def test_an_average_with_a_decay_that_is_none_is_refused(decay: Any) -> None:
    with pytest.raises(UsageError, match="WeightAverage got a decay of"):
        WeightAverage(nn.Linear(2, 2), decay)


def test_an_average_that_gets_a_network_for_a_step_is_refused() -> None:
    network = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"WeightAverage.update got a Linear; give it batch.step"):
        WeightAverage(network, 0.9).update(network)  # pyright: ignore
