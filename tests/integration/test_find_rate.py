"""A learning rate is found by one short run, which leaves its curves and no checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import StepLR

import raytrain
from raytrain.demo.demo import render_digits
from raytrain.display.rate import rate_figure, rate_page
from raytrain.errors import TrainingFailed, UsageError
from raytrain.experiments.find_rate import smooth, suggest
from raytrain.recipes import digits
from raytrain.runs.records import read_run
from tests.helpers.folder_runs import folder_run, train_here
from tests.unit.test_terminal import text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render_digits(tmp_path_factory.mktemp("digits"), num_images=400)


def options(data: Path, storage: Path, **overrides: object) -> raytrain.TrainConfig:
    here = {"data": str(data / "train"), "test_data": str(data / "test"), "storage": str(storage), "workers": 2}
    return digits(**{**here, "backend": "local", "device": "cpu", "batch_size": 64, "name": "rate", **overrides})


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_run_with_a_rising_rate_suggests_one_that_learns(data: Path, tmp_path: Path, backend: str) -> None:
    config = options(data, tmp_path, backend=backend)
    result = raytrain.find_rate(config)
    run = read_run(str(tmp_path), "rate")
    n = len(result.rates)
    assert (run.checkpoints, [row.kind for row in run.metrics]) == ([], ["step"] * n)
    assert result.rates == pytest.approx([1e-6 * 1e7 ** (i / 99) for i in range(n)])
    lowest = result.rates[smooth(result.losses).argmin()]
    assert result.suggestion == pytest.approx(lowest / 10, rel=0.05)
    assert result.run.samples_seen == run.metrics[-1].samples_seen
    page = text(rate_page(result, "rate.png"), width=120)
    assert f"--learning-rate {result.suggestion:g}" in page and f"{n} of 100 steps of 64 images" in page
    assert rate_figure(result).axes[0].get_xscale() == "log"
    trained = raytrain.train(options(data, tmp_path, name="used", learning_rate=result.suggestion, epochs=8))
    assert (trained.test_accuracy or 0) > 0.5, "ten classes"


def own_loop(run: raytrain.Run) -> None:
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, run.num_classes)))
    optimizer = run.prepare(
        torch.optim.SGD([{"params": [model[1].weight]}, {"params": [model[1].bias], "lr": 0.1}], lr=0.05)
    )
    for batch in run.batches():
        loss = F.cross_entropy(model(batch.images), batch.labels, reduction="sum")
        run.backward(loss)
        run.step(optimizer)
        run.log(loss=loss)


def test_the_groups_of_an_own_loop_rise_in_proportion(data: Path, tmp_path: Path) -> None:
    config = options(data, tmp_path, workers=1, schedule="rising:1e-4..100", max_steps=50)
    result = raytrain.find_rate(config, loop=own_loop)
    assert result.rates[0] == pytest.approx(1e-4) and result.suggestion is not None
    for row in read_run(str(tmp_path), "rate").metrics:
        assert row.value("second_learning_rate") == pytest.approx(2 * (row.learning_rate or 0))


def loop_with_its_own_rates(run: raytrain.Run) -> None:
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    for batch in run.batches():
        run.backward(model(batch.images).sum())
        run.step(optimizer, learning_rate=0.1)


def loop_with_a_scheduler(run: raytrain.Run) -> None:
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    run.prepare(StepLR(optimizer, 10))


def test_a_loop_that_decides_on_its_rate_gets_a_sentence(data: Path, images: Path, tmp_path: Path) -> None:
    sentence = "The loop decides on the learning rate itself"
    with pytest.raises(TrainingFailed, match=sentence):
        raytrain.find_rate(options(data, tmp_path, workers=1), loop=loop_with_its_own_rates)
    scheduled = folder_run(images, tmp_path, "scheduled", loop=loop_with_a_scheduler, schedule="rising:1e-6..10")
    with pytest.raises(UsageError, match=sentence):
        train_here(scheduled)


def test_losses_that_suggest_nothing_say_why() -> None:
    rates = np.logspace(-6, 1, 40)
    rate, reason = suggest(rates, np.linspace(2.30, 2.29, 40))
    assert rate is None and "no rate from 1e-06 to 10 made the loss" in reason
    rate, reason = suggest(rates, np.linspace(2.3, 1.0, 40))
    assert rate is None and "still falls at the highest rate, 10; try --schedule rising:1e-06..1e+03" in reason
    rate, reason = suggest(rates, np.concatenate([np.linspace(2.3, 1.0, 30), np.linspace(2.0, 9.0, 10)]))
    assert rate == pytest.approx(rates[29] / 10, rel=0.05) and "that rate / 10" in reason


def test_too_few_steps_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-steps is 5; a learning rate is found in 20 steps at least"):
        raytrain.find_rate(options(data, tmp_path, max_steps=5))
