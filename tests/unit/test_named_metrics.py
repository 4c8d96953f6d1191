"""Metrics by name: they are what torchmetrics computes, of the images of all workers, and decide on what is best."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics.classification as reference
from torch import Tensor

from raytrain import TrainConfig, UsageError
from raytrain.runs.outcome import Progress
from raytrain.training.metrics.early_stop import EarlyStop
from raytrain.training.metrics.evaluation_metrics import is_lower_better, measured_metrics
from raytrain.training.metrics.named_metrics import NamedMetrics

pytestmark = pytest.mark.not_quick  # torchmetrics takes seconds to import

NAMES = ("top2", "auroc", "average_precision", "calibration_error")
CLASSES = tuple("abcde")


def draw(num_images: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return probabilities, float64 (n, 5), many of which are equal, and labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (num_images,), generator=generator)
    logits = torch.randn(num_images, 5, generator=generator, dtype=torch.float64).mul(2).round()
    logits[torch.arange(num_images), labels] += 1
    return logits.softmax(1), labels


def measure(
    probabilities: Tensor, truth: Tensor, names: tuple[str, ...] = NAMES, *, multi_label: bool = False
) -> dict[str, float]:
    classes = CLASSES[: probabilities.shape[1]]
    metrics = NamedMetrics(names, classes, multi_label=multi_label, device=torch.device("cpu"))
    for start in range(0, len(truth), 7):
        metrics.add(probabilities[start : start + 7], truth[start : start + 7])
    return metrics.values(torch.Tensor.tolist, lambda rows: rows, world_size=1)


def test_of_one_class_per_image() -> None:
    probabilities, labels = draw(300)
    expected = {
        "auroc": reference.MulticlassAUROC(5)(probabilities, labels),
        "average_precision": reference.MulticlassAveragePrecision(5)(probabilities, labels),
        "calibration_error": reference.MulticlassCalibrationError(5)(probabilities, labels),
    }
    measured = measure(probabilities, labels)
    # torch decides at random which of equal classes are among the first k, so that is counted here.
    ranks = np.argsort(-probabilities.numpy(), axis=1, kind="stable")[:, :2]
    assert measured.pop("top2") == pytest.approx((ranks == labels.numpy()[:, None]).any(axis=1).mean())
    assert measured == pytest.approx({name: value.item() for name, value in expected.items()}, abs=1e-6)
    assert measure(probabilities, labels, ("top1",))["top1"] == (ranks[:, 0] == labels.numpy()).mean()


def test_of_several_classes_per_image() -> None:
    probabilities, _ = draw(200)
    truth = (draw(200, seed=1)[0] > 0.2).long()
    measured = measure(probabilities, truth, NAMES[1:], multi_label=True)
    assert measured == pytest.approx(
        {
            "auroc": reference.MultilabelAUROC(5)(probabilities, truth).item(),
            "average_precision": reference.MultilabelAveragePrecision(5)(probabilities, truth).item(),
            "calibration_error": reference.BinaryCalibrationError()(probabilities.flatten(), truth.flatten()).item(),
        },
        abs=1e-6,
    )


def test_classes_without_images_count_as_nothing() -> None:
    probabilities, labels = draw(100)
    few = labels < 4
    measured = measure(probabilities[few], labels[few])
    of_classes: Any = reference.MulticlassAUROC(5, average="none")(probabilities[few], labels[few])
    assert measured["auroc"] == pytest.approx(of_classes[:4].mean().item(), abs=1e-6)
    assert all(map(math.isnan, measure(probabilities[:0], labels[:0]).values()))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("MulticlassCohenKappa", reference.MulticlassCohenKappa(5)),
        ("MulticlassFBetaScore(beta=2.0)", reference.MulticlassFBetaScore(2.0, 5)),
        ("MulticlassFBetaScore(2.0)", reference.MulticlassFBetaScore(2.0, 5)),
        ("Accuracy(average='micro')", reference.MulticlassAccuracy(5, average="micro")),
    ],
)
def test_any_class_of_torchmetrics(name: str, expected: Any) -> None:
    probabilities, labels = draw(100)
    measured = measure(probabilities, labels, (f"torchmetrics:{name}",))
    assert measured == pytest.approx({name.partition("(")[0]: expected(probabilities, labels).item()}, abs=1e-6)


def test_one_that_gives_a_number_for_each_class_has_a_name_for_each() -> None:
    probabilities, labels = draw(100)
    measured = measure(probabilities, labels, ("torchmetrics:MulticlassRecall(average=None)",))
    assert measured == pytest.approx(
        {
            f"MulticlassRecall {name}": value
            for name, value in zip(
                CLASSES, reference.MulticlassRecall(5, average=None)(probabilities, labels).tolist(), strict=True
            )
        },
        abs=1e-6,
    )


def test_a_binary_one_takes_the_probability_of_the_second_class() -> None:
    _, labels = draw(100)
    of_second = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probabilities, labels = torch.stack([1 - of_second, of_second], dim=1), labels % 2
    measured = measure(probabilities, labels, ("torchmetrics:BinaryAUROC", "auroc"))
    expected = reference.BinaryAUROC()(probabilities[:, 1], labels).item()
    assert measured == pytest.approx({"BinaryAUROC": expected, "auroc": expected}, abs=1e-6)


# What the options name.


def config(**options: Any) -> TrainConfig:
    return TrainConfig(batch_size=1, **options)


def test_best_and_until_have_their_metric_measured() -> None:
    options = config(
        metrics=("top5", "torchmetrics:MulticlassCohenKappa"), best="auroc", until="calibration_error=0.05"
    )
    named = "top5", "MulticlassCohenKappa", "auroc", "calibration_error"
    assert measured_metrics(options) == ("accuracy", "loss", "balanced_accuracy", "macro_f1", *named)
    options.check_metrics(measured_metrics(options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": "top-5"}, r"--metrics has 'top-5' \(did you mean top5\?\); give top5, auroc"),
        ({"metrics": "top0"}, r"--metrics has 'top0'"),
        ({"metrics": "f1"}, r"--metrics has 'f1'.*torchmetrics: and one of its classes"),
        ({"metrics": "torchmetrics:"}, r"--metrics has 'torchmetrics:'"),
        ({"metrics": "torchmetrics:os.system"}, r"--metrics has 'torchmetrics:os.system'"),
        (
            {"metrics": "torchmetrics:CohensKappa"},
            r"CohensKappa is no class of torchmetrics \(did you mean CohenKappa",
        ),
        (
            {"metrics": ("torchmetrics:Recall", "torchmetrics:Recall(top_k=2)")},
            r"two that are called Recall; leave one",
        ),
        ({"best": "f1"}, r"--best needs f1.*; name one of these, or top5, auroc, average_precision, calibration_error"),
        ({"best": "top3", "label_separator": "|", "labels": "a.csv"}, r"top3 is for images of one class"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_run_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        (made := config(**options)).check_metrics(measured_metrics(made))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("top5", "top5 is measured of 5 classes, of which each is always among"),
        ("torchmetrics:BinaryAUROC", "BinaryAUROC is for two classes, and there are 5; take a Multiclass one"),
        ("torchmetrics:MulticlassFBetaScore", r"MulticlassFBetaScore cannot be made \(TypeError"),
        ("torchmetrics:Recall(top_k=print(1))", r"Recall\(top_k=print\(1\)\) cannot be made \(ValueError"),
        ("torchmetrics:MeanSquaredError", r"torchmetrics:MeanSquaredError cannot measure probabilities of 5 classes"),
    ],
)
def test_what_does_not_fit_the_classes_is_refused(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measure(*draw(10), (name,))


def test_without_torchmetrics_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"needs torchmetrics, which is not installed; install raytrain\[torchmetrics\]"
    ):
        measured_metrics(config(metrics="torchmetrics:Recall"))


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("auroc", False),
        ("top5", False),
        ("calibration_error", True),
        ("HingeLoss", True),
        ("MulticlassCohenKappa", False),
    ],
)
def test_which_values_are_better(name: str, lower: bool) -> None:
    options = config(metrics=("torchmetrics:HingeLoss", "torchmetrics:MulticlassCohenKappa"), best=name, patience=2)
    assert is_lower_better(name, options) is lower
    stop, progress = EarlyStop(options), Progress()
    for value in (0.3, 0.2, 0.4):
        progress = stop.judge_evaluation(progress, {name: value})
    assert (progress.best_score, progress.num_worse) == ((-0.2, 1) if lower else (0.4, 0))


def test_one_of_which_nobody_knows_what_is_better_decides_nothing() -> None:
    options = config(metrics="torchmetrics:MulticlassStatScores", best="MulticlassStatScores")
    with pytest.raises(UsageError, match="cannot use MulticlassStatScores, of which torchmetrics does not say whether"):
        is_lower_better("MulticlassStatScores", options)


def test_an_evaluation_of_the_loops_own_must_return_them() -> None:
    with pytest.raises(UsageError, match="--metrics needs top5, and evaluations measure accuracy; return it from"):
        EarlyStop(config(metrics="top5")).judge_evaluation(Progress(), {"accuracy": 0.5})
