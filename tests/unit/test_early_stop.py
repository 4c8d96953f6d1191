"""A run stops by itself when it is good enough, when it no longer gets better, and when its time is up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import raytrain
from raytrain import Run, TrainConfig, UsageError
from raytrain.runs.documents import run_store
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Progress, StopReason
from raytrain.runs.stored_checkpoints import best_checkpoint
from raytrain.training.metrics.early_stop import EarlyStop
from tests.helpers.folder_runs import folder_run, train_here, train_runs


def evaluated(
    accuracies: list[float], progress: Progress | None = None, **options: Any
) -> tuple[StopReason | None, Progress]:
    stop, progress = EarlyStop(TrainConfig(batch_size=1, **options)), progress or Progress()
    for accuracy in accuracies:
        assert stop.reason is None
        progress = stop.judge_evaluation(progress, {"accuracy": accuracy, "loss": 1 - accuracy})
    return stop.reason, progress


@pytest.mark.parametrize(
    ("until", "accuracies"),
    [("accuracy=0.5", [0.3, 0.5]), ("loss=.3", [0.3, 0.5, 0.8]), ("loss=3.E-1", [0.3, 0.5, 0.8])],
)
def test_a_run_stops_once_a_metric_is_reached(until: str, accuracies: list[float]) -> None:
    reason, _ = evaluated(accuracies, until=until)
    assert reason is not None and (reason.kind, reason.detail) == ("target", until)


def test_a_run_stops_after_evaluations_without_a_better_accuracy_also_over_a_resume() -> None:
    reason, progress = evaluated([0.3, 0.2, 0.4, 0.4], patience=2)
    assert (reason, progress.best_score, progress.num_worse) == (None, 0.4, 1)
    reason, _ = evaluated([0.1], progress, patience=2)
    assert reason == StopReason("patience", metric="accuracy", value=0.4, count=2)


def test_an_evaluation_that_gives_nan_is_worse_than_any_number() -> None:
    reason, progress = evaluated([math.nan, 0.2, math.nan, 0.3], patience=2)
    assert (reason, progress.best_score, progress.num_worse) == (None, 0.3, 0)
    reason, progress = evaluated([math.nan, math.nan], patience=2)
    assert reason == StopReason("patience", metric="accuracy", count=2) and progress.score is None


def test_the_best_may_be_the_lowest_loss() -> None:
    reason, progress = evaluated([0.3, 0.4, 0.2, 0.1], patience=2, best="loss")
    assert reason == StopReason("patience", metric="loss", value=0.6, count=2) and progress.best_score == -0.6


def test_the_best_value_keeps_its_sign() -> None:
    stop, progress = EarlyStop(TrainConfig(batch_size=1, best="kappa", patience=1)), Progress()
    for kappa in (-0.3, -0.2, -0.25):
        progress = stop.judge_evaluation(progress, {"kappa": kappa})
    assert (stop.reason, progress.best_value) == (StopReason("patience", metric="kappa", value=-0.2, count=1), -0.2)


@pytest.mark.parametrize(
    ("options", "measured", "expected"),
    [
        (
            {"best": "weather"},
            {"accuracy": 0.3, "loss": 1},
            "--best needs weather, and evaluations measure accuracy, loss",
        ),
        ({"until": "f1=0.1"}, {"accuracy": 0.3}, "--until needs f1, and evaluations measure accuracy;"),
        ({"patience": 3}, {"top5": 0.3}, "--patience needs accuracy, and evaluations measure top5;"),
        ({"patience": 3}, {}, "--patience needs accuracy, and evaluations measure nothing;"),
    ],
)
def test_a_metric_that_evaluations_lack_is_told(
    options: dict[str, Any], measured: dict[str, float], expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        EarlyStop(TrainConfig(batch_size=1, **options)).judge_evaluation(Progress(), measured)
    EarlyStop(TrainConfig(batch_size=1)).judge_evaluation(Progress(), measured)  # without an option that needs it


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"until": "acc=0.5"}, "--until needs acc, .* accuracy, loss, balanced_accuracy, macro_f1; name one of these"),
        ({"best": "acuracy"}, r"--best needs acuracy \(did you mean accuracy\?\), "),
        ({"until": "f1=1", "labels": "x.csv", "label_separator": "|"}, "loss, mean_average_precision, macro_f1;"),
    ],
)
def test_a_metric_that_the_built_in_evaluation_lacks_is_refused_before_it_trains(
    options: dict[str, Any], expected: str
) -> None:
    config = TrainConfig(data="nowhere", name="no", batch_size=1, learning_rate=0.1, **options)
    with pytest.raises(UsageError, match=expected):
        raytrain.train(config)
    with pytest.raises(UsageError, match=expected):
        raytrain.sweep(config, vary="learning-rate=0.1,0.2")


@pytest.mark.not_quick
def test_a_loop_that_leaves_the_evaluation_to_the_run_is_refused_in_its_first_step(
    images: Path, tmp_path: Path
) -> None:
    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(run.build_optimizer(model))
        for epoch in run.epochs():
            for batch in epoch:
                assert batch.step == 0
                optimizer.zero_grad()
                run.loss(model(batch.images), batch.targets).backward()
                optimizer.step()

    with pytest.raises(UsageError, match="--until needs acc, and evaluations measure accuracy, loss, balanced_"):
        train_here(folder_run(images, tmp_path, "run", loop=loop, until="acc=0.5"))


def measured_as(losses: list[float]) -> Callable[[Run], None]:
    """A loop whose evaluations measure ``losses``, one after the other, at the same accuracy."""

    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(run.build_optimizer(model))
        coming = iter(losses)
        for epoch in run.epochs(evaluate=lambda: {"accuracy": 0.5, "loss": next(coming)}):
            for batch in epoch:
                optimizer.zero_grad()
                run.loss(model(batch.images), batch.targets).backward()
                optimizer.step()

    return loop


@pytest.mark.not_quick
def test_the_best_checkpoint_is_that_with_the_lowest_loss(images: Path, tmp_path: Path) -> None:
    loop = measured_as([0.5, 0.2, 0.3, 0.4])
    train_here(folder_run(images, tmp_path, "run", loop=loop, best="loss", epochs=4, keep_checkpoints=1))
    assert {int(path.stem[5:]) for path in tmp_path.rglob("step-*.pt")} == {10, 20}
    assert best_checkpoint(run_store(str(tmp_path), "run")) == "checkpoints/step-000000010.pt"


@pytest.mark.parametrize(("max_time", "seconds"), [("90s", 90), ("1.5m", 90), ("2h", 7200), ("1d", 86400)])
def test_time_is_up_after_the_time_that_was_given(
    max_time: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 5.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stop = EarlyStop(TrainConfig(batch_size=1, max_time=max_time))
    now_s += seconds - 1
    assert not stop.check_time() and stop.time_reason is None
    now_s += 1
    assert stop.check_time() and stop.time_reason == StopReason("time", max_time)


@pytest.mark.parametrize(
    ("losses", "detail"),
    [
        ([1.0, 3.9, 4.1], "the loss is 4.1, after 1 in the first step"),
        ([-0.5, -0.9, 0.9, 1.1], "the loss is 1.1, after -0.5 in the first step"),
        ([1.0, math.nan], "the loss is nan, after 1 in the first step"),
    ],
    ids=str,
)
def test_a_search_for_a_rate_ends_once_the_loss_has_risen_far(losses: list[float], detail: str) -> None:
    stop = EarlyStop(TrainConfig(batch_size=1, schedule="rising"))
    for step, loss in enumerate(losses, start=1):
        assert stop.reason is None
        stop.judge_training(MetricRow(kind="step", step=step, epoch=1, metrics={"loss": loss}))
    assert stop.reason == StopReason("diverged", detail)


def adds_up_three_batches(run: Run) -> None:
    model = run.prepare(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(run.num_classes)))
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
    for epoch in run.epochs():
        for batch in epoch:
            torch.nn.functional.cross_entropy(model(batch.images), batch.labels).backward()
            if batch.step % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.not_quick
def test_at_the_end_of_the_time_all_workers_wait_for_gradients_that_are_added_up(images: Path, tmp_path: Path) -> None:
    """The optimizer steps within an epoch of 5 batches, and after the end of one of 2."""
    options: dict[str, Any] = {"loop": adds_up_three_batches, "max_time": "0s"}
    names = {"within": 20, "after": 45}
    train_runs(2, *(folder_run(images, tmp_path, name, batch_size=size, **options) for name, size in names.items()))
    for name in names:
        assert [path.stem for path in (tmp_path / name).rglob("step-*.pt")] == ["step-000000003"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"until": "0.9"}, "--until is '0.9'; give a metric and a number"),
        ({"max_time": "2 hours"}, "--max-time is '2 hours'; give a number and s, m, h or d"),
        ({"patience": 2, "evaluate_every": 0}, "--until and --patience look at evaluations"),
    ],
)
def test_mistakes_are_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TrainConfig(batch_size=1, **options)


@pytest.mark.not_quick
@pytest.mark.parametrize("options", [{"until": "accuracy=0"}, {"max_time": "0s"}], ids=str)
def test_a_run_that_stops_by_itself_has_a_checkpoint(options: dict[str, Any], images: Path, tmp_path: Path) -> None:
    _, recorder = train_here(folder_run(images, tmp_path, "run", **options, epochs=3))
    (step,) = [int(path.stem[5:]) for path in tmp_path.rglob("step-*.pt")]
    assert step == (1 if "max_time" in options else 5)
    assert all(row.step <= step for row in recorder.rows)
