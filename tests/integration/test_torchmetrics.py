"""Objects of torchmetrics in a loop: what they measure is that of all workers' images, also after a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassRecall
from torchmetrics.wrappers import ClasswiseWrapper, MetricTracker, MinMaxMetric

from raytrain.errors import UsageError
from raytrain.runs.metric_row import MetricRow
from raytrain.training.run import Run
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import Case, Recorder, config, images, make_run
from tests.helpers.plain_loops import entropy, mlp

CASE = Case(config(batch_size=12, flip="none", translate=0), 37, bad=(4,))  # workers without images in the last batch
STOPPED = dataclasses.replace(CASE, stop_after=2)


def loop(run: Run) -> None:
    """Logs metrics of all images since the start: one of lists of numbers, several at once, and wrapped ones."""
    model = run.prepare(mlp())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    overall = run.prepare(MulticlassAccuracy(4, average="micro"))
    area = run.prepare(MulticlassAUROC(4))
    pair: dict[str, Metric | MetricCollection] = {
        "macro": MulticlassAccuracy(4),
        "worst": MulticlassAccuracy(4, top_k=3),
    }
    several = run.prepare(MetricCollection(pair, compute_groups=False))  # it would guess that they are one
    of_class = run.prepare(MulticlassAccuracy(4, average="none"))
    wrapped = run.prepare(ClasswiseWrapper(MulticlassRecall(4, average="none")))
    twice = run.prepare(MulticlassAccuracy(4) + MulticlassRecall(4))
    for epoch in run.epochs():
        for batch in epoch:
            optimizer.zero_grad()
            logits = model(batch.images)
            entropy(model, batch).backward()
            optimizer.step()
            for metric in (overall, area, several, of_class, wrapped, twice):
                metric.update(logits.detach(), batch.labels)
            run.log(overall=overall, area=area, of_class=of_class, several=several, wrapped=wrapped, twice=twice)
            of_class.reset()


def rows(case: Case, folder: str) -> list[MetricRow]:
    recorder = Recorder(case.stop_after)
    run = make_run(case.options, images(case.num_samples, case.bad), folder, recorder)
    with run.steps.optimizers.followed():
        loop(run)
        run.finish()
    return [row for row in recorder.rows if row.kind == "step"]


def values(found: list[MetricRow]) -> list[dict[str, Any]]:
    return [dict(row.metrics) for row in found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(rows(CASE, str(tmp_path_factory.mktemp("alone"))))


def test_several_workers_measure_what_one_does(alone: list[dict[str, Any]], tmp_path: Path) -> None:
    together = values(run_in_processes(3, rows, CASE, str(tmp_path))[0])
    assert len(together) == len(alone) == 8
    for ours, theirs in zip(together, alone, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)
        assert {"overall", "area", "of_class a", "of_class d", "macro", "worst", "twice"} <= ours.keys()
        assert {"wrapped multiclassrecall_0", "wrapped multiclassrecall_3"} <= ours.keys()


def test_what_they_have_counted_is_in_the_checkpoint(alone: list[dict[str, Any]], tmp_path: Path) -> None:
    run_in_processes(2, rows, STOPPED, str(tmp_path))
    resumed = values(run_in_processes(1, rows, CASE, str(tmp_path))[0])
    for ours, theirs in zip(resumed, alone[-len(resumed) :], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)


class Largest(Metric):
    """The largest number so far; as ``full_state_update`` says, states of several workers cannot be merged."""

    full_state_update = True

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros(()), None)

    def update(self, numbers: torch.Tensor) -> None:
        self.largest = torch.maximum(self.largest, numbers.max())

    def compute(self) -> torch.Tensor:
        return self.largest


def of_the_largest(folder: str) -> str:
    recorder = Recorder()
    run = make_run(CASE.options, images(CASE.num_samples), folder, recorder)
    largest = run.prepare(Largest())
    for batch in next(iter(run.epochs(evaluate=dict))):
        largest.update(batch.samples + 1)
        try:
            run.log(largest=largest)
        except UsageError as error:
            return str(error)
    return "logged"


def test_one_whose_states_cannot_be_merged_is_for_one_worker(tmp_path: Path) -> None:
    assert of_the_largest(str(tmp_path / "one")) == "logged"
    for sentence in run_in_processes(2, of_the_largest, str(tmp_path / "two")):
        assert "Largest on several workers cannot be merged" in sentence and "or train on one worker" in sentence


def test_one_that_is_not_prepared_is_refused(tmp_path: Path) -> None:
    def unprepared(run: Run) -> None:
        model = run.prepare(mlp())
        optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        metric = MulticlassAccuracy(4)
        for epoch in run.epochs():
            for batch in epoch:
                entropy(model, batch).backward()
                optimizer.step()
                run.log(accuracy=metric)

    run = make_run(CASE.options, images(CASE.num_samples), str(tmp_path), Recorder())
    with pytest.raises(UsageError, match=r"a MulticlassAccuracy that is not prepared"):
        unprepared(run)
    run.leave_batch()


def test_collections_whose_metrics_have_the_same_names_are_refused(tmp_path: Path) -> None:
    run = make_run(CASE.options, images(CASE.num_samples), str(tmp_path), Recorder())
    hard, easy = (run.prepare(MetricCollection([MulticlassAccuracy(4)])) for _ in range(2))
    for batch in next(iter(run.epochs(evaluate=dict))):
        hard.update(torch.zeros(len(batch.labels), 4), batch.labels)
        with pytest.raises(UsageError, match=r"got MulticlassAccuracy twice, the second time in easy=.*prefix="):
            run.log(hard=hard, easy=easy)
        break
    run.leave_batch()


def test_a_wrapper_that_keeps_numbers_outside_of_its_state_is_refused(tmp_path: Path) -> None:
    run = make_run(CASE.options, images(CASE.num_samples), str(tmp_path), Recorder())
    with pytest.raises(UsageError, match=r"MinMaxMetric, whose minimum and maximum are in no state"):
        run.prepare(MinMaxMetric(MulticlassAccuracy(4)))
    with pytest.raises(UsageError, match=r"MetricTracker, whose list of metrics grows"):
        run.prepare(MetricTracker(MulticlassAccuracy(4)))
