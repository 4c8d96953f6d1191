"""The metrics of an evaluation: the confusion matrix, each class, and which classes are confused."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from raytrain.inference.classification_metrics import ClassScore, Confusion, EvaluationResult, score

CLASSES = ("cat", "dog", "fox", "owl")


def scored(truth: list[int], answers: list[int]) -> EvaluationResult:
    indices = np.array(truth, np.int64), np.array(answers, np.int64)
    return score(*indices, np.linspace(0, 1, len(truth)), CLASSES, run="first", data="d", checkpoint="c", skipped=3)


def test_rows_of_the_matrix_are_true_classes_and_columns_are_predictions() -> None:
    found = scored([0, 0, 0, 1, 2], [0, 1, 1, 1, 0])
    assert found.confusion.tolist() == [[0, 0, 1], [0, 1, 2], [1, 1, 1], [2, 0, 1]]
    assert found.confusion_matrix.tolist() == [[1, 2, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_memory_and_result_grow_with_what_is_confused_not_with_the_square_of_the_classes() -> None:
    num_classes = 20_000
    truth = np.arange(num_classes)
    classes = [f"class {number}" for number in range(num_classes)]
    tracemalloc.start()
    found = score(truth, truth[::-1], np.ones(num_classes), classes, run="first", data="d", checkpoint="c", skipped=0)
    document = json.dumps(found.summary())
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.confusion) == num_classes and found.confusions[0] == Confusion(classes[0], classes[-1], 1)
    assert len(document) < 3_000_000 and most_bytes < 100_000_000


def test_each_class_has_its_images_and_its_accuracy() -> None:
    found = scored([0, 0, 0, 1, 2], [0, 1, 1, 1, 0])
    assert (found.images, found.accuracy, found.loss) == (5, pytest.approx(0.4), pytest.approx(0.5))
    assert found.classes == CLASSES
    assert found.per_class == (
        ClassScore("cat", images=3, right=1, accuracy=1 / 3),
        ClassScore("dog", images=1, right=1, accuracy=1.0),
        ClassScore("fox", images=1, right=0, accuracy=0.0),
        ClassScore("owl", images=0, right=0, accuracy=None),
    )


def test_the_summary_has_plain_values() -> None:
    assert json.loads(json.dumps(scored([0, 0], [0, 1]).summary())) == {
        "run": "first",
        "data": "d",
        "checkpoint": "c",
        "skipped": 3,
        "part": None,
        "trained_on": None,
        "all_compared": None,
        "images": 2,
        "accuracy": 0.5,
        "balanced_accuracy": 0.5,
        "macro_f1": pytest.approx(2 / 3),
        "loss": 0.5,
        "classes": list(CLASSES),
        "per_class": [
            {"name": "cat", "images": 2, "right": 1, "accuracy": 0.5},
            *({"name": name, "images": 0, "right": 0, "accuracy": None} for name in CLASSES[1:]),
        ],
        "confusions": [{"truth": "cat", "answer": "dog", "images": 1}],
        "confusion": [[0, 0, 1], [0, 1, 1]],
        "accuracy_interval": None,
        "interval_groups": None,
        "metrics": {},
    }


def test_the_most_frequent_confusions_come_first_without_correct_predictions() -> None:
    found = scored([2, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 3, 1, 1, 1, 1])
    assert found.confusions == (Confusion("cat", "dog", 2), Confusion("cat", "owl", 1), Confusion("fox", "cat", 1))
    assert scored([0, 1], [0, 1]).confusions == ()


def test_at_most_ten_confusions_are_listed() -> None:
    truth, answers = np.indices((4, 4)).reshape(2, -1)
    assert len(scored(truth.tolist(), answers.tolist()).confusions) == 10


def test_without_images_the_accuracy_is_none() -> None:
    found = scored([], [])
    assert (found.images, found.accuracy, found.loss, found.confusions) == (0, None, None, ())
    assert found.confusion_matrix.tolist() == [[0] * 4] * 4
