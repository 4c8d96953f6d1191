"""Classes of unequal size: how often each sample comes, weights in the loss, and metrics."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytrain.data.dataset import class_weights
from raytrain.data.labels.manifest import Manifest
from raytrain.data.plan.batch_plan import BatchPlan, ClassBalance
from raytrain.errors import UsageError
from raytrain.training.metrics.evaluation_metrics import balanced_accuracy, macro_f1
from raytrain.training.networks.loss import Loss
from tests.helpers.memory_runs import config

LABELS = np.repeat([0, 1, 2], [90, 9, 1])


def plan_of(labels: np.ndarray, seed: int = 3) -> BatchPlan:
    return BatchPlan(len(labels), 7, 5, seed, balance=ClassBalance.of(labels))


def epoch_of(plan: BatchPlan, epoch: int) -> np.ndarray:
    return plan.draws(epoch, np.arange(plan.num_samples))


def test_every_class_comes_equally_often_and_every_sample_of_a_class_too() -> None:
    plan = plan_of(LABELS)
    times = np.zeros(100, int)
    for epoch in range(5):
        drawn = epoch_of(plan, epoch) % 100
        assert np.bincount(LABELS[drawn]).tolist() == [34, 33, 33]
        times += np.bincount(drawn, minlength=100)
        assert all(np.ptp(times[label == LABELS]) <= 1 for label in range(3))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 3), st.integers(0, 9))
def test_draws_are_told_apart_and_do_not_depend_on_how_they_are_asked_for(
    labels: list[int], epoch: int, seed: int
) -> None:
    plan = plan_of(np.array(labels), seed=seed)
    draws = epoch_of(plan, epoch)
    assert len(set(draws.tolist())) == len(labels)
    one_by_one = [int(plan.draws(epoch, np.array([position]))[0]) for position in range(len(labels))]
    assert one_by_one == draws.tolist()
    numbers = np.bincount(np.array(labels)[draws % len(labels)], minlength=5)[np.bincount(labels, minlength=5) > 0]
    assert np.ptp(numbers) <= 1


def test_another_seed_draws_in_another_order() -> None:
    one, other = epoch_of(plan_of(LABELS), 0), epoch_of(plan_of(LABELS, seed=4), 0)
    assert (one != other).any() and (np.sort(one) != np.sort(other)).any()


def manifest(labels: list[int]) -> Manifest:
    keys = pa.array([str(number) for number in range(len(labels))], pa.large_string())
    return Manifest(keys, np.array(labels, np.int32), np.ones(len(labels), np.int64), keys, ("a", "b"), "url")


def test_balanced_weights_give_every_class_the_same_sum() -> None:
    weights = class_weights("balanced", manifest([0, 0, 0, 1]))
    assert weights == pytest.approx((4 / 6, 2.0))
    assert class_weights(None, manifest([0, 1])) is None
    with pytest.raises(UsageError, match=r"--class-weights is balance \(did you mean balanced\?\)"):
        class_weights("balance", manifest([0, 1]))


def test_weights_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    file.write_text(json.dumps({"b": 3, "a": 0.5}))
    assert class_weights(str(file), manifest([0, 1])) == (0.5, 3.0)
    for content in ({"a": 1}, {"a": 1, "b": -1}, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": "1"}):
        file.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=r"must have a number .* for each of the 2 classes .* 1, such as '[bc]'"):
            class_weights(str(file), manifest([0, 1]))
    named = config(class_weights={"b": 3, "a": 0.5})  # which Python code may write as a dictionary
    assert class_weights(named.class_weights, manifest([0, 1])) == (0.5, 3.0)
    with pytest.raises(UsageError, match="for each of the 2 classes"):
        class_weights('{"a": 1}', manifest([0, 1]))
    file.write_text("[1, 2]")
    with pytest.raises(UsageError, match="must be balanced, or JSON with a weight for each"):
        class_weights(str(file), manifest([0, 1]))


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ('{"a": 0, "b": 0}', "is 0 for each class that a training image has, so nothing would be learned"),
        ('{"a": 0, "b": 1}', "is 0 for each class that a training image has"),  # no image is of class b
        ('{"a": 1, "a": 2, "b": 1}', "has several weights for 'a'; give one"),
        ('{"a": 1, "b": 1e39}', "must have a number of at least 0 .*, such as 'b'"),  # infinite in float32
        ('{"a": 1, "b": NaN}', "must have a number of at least 0 .*, such as 'b'"),
        ('{"a": 1, "b": -Infinity}', "must have a number of at least 0 .*, such as 'b'"),
        (f'{{"a": 1, "b": {10**400}}}', "must have a number of at least 0 .*, such as 'b'"),
        ('{"a": 1, "b": true}', "must have a number of at least 0 .*, such as 'b'"),
    ],
)
def test_weights_that_no_loss_can_use_are_refused(option: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=f"^--class-weights: .* {sentence}"):
        class_weights(option, manifest([0, 0]))
    assert class_weights('{"a": 1, "b": 0}', manifest([0, 0])) == (1.0, 0.0)


def test_the_loss_is_what_its_papers_say() -> None:
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 2, 1, 0])
    options = config(precision="float64")
    p = logits.softmax(1)[torch.arange(6), labels]
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    cpu = torch.device("cpu")
    assert Loss(options, 3, None, cpu)(logits, labels).item() == pytest.approx(-p.log().mean().item())
    weighted = Loss(options, 3, (0.5, 1.0, 2.0), cpu)(logits, labels).item()
    assert weighted == pytest.approx(-(weights[labels] * p.log()).mean().item())
    focal = Loss(dataclasses.replace(options, focal_gamma=2.0), 3, None, cpu)(logits, labels).item()
    assert focal == pytest.approx(-((1 - p) ** 2 * p.log()).mean().item())


def test_rare_classes_count_as_much_as_common_ones() -> None:
    right, truth, predicted = np.array([9, 0, 0]), np.array([9, 1, 0]), np.array([10, 0, 0])
    assert balanced_accuracy(right, truth) == 0.5
    assert macro_f1(right, truth, predicted) == pytest.approx((18 / 19 + 0) / 2)
    assert np.isnan(balanced_accuracy(truth * 0, truth * 0)) and np.isnan(macro_f1(*[truth * 0] * 3))
