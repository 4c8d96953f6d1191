"""A look at a data set: what is counted and found, and that the images are those that a network gets."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

import raytrain
from raytrain.cli.main import main
from raytrain.data.blocks import string_array
from raytrain.data.dataset import Dataset, open_dataset
from raytrain.data.duplicates import StoredImages, find_duplicates
from raytrain.data.labels.manifest import Manifest
from raytrain.diagnostics.look import FirstImages, look_at
from raytrain.display.look import look_figure, look_html
from raytrain.errors import UsageError
from raytrain.recipes import auto
from raytrain.runs.documents import run_store
from raytrain.storage.folder import FolderStore
from raytrain.storage.open import open_store
from raytrain.training.metrics.gallery import screen_pixels
from tests.helpers.folder_runs import folder_run, train_here
from tests.helpers.small_runs import CLASSES, config, make_images, put_images

pytestmark = pytest.mark.not_quick

COMMAND = """
import sys
from raytrain.cli.main import main
code = main(["look", "custom", *sys.argv[1:], "--json"])
assert not {"ray", "pandas"} & sys.modules.keys()
sys.exit(code)
"""


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """30 training images, of which a copy is in another class and one is broken; 9 others, two of them copies."""
    train, test = tmp_path / "train", tmp_path / "test"
    for folder in (train, test):
        folder.mkdir()
    make_images(train, 30)
    (train / "red" / "copy.png").write_bytes((train / "blue" / "003.png").read_bytes())
    (train / "red" / "000.png").write_bytes(b"\x89PNG\r\n\x1a\n no image")
    Image.new("L", (40, 20)).save(train / "red" / "large.jpg")
    make_images(test, 9)
    for file in test.rglob("*.png"):
        Image.effect_noise((12, 12), 50).convert("RGB").save(file)
    for name in ("blue", "green"):
        (test / name / "002.png").write_bytes((train / name / "002.png").read_bytes())
    return tmp_path


def options(images: Path, **more: Any) -> raytrain.TrainConfig:
    return config(images / "train", images / "runs", test_data=str(images / "test"), **more)


def test_classes_files_and_problems_are_told(images: Path) -> None:
    result = look_at(options(images))
    assert [(each.name, each.training, each.validation) for each in result.classes] == [
        ("blue", 10, 3),
        ("green", 10, 3),
        ("red", 12, 3),
    ]
    assert result.sample.images == 41 and result.sample.formats == {"PNG": 39, "JPEG": 1}
    assert result.sample.width == (12, 12, 40) and result.sample.height == (12, 12, 20)
    assert [image.key for image in result.sample.unreadable] == ["red/000.png"]
    assert result.duplicates.compared == result.duplicates.images == 41
    assert [(each.key, each.training_key) for each in result.duplicates.held_out] == [
        ("blue/002.png", "blue/002.png"),
        ("green/002.png", "green/002.png"),
    ]
    assert [dataclasses.astuple(each) for each in result.duplicates.contradicting] == [
        ("red/copy.png", "red", "blue/003.png", "blue")
    ]
    assert json.dumps(result.summary())


def test_a_bucket_is_looked_at_as_a_folder_is(
    images: Path, s3_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train", "test"):
        put_images(images / name, open_store(f"{s3_url}/{name}"))
    here = look_at(options(images)).summary()
    there = look_at(config(f"{s3_url}/train", images / "runs", test_data=f"{s3_url}/test"))
    assert {**there.summary(), "data": here["data"], "validation_data": here["validation_data"]} == here
    assert (there.data, there.validation_data) == (f"{s3_url}/train", f"{s3_url}/test")
    assert len(there.first_images.labels) == 20 and there.first_images.pixels.std() > 10
    monkeypatch.chdir(images)
    given = f"--data {s3_url}/train --test-data {s3_url}/test --batch-size 8 --learning-rate 1 --image-size 12 12"
    assert main(["look", "custom", *given.split(), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["training_images"] == len(there.summary()["classes"]) * 10 + 2
    assert (images / "runs" / "custom-look.png").is_file()  # and nothing in the current folder
    assert not list(images.glob("*.png"))


def test_without_time_a_part_is_looked_at_and_that_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    make_images(folder, 300)
    result = look_at(config(folder, tmp_path), limit_s=0)
    assert result.sample.images == 64 + 30  # of 270 training images and of 30 validation images
    assert 64 <= result.duplicates.compared < result.duplicates.images == 300


class Counted(FolderStore):
    """Counts what is read."""

    num_read = 0

    def get(self, path: str, etag: str = "") -> bytes:
        Counted.num_read += 1
        return super().get(path)


def hashed(data: Dataset, manifest: Manifest, wrong: str = "") -> Manifest:
    """The manifest with the MD5 of each file as its entity tag, as in S3; with ``wrong``, that many others instead."""
    contents = [data.train_store.get(key) for key in manifest.keys.to_pylist()]
    etags = [f'"{wrong or hashlib.md5(content).hexdigest()}"' for content in contents]
    return dataclasses.replace(manifest, etags=string_array(etags))


@pytest.mark.parametrize("wrong", ["", "0" * 32])
def test_entity_tags_are_believed_if_they_are_the_hashes_of_a_few_files(tmp_path: Path, wrong: str) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    make_images(folder, 90)
    (folder / "red" / "copy.png").write_bytes((folder / "blue" / "003.png").read_bytes())
    data = open_dataset(config(folder, tmp_path), run_store(str(tmp_path), "none"))
    train, test = (hashed(data, manifest, wrong) for manifest in (data.train, data.validation))
    store = Counted(str(folder))
    images = StoredImages(store, train), StoredImages(store, test)
    Counted.num_read = 0
    found = find_duplicates(images, time.monotonic() + 60)
    assert found.compared == found.images == 91
    assert len(found.held_out) + len(found.contradicting) == 1
    assert (Counted.num_read == 16) is (not wrong)  # eight training images, and eight validation images


@pytest.mark.parametrize("mixing", [{}, {"cutmix": 1.0}])
def test_the_images_are_those_of_the_first_batch(tmp_path: Path, mixing: dict[str, float]) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    make_images(folder)
    seen: list[raytrain.Batch] = []

    def loop(run: raytrain.Run) -> None:
        model = run.prepare(run.build_model())
        run.prepare(run.build_optimizer(model))
        for epoch in run.epochs():
            for batch in epoch:
                seen.append(batch)
                return

    options: dict[str, Any] = {"batch_size": 60, "color_jitter": 0.3, **mixing}
    run = folder_run(folder, tmp_path, "run", loop=loop, **options)
    train_here(run)
    result = look_at(run.config)
    assert len(result.first_images.labels) == 40
    resolved = run.config.resolve(name="run", num_workers=1, device="cpu", mean=(0.4,) * 3, std=(0.2,) * 3)
    assert (result.first_images.pixels == screen_pixels(seen[0].images[:40], resolved, 256)).all()
    likeliest = [label.split(" ")[1].strip(",") if "%" in label else label for label in result.first_images.labels]
    assert likeliest == [CLASSES[label] for label in seen[0].labels[:40].tolist()]
    assert any("%" in label for label in result.first_images.labels) is bool(mixing)


@pytest.mark.parametrize(("side", "input_side"), [(12, 32), (100, 96)])
def test_the_recipe_auto_shows_the_images_as_its_choice_would_train_them(
    tmp_path: Path, side: int, input_side: int
) -> None:
    for name in ("blue", "red"):
        (folder := tmp_path / "images" / name).mkdir(parents=True)
        for number in range(10):
            Image.effect_noise((side, side), 50 + number).convert("RGB").save(folder / f"{number}.png")
    # Large images are trained on from the library's weights, which a look does not download.
    result = look_at(auto(data=str(tmp_path / "images"), storage=str(tmp_path / "runs")))
    assert result.first_images.pixels.shape[1:] == (input_side, input_side, 3)


def test_what_cannot_be_looked_at_is_refused_before_images_are_listed(tmp_path: Path) -> None:
    nowhere = config(tmp_path / "nowhere", tmp_path)
    with pytest.raises(UsageError, match="--limit-s is -1; it must be at least 0"):
        look_at(nowhere, limit_s=-1)
    with pytest.raises(UsageError, match="--write-labels takes the labels of a run"):
        look_at(nowhere, write_labels="labels.csv")


def test_the_command_writes_the_picture_without_ray(images: Path) -> None:
    picture = images / "look.png"
    words = ["--data", f"{images}/train", "--image-size", "12", "12", "--output", str(picture)]
    words += ["--learning-rate", "1", "--batch-size", "8", "--storage", f"{images}/runs"]
    ended = subprocess.run([sys.executable, "-c", COMMAND, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["picture"] == str(picture) and document["training_images"] == 29
    with Image.open(picture) as opened:
        assert np.asarray(opened.convert("RGB")).std() > 10
    assert not (images / "runs").exists()


def test_where_no_picture_can_be_written_the_tables_are_shown_all_the_same(
    images: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (images / "file").write_text("in the place of a folder")
    words = ["--data", f"{images}/train", "--image-size", "12", "12", "--storage", f"{images}/file/runs"]
    assert main(["look", "custom", *words]) == 0
    assert "training images" in capsys.readouterr().out
    assert "no picture of the images (--output names another place)" in caplog.text


def test_a_notebook_gets_the_picture_and_the_tables(images: Path) -> None:
    html = look_html(look_at(options(images)))
    assert html.startswith('<img src="data:image/png;base64,iVBOR') and "red/copy.png" in html


def test_long_class_names_do_not_overlap_in_the_figure() -> None:
    names = ("a_very_long_class_name_of_a_plant",) * 8
    images = FirstImages(np.zeros((8, 4, 4, 3), np.uint8), names)
    figure = look_figure(cast(Any, SimpleNamespace(title="auto", first_images=images, suspicious=None)))
    figure.draw_without_rendering()
    extents = [cell.title.get_window_extent() for cell in figure.axes]
    assert extents[0].x0 >= 0
    assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(extents))
