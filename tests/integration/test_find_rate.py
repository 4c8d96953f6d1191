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
from raytrain.display.find_rate import rate_figure, rate_page
from raytrain.errors import UsageError
from raytrain.experiments.find_rate import smooth, suggest
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.recipes import digits
from raytrain.runs.outcome import StopReason
from raytrain.runs.records import read_run
from tests.helpers.folder_runs import FolderRun, folder_run, train_here
from tests.helpers.rendered import text
from tests.helpers.small_runs import loop_with
from tests.helpers.waiting import wait_for


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render_digits(tmp_path_factory.mktemp("digits"), num_images=400)


def options(data: Path, storage: Path, **overrides: object) -> raytrain.TrainConfig:
    here = {"data": str(data / "train"), "test_data": str(data / "test"), "storage": str(storage), "workers": 2}
    return digits(**{**here, "backend": "local", "device": "cpu", "batch_size": 32, "name": "rate", **overrides})


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
    assert f"--learning-rate {result.suggestion:g}" in page and f"{n} of 100 steps of 32 images" in page
    assert rate_figure(result).axes[0].get_xscale() == "log"
    used = options(data, tmp_path, name="used", learning_rate=result.suggestion, epochs=6)
    _, recorder = train_here(FolderRun(used))
    accuracies = [row.accuracy for row in recorder.rows if row.kind == "evaluation"]
    assert (accuracies[-1] or 0) > 0.5, "ten classes"


def own_loop(run: raytrain.Run) -> None:
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, run.num_classes)))
    optimizer = run.prepare(
        torch.optim.SGD([{"params": [model[1].weight]}, {"params": [model[1].bias], "lr": 0.1}], lr=0.05)
    )
    for epoch in run.epochs():
        for batch in epoch:
            loss = F.cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


def test_the_groups_of_an_own_loop_rise_in_proportion(data: Path, tmp_path: Path) -> None:
    config = options(data, tmp_path, workers=1, schedule="rising:1e-4..100", max_steps=50)
    result = raytrain.find_rate(config, loop=own_loop)
    assert result.rates[0] == pytest.approx(1e-4) and result.suggestion is not None
    for row in read_run(str(tmp_path), "rate").metrics:
        assert row.value("second_learning_rate") == pytest.approx(2 * (row.learning_rate or 0))


def loop_with_its_own_rates(run: raytrain.Run) -> None:
    """Decides on the rate itself before each step, and by a scheduler after it."""
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(12 * 12 * 3, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    scheduler = run.prepare(StepLR(optimizer, 2))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            scheduler.step()


def test_the_rate_rises_whatever_the_loop_decides(images: Path, tmp_path: Path) -> None:
    rising = {"schedule": "rising:1e-6..10", "max_steps": 8}
    _, recorder = train_here(folder_run(images, tmp_path, "scheduled", loop=loop_with_its_own_rates, **rising))
    rates = [row.learning_rate for row in recorder.rows if row.kind == "step"]
    assert rates == pytest.approx([1e-6 * 1e7 ** (step / 7) for step in range(8)])


def loop_that_adds_a_group(run: raytrain.Run) -> None:
    body, head = nn.Linear(12 * 12 * 3, 8), nn.Linear(8, run.num_classes)
    model = run.prepare(nn.Sequential(nn.Flatten(), body, head))
    optimizer = run.prepare(torch.optim.SGD(head.parameters(), lr=0.05))
    for epoch in run.epochs():
        for batch in epoch:
            if batch.step == 3:
                optimizer.add_param_group({"params": body.parameters(), "lr": 0.01})
            optimizer.zero_grad()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()


def test_a_group_that_the_loop_adds_keeps_its_ratio_to_the_first_one(images: Path, tmp_path: Path) -> None:
    rising = {"schedule": "rising:1e-6..10", "max_steps": 8}
    _, recorder = train_here(folder_run(images, tmp_path, "growing", loop=loop_that_adds_a_group, **rising))
    rows = [row for row in recorder.rows if row.kind == "step"]
    added = [row.metrics.get("second_learning_rate") for row in rows]
    assert added == [None] * 3 + [pytest.approx(1e-6 * 1e7 ** (step / 7) / 5) for step in range(3, 8)]


def loop_without_a_rate(run: raytrain.Run) -> None:
    model = run.prepare(nn.Sequential(nn.Flatten(), nn.Linear(12 * 12 * 3, run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    for epoch in run.epochs():
        for batch in epoch:
            model(batch.images).mean().backward()
            optimizer.step()


def test_an_optimizer_that_begins_with_a_rate_of_0_is_refused(images: Path, tmp_path: Path) -> None:
    run = folder_run(images, tmp_path, "scheduled", loop=loop_without_a_rate, schedule="rising:1e-6..10")
    with pytest.raises(UsageError, match="The first group of the optimizer starts with a learning rate of 0"):
        train_here(run)


def test_losses_that_suggest_nothing_say_why() -> None:
    rates = np.logspace(-6, 1, 40)
    rate, reason = suggest(rates, np.linspace(2.30, 2.29, 40))
    assert rate is None and "no rate from 1e-06 to 10 made the loss" in reason
    rate, reason = suggest(rates, np.linspace(2.3, 1.0, 40))
    assert rate is None and "still falls at the highest rate, 10; try --schedule rising:1e-06..1e+03" in reason
    rate, reason = suggest(rates, np.concatenate([np.linspace(2.3, 1.0, 30), np.linspace(2.0, 9.0, 10)]))
    assert rate == pytest.approx(rates[29] / 10, rel=0.05) and "that rate / 10" in reason

    # A loop's own loss may be negative, such as a log-likelihood; here nothing changes but noise.
    rate, reason = suggest(rates, np.concatenate([np.linspace(-1.0, -1.01, 30), np.linspace(-1.0, 3.0, 10)]))
    assert rate is None and "no rate from 1e-06 to 10 made the loss of the first steps, -1, 5% smaller" in reason
    rate, _ = suggest(rates, np.concatenate([np.linspace(-1.0, -2.0, 30), np.linspace(-1.0, 3.0, 10)]))
    assert rate == pytest.approx(rates[29] / 10, rel=0.05)


@pytest.mark.parametrize("last", [2.29, 1.0])
def test_losses_of_a_run_that_somebody_stopped_suggest_to_let_it_run(last: float) -> None:
    rates, falling = np.logspace(-6, -3, 24), np.linspace(2.3, last, 24)
    rate, reason = suggest(rates, falling, StopReason("signal", "SIGINT"))
    assert rate is None and reason.startswith("it was stopped at a rate of 0.001, before the loss showed enough")
    assert "let it run" not in suggest(rates, falling, StopReason("diverged", "the loss is nan"))[1]


def waiting(run: raytrain.Run) -> None:
    """Train, and wait in step 6 until the run is asked to stop."""

    def before_step(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if batch.step == 5:
            wait_for(run.reporter.stop_requested)

    loop_with(run, before_step)


def test_a_run_that_is_stopped_after_few_steps_says_that_it_was_stopped(data: Path, tmp_path: Path) -> None:
    signals = StopSignals()

    def stop(snapshot: Snapshot) -> None:
        if snapshot.step:
            signals.request_stop(StopReason("signal", "SIGINT"))

    config = options(data, tmp_path, max_steps=100_000, workers=1)
    with pytest.raises(UsageError, match=r"was stopped after \d of 100000 steps, and 20 are needed"):
        raytrain.find_rate(config, loop=waiting, view=stop, signals=signals)


def test_a_run_whose_loss_explodes_after_few_steps_says_so_and_advises_more_of_them(data: Path, tmp_path: Path) -> None:
    config = options(data, tmp_path, max_steps=20, workers=1, schedule="rising:1e-6..1e6")
    with pytest.raises(UsageError, match=r"of 20 steps, since its loss had exploded, .* a larger --max"):
        raytrain.find_rate(config, loop=own_loop)


def test_too_few_steps_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-steps is 5; a learning rate is found in 20 steps at least"):
        raytrain.find_rate(options(data, tmp_path, max_steps=5))
