"""Images that may have several classes each: label files, metrics, the same weights on any workers, and predictions."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch import nn

import raytrain
from raytrain import TrainConfig, UsageError
from raytrain.data.dataset import Dataset, class_weights, open_dataset
from raytrain.data.images.decode import decode
from raytrain.data.labels.hold_out import hold_out
from raytrain.data.labels.manifest import Manifest
from raytrain.diagnostics.look import look_at
from raytrain.inference.classification_metrics import LabelEvaluation, chosen_thresholds
from raytrain.inference.serve import served_model
from raytrain.inference.trained_run import open_trained_run
from raytrain.runs.documents import run_store, write_json
from raytrain.runs.stored_checkpoints import checkpoint_path, stored_thresholds
from raytrain.training.metrics.evaluation_metrics import average_precisions, best_thresholds
from raytrain.training.networks.loss import Loss
from raytrain.training.networks.model import build_model
from tests.helpers.folder_runs import folder_run, largest_difference, train_here, train_runs
from tests.helpers.small_runs import config as small_config
from tests.helpers.stored_runs import ANIMALS, add_checkpoint, make_run, options

CLASSES = ("bright", "odd", "rare")
NUM_IMAGES = 60


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Noise; every second image is odd, a third is bright, every tenth is rare, and some are nothing."""
    folder = tmp_path / "images"
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        pixels = random.integers(0, 128, (12, 12, 3), dtype=np.uint8) + 120 * (number % 3 == 0)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02d}.png")
    return folder


def classes_of(number: int) -> list[str]:
    return [name for name, every in (("bright", 3), ("odd", 2), ("rare", 10)) if number % every == (name == "odd")]


def write_labels(file: Path, *, joined: bool) -> dict[str, Any]:
    """A label file, and the options that read it."""
    keys = [f"{number:02d}.png" for number in range(NUM_IMAGES)]
    of_each = [classes_of(number) for number in range(NUM_IMAGES)]
    if joined:
        table = pa.table({"path": keys, "label": [" | ".join(names) for names in of_each]})
    else:
        table = pa.table({"path": keys, **{name: [int(name in names) for names in of_each] for name in CLASSES}})
    pyarrow.csv.write_csv(table, file)
    return {"labels": str(file), **({"label_separator": "|"} if joined else {"label_column": CLASSES})}


def opened(images: Path, **more: Any) -> Dataset:
    mean = {"mean": (0.4,) * 3, "std": (0.2,) * 3}
    config = TrainConfig(data=str(images), batch_size=2, learning_rate=1, **mean, **more)
    return open_dataset(config, run_store(str(images.parent), "none"))


def by_key(manifest: Manifest) -> dict[str, list[str]]:
    return {
        key: list(manifest.class_names(label))
        for key, label in zip(manifest.keys.to_pylist(), manifest.labels, strict=True)
    }


def test_a_class_that_only_held_out_images_have_is_reported(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        f"{number:02d}.png,odd{'|rare' * (number > 50)},{'val' if number > 40 else 'train'}\n" for number in range(60)
    ]
    (tmp_path / "labels.csv").write_text("path,label,split\n" + "".join(rows))
    opened(images, labels=str(tmp_path / "labels.csv"), label_separator="|")
    told = "Classes without a training image, so that the network cannot learn them: 1 of 2 (rare)."
    assert told in caplog.text


@pytest.mark.parametrize("joined", [False, True])
def test_both_kinds_of_label_files_say_the_same(images: Path, tmp_path: Path, joined: bool) -> None:
    data = opened(images, **write_labels(tmp_path / "labels.csv", joined=joined), validation_fraction=0.2)
    assert data.train.classes == data.validation.classes == CLASSES
    found = by_key(data.train) | by_key(data.validation)
    assert found == {f"{number:02d}.png": classes_of(number) for number in range(NUM_IMAGES)}
    assert len(data.train) + len(data.validation) == NUM_IMAGES
    for held_out, total in zip(data.validation.class_counts(), (20, 30, 6), strict=True):
        assert held_out == pytest.approx(0.2 * total, abs=2)
    assert "" in {
        "".join(names) for names in by_key(data.validation).values()
    }  # images without a class are held out, too
    again = Manifest.from_parquet(data.train.to_parquet())
    assert again.digest == data.train.digest and by_key(again) == by_key(data.train)
    assert class_weights("balanced", data.train) == pytest.approx(
        [(len(data.train) - n) / n for n in data.train.class_counts()]
    )


def test_groups_are_held_out_as_a_whole(images: Path, tmp_path: Path) -> None:
    columns = write_labels(tmp_path / "labels.csv", joined=True)
    table = pyarrow.csv.read_csv(tmp_path / "labels.csv")
    table = table.append_column("patient", pa.array([f"p{number // 3}" for number in range(NUM_IMAGES)]))
    pyarrow.csv.write_csv(table, tmp_path / "labels.csv")
    data = opened(images, **columns, group_by="patient", validation_fraction=0.2)
    patients = [{int(key[:2]) // 3 for key in by_key(each)} for each in (data.train, data.validation)]
    assert patients[0].isdisjoint(patients[1]) and 6 <= len(data.validation) <= 18


def test_images_that_are_held_out_take_no_memory_for_each_class() -> None:
    random = np.random.default_rng(0)
    sets = random.random((4000, 500)) < 0.01  # 2 MB
    keys = pa.array([f"{number}.png" for number in range(4000)], pa.large_string())
    numbers = np.arange(4000)
    classes = tuple(f"class {number:03d}" for number in range(500))
    images = Manifest(keys, numbers.astype(np.int32), numbers, keys, classes, "", {}, label_sets=sets)
    tracemalloc.start()
    train, held_out = hold_out(images, 0.2, seed=0)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < sets.nbytes and len(train) + len(held_out) == 4000
    assert np.abs(held_out.class_counts() / images.class_counts() - 0.2).mean() < 0.05


def test_a_fraction_of_less_than_an_image_is_refused_without_a_word_of_groups(images: Path, tmp_path: Path) -> None:
    columns = write_labels(tmp_path / "labels.csv", joined=True)
    with pytest.raises(UsageError, match="None of 60 images can be held out with --validation-fraction"):
        opened(images, **columns, validation_fraction=0.001)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"sampling": "balanced"}, "--sampling balanced needs images of one class each"),
        ({"focal_gamma": 2.0}, "--focal-gamma needs images of one class"),
        ({"label_smoothing": 0.1}, "--label-smoothing needs images of one class"),
        ({"label_column": ("a", "b")}, "--label-separator is for one column with several classes"),
        ({"label_separator": ""}, "--label-separator is empty"),
        ({"labels": None}, "--label-separator is for the label file; give that with --labels"),
    ],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TrainConfig(**{"batch_size": 2, "labels": "labels.csv", "label_separator": "|", **given})


def test_a_column_with_anything_but_0_and_1_is_refused(images: Path, tmp_path: Path) -> None:
    columns = write_labels(tmp_path / "labels.csv", joined=False)
    (tmp_path / "labels.csv").write_text((tmp_path / "labels.csv").read_text().replace('"05.png",0', '"05.png",maybe'))
    with pytest.raises(UsageError, match=r"1 of 60 rows of .* neither 0 nor 1 in the column 'bright', but 'maybe' for"):
        opened(images, **columns)


def test_minus_1_in_a_column_of_minus_1_and_1_alone_is_0(images: Path, tmp_path: Path) -> None:
    columns = write_labels(tmp_path / "labels.csv", joined=False)
    zeros = (tmp_path / "labels.csv").read_text()
    expected = by_key(opened(images, **columns).train)
    (tmp_path / "labels.csv").write_text(zeros.replace(",0", ",-1"))  # as of CelebA
    assert by_key(opened(images, **columns).train) == expected
    (tmp_path / "labels.csv").write_text(zeros.replace(",0", ",-1", 5))  # as of VOC, where 0 is for difficult ones
    with pytest.raises(UsageError, match=r"neither 0 nor 1 in the column '[a-z]+', but '-1' for instance"):
        opened(images, **columns)


def test_a_class_that_is_named_twice_is_refused(images: Path, tmp_path: Path) -> None:
    columns = write_labels(tmp_path / "labels.csv", joined=False)
    with pytest.raises(UsageError, match=r"--label-column names 'bright' 2 times; name each class once"):
        opened(images, **{**columns, "label_column": ("bright", "odd", "bright")})


def test_a_table_with_exactly_one_1_in_each_row_is_said_to_be_of_single_classes_and_packed_as_such(
    images: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{number:02d},{number % 3 == 0:d},{number % 3 == 1:d},{number % 3 == 2:d}.0\n" for number in range(60)]
    (tmp_path / "labels.csv").write_text("image,MEL,NV,BCC\n" + "".join(rows))  # as of ISIC 2018
    labels = str(tmp_path / "labels.csv")
    with pytest.raises(UsageError, match=r"0 and 1: MEL NV BCC; each row has exactly one 1 .*, pack the images with"):
        opened(images, labels=labels)
    opened(images, labels=labels, label_column=("MEL", "NV", "BCC"))
    assert "has exactly one class, and the options allow several or none" in caplog.text
    caplog.clear()
    raytrain.pack(str(images), str(tmp_path / "packed"), labels=labels, label_column=("MEL", "NV", "BCC"))
    assert "--labels" not in caplog.text
    train = opened(tmp_path / "packed").train
    assert train.classes == ("BCC", "MEL", "NV") and train.label_sets is None
    opened(images, labels=labels, label_column=("MEL", "NV"))  # a third of them has none
    assert "exactly one" not in caplog.text


def brute_force(scores: np.ndarray[Any, Any], truth: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Average precision and the best F1 of one class, a threshold at a time."""
    area, recall, best = 0.0, 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        answers = scores >= threshold
        right = (answers & truth).sum()
        area += (right / truth.sum() - recall) * right / answers.sum()
        recall = right / truth.sum()
        best = max(best, 2 * right / (answers.sum() + truth.sum()))
    return area, best


def test_average_precision_and_thresholds_are_those_of_their_definitions() -> None:
    random = np.random.default_rng(0)
    scores = random.integers(0, 30, (200, 4)) / 30  # with ties
    truth = random.random((200, 4)) < scores * [1, 0.5, 0.2, 0]
    precisions, thresholds = average_precisions(scores, truth), best_thresholds(scores, truth)
    assert np.isnan(precisions[3]) and thresholds[3] == 0.5  # no image has this class
    for label in range(3):
        area, best = brute_force(scores[:, label], truth[:, label])
        answers = scores[:, label] >= thresholds[label]
        f1 = 2 * (answers & truth[:, label]).sum() / (answers.sum() + truth[:, label].sum())
        assert (precisions[label], f1) == pytest.approx((area, best))


def test_the_loss_is_torchs() -> None:
    logits, targets = torch.randn(5, 3), torch.tensor([[1.0, 0, 1]] * 5)
    config = TrainConfig(batch_size=1, labels="labels.csv", label_separator="|")
    ours = Loss(config, 3, (1.0, 2.0, 3.0), torch.device("cpu"))(logits, targets)
    theirs = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0]))(logits, targets)
    torch.testing.assert_close(ours, theirs)


def test_numbers_of_sets_of_classes_are_no_targets() -> None:
    config = TrainConfig(batch_size=1, labels="labels.csv", label_separator="|")
    loss = Loss(config, 3, None, torch.device("cpu"))
    with pytest.raises(UsageError, match=r"run.loss got batch.labels, which number sets of classes .* batch.targets"):
        loss(torch.randn(5, 3), torch.zeros(5, dtype=torch.int64))


@pytest.mark.not_quick
def test_one_and_three_workers_train_and_measure_the_same(images: Path, tmp_path: Path) -> None:
    columns = write_labels(tmp_path / "labels.csv", joined=False)
    common = {**columns, "mixup": 0.4, "class_weights": "balanced", "accumulate": 2, "validation_fraction": 0.3}
    common |= {"metrics": ("auroc", "calibration_error")}
    one, recorder = train_here(folder_run(images, tmp_path, "one", **common))
    stopped = folder_run(images, tmp_path, "three", **common, stop_after=3)
    train_runs(3, stopped)
    (three,) = train_runs(3, dataclasses.replace(stopped, stop_after=None))
    assert largest_difference(one, three) < 1e-10
    (first, *_, last) = [row for row in recorder.rows if row.kind == "evaluation"]
    named = {"auroc", "calibration_error"}
    assert set(last.metrics) == {"accuracy", "loss", "mean_average_precision", "macro_f1", *named}
    assert first.step == 3 and last.step == 6
    stored = [stored_thresholds(run_store(str(tmp_path), name), checkpoint_path(6), 3) for name in ("one", "three")]
    assert stored[0] == pytest.approx(stored[1]) and stored[0] != [0.5] * 3


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A storage folder with the run ``first``, whose network has random weights, and grey images."""
    (tmp_path / "grey").mkdir()
    random = np.random.default_rng(0)
    for number in range(12):
        pixels = random.integers(0, 256, (20, 12), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "grey" / f"{number:02d}.png")
    config = options(labels="labels.csv", label_separator="|")
    store = make_run(tmp_path / "runs", config)
    add_checkpoint(store, build_model(config.model, len(ANIMALS), 1, 0), config)
    write_json(store, f"{checkpoint_path(1)}.json", {"step": 1, "score": 0.5, "thresholds": [0.0, 0.4, 1.0]})
    return tmp_path


@pytest.mark.not_quick
def test_predictions_have_the_classes_by_their_thresholds(trained: Path) -> None:
    file = trained / "out.parquet"
    given: dict[str, Any] = {"storage": str(trained / "runs")}
    (trained / "grey" / "bad.png").write_bytes(b"no image")
    raytrain.predict("first", str(trained / "grey"), str(file), **given)
    rows = pq.read_table(file).to_pylist()
    assert list(rows[0]) == ["key", "labels", "score_cat", "score_dog", "score_fox", "error"]
    assert rows[-1]["labels"] is rows[-1]["score_cat"] is None and rows[-1]["error"]
    classifier = raytrain.load("first", **given)
    answers = classifier.classify_all([trained / "grey" / row["key"] for row in rows[:-1]])
    for row, answer in zip(rows[:-1], answers, strict=True):
        assert row["labels"] == "|".join(answer) and "cat" in answer and "fox" not in answer
        assert answer["cat"] == pytest.approx(row["score_cat"]) and ("dog" in answer) == (row["score_dog"] >= 0.4)
    ways: list[Any] = [[0.0], 0.0, np.zeros(3)]
    for threshold in ways:
        table = raytrain.predict("first", str(trained / "grey"), threshold=threshold, **given).table
        assert {row["labels"] for row in table.to_pylist()} == {"cat|dog|fox", None}
    with pytest.raises(
        UsageError, match=r"--threshold has 2 numbers from 0.1 to 0.2; give one, or one for each of the 3"
    ):
        raytrain.predict("first", str(trained / "grey"), str(file), threshold=[0.1, 0.2], **given)
    with pytest.raises(UsageError, match="--top-k is 2, but images of run 'first' may have several classes"):
        raytrain.predict("first", str(trained / "grey"), str(file), top_k=2, **given)


@pytest.mark.not_quick
def test_an_evaluation_scores_each_class(trained: Path) -> None:
    table = pa.table({"path": [f"{number:02d}.png" for number in range(12)], "label": ["cat|dog", "", "dog"] * 4})
    pyarrow.csv.write_csv(table, trained / "labels.csv")
    given: dict[str, Any] = {"labels": str(trained / "labels.csv"), "storage": str(trained / "runs")}
    result = raytrain.evaluate("first", str(trained / "grey"), **given)
    assert isinstance(result, LabelEvaluation)
    cat, dog, fox = result.per_class
    assert (cat.images, cat.recall, cat.precision, cat.threshold) == (4, 1.0, pytest.approx(1 / 3), 0.0)
    assert (fox.images, fox.average_precision, fox.recall, fox.precision) == (0, None, None, None)
    assert dog.threshold == 0.4 and cat.average_precision is not None and dog.average_precision is not None
    assert result.mean_average_precision == pytest.approx((cat.average_precision + dog.average_precision) / 2)
    with pytest.raises(UsageError, match="give their label file with --labels"):
        raytrain.evaluate("first", str(trained / "grey"), storage=str(trained / "runs"))

    # Without an image that can be read there is nothing to measure, and the numbers of images are known.
    for file in (trained / "grey").iterdir():
        file.write_bytes(b"no image")
    result = raytrain.evaluate("first", str(trained / "grey"), **given)
    assert isinstance(result, LabelEvaluation)
    assert (result.images, result.skipped, result.accuracy, result.mean_average_precision) == (0, 12, None, None)


@pytest.mark.not_quick
def test_a_look_shows_all_classes_of_an_image(images: Path, tmp_path: Path) -> None:
    columns = write_labels(tmp_path / "labels.csv", joined=True)
    result = look_at(small_config(images, tmp_path, **columns, validation_fraction=0.2))
    assert [(each.name, each.training + each.validation) for each in result.classes] == [
        ("bright", 20),
        ("odd", 30),
        ("rare", 6),
    ]
    assert {"bright, odd", "odd", ""} <= set(result.first_images.labels)


def test_an_answer_over_http_has_all_classes_of_an_image(trained: Path) -> None:
    run = open_trained_run("first", str(trained / "runs"), trust=False)
    model = served_model(run, run.store, 2, chosen_thresholds(run))
    files = sorted((trained / "grey").glob("*.png"))
    pixels = np.stack([decode(file.read_bytes(), model.format.shape, model.format.cropping.crop) for file in files])
    table = model.load_predictor(model.store, 1, 0)(pixels, np.full(len(files), -1))
    answers = [json.loads(json.dumps(model.answer(row))) for row in table.to_pylist()]
    expected = raytrain.load("first", storage=str(trained / "runs")).classify_all(files)
    for answer, scores in zip(answers, expected, strict=True):
        assert sorted(answer["labels"]) == sorted(scores)
        first, second = answer["classes"]
        assert first["score"] >= second["score"] and len(answer["classes"]) == 2
        for each in answer["classes"]:
            assert each["threshold"] == {"cat": 0.0, "dog": 0.4, "fox": 1.0}[each["label"]]
            assert (each["label"] in answer["labels"]) == (each["score"] >= each["threshold"])
    every = served_model(run, run.store, 3, chosen_thresholds(run, [0.0]))
    assert sorted(every.answer(table.to_pylist()[0])["labels"]) == ["cat", "dog", "fox"]
