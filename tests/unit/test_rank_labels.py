"""The labels of a run, ranked by its margins, and label files to correct and give back."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from raytrain.cli.main import main
from raytrain.config import TrainConfig
from raytrain.data.dataset import Dataset, open_dataset
from raytrain.diagnostics.suspicious_labels import check_can_rank, rank_labels, write_labels
from raytrain.errors import UsageError
from raytrain.runs.documents import run_store, write_config
from raytrain.runs.outcome import Progress
from raytrain.runs.stored_checkpoints import Identity
from raytrain.storage.store import Store
from raytrain.training.checkpoint import Checkpoints
from raytrain.training.metrics.sample_margins import MARGINS


def tree(folder: Path, *classes: str, count: int = 6) -> Path:
    for number, name in enumerate(name for name in classes for _ in range(count)):
        file = folder / name / f"-{number}.png"  # a spreadsheet would take the name for a formula
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 50, 7)).save(file)
    return folder


def options(data: Path, storage: Path, **more: Any) -> TrainConfig:
    half = (0.5, 0.5, 0.5)
    return TrainConfig(
        data=str(data),
        storage=str(storage),
        name="run",
        resume=True,
        batch_size=2,
        learning_rate=1,
        mean=half,
        std=half,
        **more,
    )


def trained(config: TrainConfig) -> tuple[Store, Dataset]:
    """Store a run whose third training image has the lowest margin, and whose first one was never drawn."""
    store = run_store(config.storage, "run")
    data = open_dataset(config, store)
    data.write(store)
    num_samples = len(data.train)
    sums = torch.tensor([[2.0], [4.0], [1.0]]).repeat(1, num_samples)
    sums[:, 0] = 0
    sums[:, 2] = torch.tensor([2, -3, 5])
    rivals = torch.full((num_samples,), 2 * len(data.train.classes) + 1, dtype=torch.int32)  # class 1, in epoch 2
    rivals[0] = -1
    checkpoints = Checkpoints(store, Identity("model", data.train.classes, data.train.digest, 2, 0), keep=1)
    checkpoints.save({MARGINS: {"sums": sums, "rivals": rivals}}, Progress(step=9))
    checkpoints.close()
    return store, data


def test_the_lowest_mean_margin_comes_first_and_what_was_not_drawn_last(tmp_path: Path) -> None:
    config = options(tree(tmp_path / "images", "cat", "dog"), tmp_path / "runs")
    store, data = trained(config)
    ranked = rank_labels(config, store, data)
    assert ranked is not None
    keys = data.train.keys.to_pylist()
    rows = ranked.table.to_pylist()
    label = data.train.classes[data.train.labels[2]]
    expected = {"path": keys[2], "label": label, "suggested": "dog", "margin": -1.5, "loss": 2.5, "draws": 2}
    assert (ranked.samples[0], rows[0]) == (2, expected)
    assert rows[-1] == {**rows[-1], "path": keys[0], "suggested": "", "margin": None, "loss": None, "draws": 0}


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_label_file_that_is_given_back_has_the_same_images_in_each_part(suffix: str, tmp_path: Path) -> None:
    config = options(tree(tmp_path / "images", "cat", "dog"), tmp_path / "runs")
    store, data = trained(config)
    output = f"{tmp_path}/labels.{suffix}"
    ranked = check_can_rank(config, rank_labels(config, store, data))
    assert write_labels(ranked, data, output, config) == {"--labels": output}
    again = open_dataset(options(tmp_path / "images", tmp_path / "others", labels=output))
    for before, after in ((data.train, again.train), (data.validation, again.validation)):
        assert after.keys.to_pylist() == before.keys.to_pylist()
        assert after.labels.tolist() == before.labels.tolist()


def test_a_label_file_that_is_given_back_keeps_groups_and_the_names_of_columns(tmp_path: Path) -> None:
    images = tree(tmp_path / "images", "cat", "dog")
    paths = sorted(file.relative_to(images).as_posix() for file in images.rglob("*.png"))
    rows = [f"{path},{path[:3]},{'abcd'[number % 4]}" for number, path in enumerate(paths)]
    (tmp_path / "own.csv").write_text("\n".join(["file,kind,patient", *rows]) + "\n")
    columns: dict[str, Any] = {"key_column": "file", "label_column": ("kind",), "group_by": "patient"}
    columns["validation_fraction"] = 0.25
    config = options(images, tmp_path / "runs", labels=f"{tmp_path}/own.csv", **columns)
    store, data = trained(config)
    output = tmp_path / "labels.csv"
    write_labels(check_can_rank(config, rank_labels(config, store, data)), data, str(output), config)
    groups = dict(zip(paths, ("abcd"[number % 4] for number in range(len(paths))), strict=True))
    written = list(csv.DictReader(output.open()))
    assert {row["file"]: row["patient"] for row in written} == groups
    again = open_dataset(options(images, tmp_path / "others", labels=str(output), **columns))
    assert again.train.keys.to_pylist() == data.train.keys.to_pylist()
    assert again.validation.labels.tolist() == data.validation.labels.tolist()


@pytest.mark.parametrize(
    ("names", "pattern", "more"),
    [
        ("{label}_{number}.png", r"^([a-z]+)_", {}),
        ("{part}/{label}-{number}.png", r"(?P<label>.+)-\d+", {}),
        ("{part}-{label}-{number}.png", r"(?P<split>\w+)-(?P<label>\w+)-\d+", {}),
        ("{group}/{label}/{number}.png", r"(?P<patient>\w)/(?P<label>\w+)/", {"group_by": "patient"}),
        ("{label}/{group}_{number}.png", r"(?P<label>\w+)/(?P<patient>\w)_", {"group_by": "patient"}),
    ],
)
def test_labels_of_a_pattern_are_given_back_with_their_groups_and_parts(
    names: str, pattern: str, more: dict[str, Any], tmp_path: Path
) -> None:
    for number in range(24):
        label, part, group = ("cat", "dog")[number % 2], ("train", "val")[number % 6 == 5], "abcdef"[number // 4]
        name = names.format(label=label, part=part, group=group, number=number)
        file = tmp_path / "images" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number, 50, 7)).save(file)
    if "part" not in names:
        more = {**more, "validation_fraction": 0.34}
    config = options(tmp_path / "images", tmp_path / "runs", label_pattern=pattern, **more)
    store, data = trained(config)
    output = f"{tmp_path}/labels.csv"
    write_labels(check_can_rank(config, rank_labels(config, store, data)), data, output, config)
    again = open_dataset(options(tmp_path / "images", tmp_path / "others", labels=output, **more))
    for before, after in ((data.train, again.train), (data.validation, again.validation)):
        assert sorted(after.keys.to_pylist()) == sorted(before.keys.to_pylist())
        assert dict(zip(after.keys.to_pylist(), after.labels.tolist(), strict=True)) == dict(
            zip(before.keys.to_pylist(), before.labels.tolist(), strict=True)
        )
    if "group_by" in more:
        with Path(output).open() as file:
            assert {row["patient"] for row in csv.DictReader(file)} == set("abcdef")


def test_a_corrected_label_counts(tmp_path: Path) -> None:
    config = options(tree(tmp_path / "images", "cat", "dog"), tmp_path / "runs")
    store, data = trained(config)
    file = tmp_path / "labels.csv"
    write_labels(check_can_rank(config, rank_labels(config, store, data)), data, str(file), config)
    rows = list(csv.DictReader(file.open()))
    rows[0]["label"] = "ox"
    with file.open("w") as opened:
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    again = open_dataset(options(tmp_path / "images", tmp_path / "others", labels=str(file)))
    assert again.train.classes[again.train.labels[again.train.keys.to_pylist().index(rows[0]["path"])]] == "ox"


def test_held_out_images_of_another_folder_have_a_file_of_their_own(tmp_path: Path) -> None:
    held_out = str(tree(tmp_path / "held-out", "cat", "dog", count=2))
    config = options(tree(tmp_path / "images", "cat", "dog"), tmp_path / "runs", validation_data=held_out)
    store, data = trained(config)
    ranked = check_can_rank(config, rank_labels(config, store, data))
    files = write_labels(ranked, data, f"{tmp_path}/labels.csv", config)
    assert files == {"--labels": f"{tmp_path}/labels.csv", "--validation-labels": f"{tmp_path}/labels-validation.csv"}
    more = {"labels": files["--labels"], "validation_labels": files["--validation-labels"]}
    again = open_dataset(options(tmp_path / "images", tmp_path / "others", validation_data=held_out, **more))
    assert (len(again.train), len(again.validation)) == (12, 4)


def test_why_labels_are_not_ranked_is_said(tmp_path: Path) -> None:
    config = options(tree(tmp_path / "images", "cat", "dog"), tmp_path / "runs")
    store, data = trained(config)
    mixed = TrainConfig(**{**vars(config), "mixup": 0.2})
    with pytest.raises(UsageError, match="of run 'run' are not ranked: --mixup mixes the images, and a mixed one"):
        check_can_rank(mixed, rank_labels(mixed, store, data))
    with pytest.raises(UsageError, match="not ranked: it has no checkpoint yet, or its loop gives logits neither"):
        check_can_rank(config, None)
    with pytest.raises(UsageError, match="--write-labels takes the labels of a run: give its --name, and --resume"):
        check_can_rank(TrainConfig(**{**vars(config), "resume": False}), None)


@pytest.mark.not_quick
def test_the_label_file_of_a_run_with_a_pattern_is_given_back_in_place_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pattern = r"(?P<label>\w+)/"
    config = options(tree(tmp_path / "images", "cat", "dog"), tmp_path / "runs", label_pattern=pattern)
    write_config(trained(config)[0], config)
    words = ["look", "--resume", "--name", "run", "--storage", f"{tmp_path}/runs", "--limit-s", "1"]
    assert main([*words, "--write-labels", f"{tmp_path}/labels.csv"]) == 0
    given_back = f"--labels {tmp_path}/labels.csv"
    printed = "".join(capsys.readouterr().out.split())  # a long path is printed over two lines
    assert f"train again with --label-pattern none {given_back}".replace(" ", "") in printed
    assert main(["look", "--config", f"{tmp_path}/runs/run/config.json", *given_back.split()]) == 2
    assert "give one of them (--label-pattern none omits one that" in capsys.readouterr().err
