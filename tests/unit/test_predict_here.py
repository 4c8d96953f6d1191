"""Evaluation and prediction on one machine without a cluster: no Ray, the order of the images, and bad images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import raytrain
from raytrain.data.images.crop_box import STRETCHED
from raytrain.data.images.decode import ImageFormat, ImageShape, Pixels
from raytrain.data.labels.manifest import list_images
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.launch.placement import Hardware, place
from raytrain.launch.predict_request import PredictRequest, predict_here
from raytrain.recipes import custom
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.training.model import build_model
from tests.hostile.stored_runs import ANIMALS, add_checkpoint, make_run, options
from tests.unit.test_decode import encoded

pytestmark = pytest.mark.not_quick

DECODER = Path(__file__).parents[1] / "helpers" / "deadly_decoder"
WITHOUT_RAY = """
import json, sys
import raytrain
result = raytrain.evaluate("first", sys.argv[1], storage=sys.argv[2])
raytrain.predict("first", sys.argv[1], sys.argv[2] + "/out.parquet", storage=sys.argv[2], workers=2)
assert not {"ray", "pandas", "torchvision"} & sys.modules.keys()
print(json.dumps(result.summary()))
"""


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A storage folder with the run ``first``, whose network has random weights."""
    config = options()
    add_checkpoint(make_run(tmp_path / "runs", config), build_model(config.model, len(ANIMALS), 1, 0), config)
    return tmp_path / "runs"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Grey noise, eight images for each class."""
    random = np.random.default_rng(0)
    for name in ANIMALS:
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(8):
            pixels = random.integers(0, 256, (20, 12), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    return tmp_path / "images"


def test_one_machine_evaluates_and_predicts_without_ray(trained: Path, images: Path) -> None:
    (images / "cat" / "words.png").write_bytes(b"this is no image")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, str(images), str(trained)],
        env={**environment, "RAY_TMPDIR": str(trained)},  # hides a cluster that others started on this machine
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    files = sorted(path for path in images.rglob("*.png") if path.name != "words.png")
    answers = raytrain.load("first", storage=str(trained)).classify(files)
    right = sum(label == file.parent.name for file, (label, _) in zip(files, answers, strict=True))
    assert (measured["images"], measured["skipped"]) == (24, 1)
    assert measured["accuracy"] == pytest.approx(right / 24)
    table: pa.Table = pq.read_table(trained / "out.parquet")
    rows = [row for row in table.to_pylist() if row["error"] is None]
    assert [row["key"] for row in rows] == [str(file.relative_to(images)) for file in files]
    assert [row["label"] for row in rows] == [label for label, _ in answers]
    assert [row["score"] for row in rows] == pytest.approx([score for _, score in answers], abs=1e-5)


def test_an_image_that_kills_its_decoder_is_an_error_of_that_image(
    trained: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DECODER)
    monkeypatch.setattr("raytrain.inference.trained_run.uses_cluster", lambda address: False)
    (images / "dog" / "bad.jpg").write_bytes(encoded(Image.new("RGB", (12, 12)), "JPEG", comment=b"deadly:segfault"))
    output = tmp_path / "out.csv"
    result = raytrain.predict("first", str(images), str(output), storage=str(trained))
    assert (result.images, result.errors) == (25, 1)
    (line,) = (line for line in output.read_text().splitlines() if "bad.jpg" in line)
    assert line == '"dog/bad.jpg",,,"decoding it ends the process (SIGSEGV)"'


def test_more_workers_than_four_a_core_are_refused(
    trained: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raytrain.inference.trained_run.uses_cluster", lambda address: False)
    with pytest.raises(UsageError, match="--workers is 10000"):
        raytrain.evaluate("first", str(images), storage=str(trained), workers=10_000)


class Brightness:
    """A predictor that tells the mean of each image, and which worker it belongs to."""

    def __init__(self, store: Store, num_threads: int, gpu: int) -> None:
        self._worker = gpu

    def __call__(self, images: Pixels, labels: Int64s) -> pa.Table:
        if images.max() == 255:
            raise UsageError("Too bright.")
        return pa.table({"mean": images.mean(axis=(1, 2, 3)), "worker": np.full(len(images), self._worker)})


def brightness(folder: Path, workers: int) -> pa.Table:
    """What :class:`Brightness` says of all images in ``folder``, in blocks of 42."""
    store = open_store(str(folder))
    format = ImageFormat(ImageShape(512, 512, 3), STRETCHED)
    request = PredictRequest(store, list_images(store), format, store, Brightness)
    placement = place(custom(workers=workers, device="cpu"), Hardware(1, 2.0, 0.0, 0))
    return pa.concat_tables(predict_here(request, placement))


@pytest.fixture
def grey_images(tmp_path: Path) -> Path:
    folder = tmp_path / "grey"
    folder.mkdir()
    for grey in range(250):
        Image.new("L", (4, 4), grey).save(folder / f"{grey:03d}.png")
    return folder


@pytest.mark.parametrize("workers", [1, 3])
def test_the_images_keep_their_order_whoever_predicts_them(grey_images: Path, workers: int) -> None:
    table = brightness(grey_images, workers)
    assert table["key"].to_pylist() == [f"{grey:03d}.png" for grey in range(250)]
    assert table["mean"].to_pylist() == list(range(250))
    assert table["worker"].to_pylist() == [row // 42 % workers for row in range(250)]


def test_an_error_of_the_network_is_the_users(grey_images: Path) -> None:
    Image.new("L", (4, 4), 255).save(grey_images / "255.png")
    with pytest.raises(UsageError, match="Too bright"):
        brightness(grey_images, 2)
