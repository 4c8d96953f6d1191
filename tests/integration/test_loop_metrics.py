"""What loops log, measure, add up and gather: the numbers are those of all workers' images."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import MeanMetric

from raytrain.errors import LoopFailed, UsageError
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import CLASSES
from tests.helpers.own_loops import (
    OPTIONS,
    Trained,
    assert_same_weights,
    cross_entropy,
    fit,
    learn,
    prepared,
    train_loop,
)


def logs_seldom(run: Run) -> None:
    """Logs two metrics in each step, one in every second one, and one in the first epoch alone."""
    model, optimizer = prepared(run)
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            run.loss(model(batch.images), batch.targets).backward()
            run.log(always=2.0, number=float(batch.step))
            if batch.step % 2:
                run.log(seldom=3.0)
            if batch.epoch == 0:
                run.log(early=torch.tensor([4.0]))
            optimizer.step()


def rows_of_logs(folder: str) -> list[dict[str, float | None]]:
    trained = train_loop(logs_seldom, folder, dataclasses.replace(OPTIONS, log_every=3))
    return [dict(row.metrics) for row in trained.rows("step")]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_metric_is_the_mean_over_the_images_of_the_steps_in_which_it_was_logged(
    num_workers: int, tmp_path: Path
) -> None:
    late = {"always": 2.0, "seldom": 3.0}
    assert run_in_processes(num_workers, rows_of_logs, str(tmp_path))[0] == [
        {"always": 2.0, "number": 0.0, "early": 4.0},
        {**late, "number": 1.5, "early": 4.0},
        {**late, "number": (3 * 7 + 4 * 7 + 5 * 1) / 15, "early": 4.0},  # the last batch of an epoch has 1 image
        {**late, "number": 7.0},
        {**late, "number": (9 * 7 + 10 * 7 + 11 * 1) / 15},
    ]


def logs_in_all_forms(folder: str) -> tuple[list[dict[str, float | None]], list[dict[str, float]]]:
    """The metrics of each step, and those that all labels of its global batch give."""
    wanted: list[dict[str, float]] = []
    seen: list[Tensor] = []

    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        metric = run.prepare(MeanMetric())
        for epoch in run.epochs():
            for batch in epoch:
                learn(model, optimizer, batch)
                labels, every = batch.labels.double(), run.gather(batch.labels).double()
                metric.update(labels)
                run.log(
                    pair=(labels.sum(), (labels > 0).sum()),
                    fraction=F.one_hot(batch.labels, 4).double().mean(dim=0),
                    moment=torch.stack([labels.mean(), labels.square().mean()]),
                    so_far=metric,
                    half=torch.full((), 30_000.0, dtype=torch.float16),
                    byte=torch.full((2,), 200, dtype=torch.uint8),
                )
                seen.append(every)
                fractions = F.one_hot(every.long(), 4).double().mean(dim=0).tolist()
                pairs = {"pair": (every.sum() / (every > 0).sum()).item()} if every.sum() else {}
                wanted.append(
                    {
                        **pairs,
                        **{f"fraction {name}": each for name, each in zip(CLASSES, fractions, strict=True)},
                        "moment 0": every.mean().item(),
                        "moment 1": every.square().mean().item(),
                        "so_far": torch.cat(seen).mean().item(),
                        "half": 30_000.0,
                        "byte 0": 200.0,
                        "byte 1": 200.0,
                    }
                )

    return [dict(row.metrics) for row in train_loop(loop, folder).rows("step")], wanted


@pytest.mark.parametrize("num_workers", [1, 3])
def test_quotients_vectors_and_metrics_with_a_state_are_those_of_the_global_batch(
    num_workers: int, tmp_path: Path
) -> None:
    logged, wanted = run_in_processes(num_workers, logs_in_all_forms, str(tmp_path))[0]
    assert len(logged) == 12
    assert logged == [pytest.approx(each, abs=1e-6) for each in wanted]


def totals_and_rows(folder: str) -> dict[str, Any]:
    """What workers with ranks from 0 add up and gather, given in the forms in which a loop may have it."""
    found: dict[str, Any] = {}

    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs():
            for batch in epoch:
                loss = cross_entropy(model, batch)
                if batch.step == 0:
                    before = loss.item()
                    given = ([1.5, run.rank], torch.tensor([True, run.rank > 0]), loss[None])
                    *found["totals"], [found["sum of losses"]] = [run.total(each) for each in given]
                    assert loss.item() == before  # what was given stays as it is
                    found["loss"] = before
                    rows = run.gather(model(batch.images).bfloat16())
                    found["rows"] = rows.dtype, tuple(rows.shape)
                    found["ranks"] = run.gather(np.full(2, run.rank)).tolist()
                if batch.step == 5:  # whose one image one worker has
                    found["last totals"] = run.total([1.0, run.rank])
                    found["last rows"] = run.gather(batch.labels).tolist()
                    found["label"] = batch.labels.tolist()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        found["totals after the batches"] = run.total([1.0])

    train_loop(loop, folder)
    return found


def test_totals_and_rows_are_taken_in_any_form_and_stay_as_they_are(tmp_path: Path) -> None:
    alone = totals_and_rows(str(tmp_path / "one"))
    assert alone["totals"] == [[1.5, 0], [1, 0]] and alone["sum of losses"] == alone["loss"]
    assert (alone["rows"], alone["ranks"]) == ((torch.bfloat16, (7, 4)), [0, 0])
    assert (alone["last totals"], alone["last rows"]) == ([1.0, 0.0], alone["label"])
    several = run_in_processes(2, totals_and_rows, str(tmp_path / "two"))
    for each in several:
        assert each["totals"] == [[3.0, 1], [2, 1]]
        assert each["sum of losses"] == pytest.approx(several[0]["loss"] + several[1]["loss"])
        assert (each["rows"], each["ranks"]) == ((torch.bfloat16, (7, 4)), [0, 0, 1, 1])
        assert (each["last totals"], each["last rows"]) == ([1.0, 0.0], alone["label"])
        assert each["totals after the batches"] == [2.0]


def measured_by(evaluation: Callable[[Run], Any]) -> Callable[[Run], None]:
    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        fit(run, model, run.prepare(run.build_optimizer(model)), evaluate=lambda: evaluation(run))

    return loop


def test_an_evaluation_that_fails_loses_no_step_and_is_made_up_for_when_it_is_mended(tmp_path: Path) -> None:
    def fails(run: Run) -> dict[str, float]:
        return {"accuracy": 1 / 0}

    def works(run: Run) -> dict[str, float]:
        asked.append(run.progress.step)
        return {"accuracy": 0.5}

    def train(evaluation: Callable[[Run], Any], name: str, **options: Any) -> Trained:
        chosen = dataclasses.replace(OPTIONS, checkpoint_every=("none",), **options)
        return train_loop(measured_by(evaluation), tmp_path / name, chosen)

    asked: list[int] = []
    with pytest.raises(LoopFailed, match="ZeroDivisionError"):
        train(fails, "mended")
    resumed = train(works, "mended", resume=True)
    assert asked == [6, 12]  # of the epoch after which the first one had failed, too
    assert_same_weights("mended", resumed.weights, train(works, "whole").weights, 0.0)
    for folder in ("mended", "whole"):
        note = json.loads(next((tmp_path / folder).rglob("step-000000012.pt.json")).read_text())
        assert note["score"] == 0.5


def test_a_loop_that_catches_the_error_of_an_evaluation_shows_training_batches_as_before(tmp_path: Path) -> None:
    def fails_once(run: Run) -> dict[str, float]:
        if len(seen) == 1:
            raise ValueError("out of luck")
        return {"accuracy": 0.5}

    def loop(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs(evaluate=lambda: fails_once(run)):
            for batch in epoch:
                learn(model, optimizer, batch)
                if batch.step == 1:
                    with pytest.raises(ValueError, match="out of luck"):
                        run.evaluate()
                seen.append(run.evaluating)

    seen: list[bool] = []
    train_loop(loop, tmp_path)
    assert seen == [False] * 12


def test_an_evaluation_that_would_replace_what_the_history_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="evaluation returned step, which the metrics history has already; give it an"):
        train_loop(measured_by(lambda run: {"accuracy": 0.5, "step": 3.0}), tmp_path)


@pytest.mark.parametrize("measured", [None, 0.5, {"accuracy": {"top 5": 0.5}}, {"accuracy": "high"}])
def test_an_evaluation_that_returns_no_numbers_by_name_is_refused(measured: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="evaluation must return numbers by name"):
        train_loop(measured_by(lambda run: measured), tmp_path)


def test_an_evaluation_before_a_network_is_prepared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the loop has prepared no network; give it to run"):
        train_loop(Run.evaluate, tmp_path)


def test_a_learning_rate_may_be_a_tensor(tmp_path: Path) -> None:
    def with_rates_in_tensors(run: Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=torch.tensor(0.125)))
        scheduler = run.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        for epoch in run.epochs():
            for batch in epoch:
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                if batch.step > 1:
                    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
                optimizer.step()
                scheduler.step()

    rates = [row.learning_rate for row in train_loop(with_rates_in_tensors, tmp_path).rows("step")]
    assert rates == [0.125, 0.0625, *[0.5] * 10] and {type(rate) for rate in rates} == {float}


@pytest.mark.parametrize(("log_every", "rates"), [(1, [None, None, 0.1] * 4), (2, [None, *[None, 0.1, 0.1] * 2])])
def test_a_row_has_the_rate_of_the_last_step_of_an_optimizer_if_there_is_one(
    log_every: int, rates: list[float | None], tmp_path: Path
) -> None:
    def steps_in_every_third_batch(run: Run) -> None:
        model, optimizer = prepared(run)
        for epoch in run.epochs():
            for batch in epoch:
                cross_entropy(model, batch).backward()
                if batch.step % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()

    trained = train_loop(steps_in_every_third_batch, tmp_path, dataclasses.replace(OPTIONS, log_every=log_every))
    assert [row.learning_rate for row in trained.rows("step")] == rates
