"""Evaluation and prediction on one machine without a cluster: no Ray, the order of the images, and bad images."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import raytrain
from raytrain.cli.main import main
from raytrain.data.dataset import write_manifests
from raytrain.data.images.crop_box import STRETCHED, Pixels
from raytrain.data.images.image_format import ImageFormat, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.data.labels.manifest import list_images
from raytrain.data.plan.permutation import Int64s
from raytrain.demo.s3_server import S3Server
from raytrain.errors import RaytrainError, StorageError, UsageError
from raytrain.inference.embeddings import NetworkWithEmbeddings
from raytrain.inference.evaluate import EvaluationResult
from raytrain.launch.placement import Hardware, place
from raytrain.launch.predict_blocks import PredictRequest, predict_here
from raytrain.launch.ray.find_cluster import ray_start_address
from raytrain.launch.ray.private_api import CURRENT_CLUSTER_FILE
from raytrain.recipes import custom
from raytrain.runs.documents import run_store, write_config
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.training.networks.model import build_model
from tests.helpers.image_files import encoded
from tests.helpers.stored_histories import store_run
from tests.helpers.stored_runs import ANIMALS, add_checkpoint, make_run, options

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


@pytest.mark.parametrize("views", [(), ("flip", "shift")])
def test_embeddings_are_what_the_head_gets(
    trained: Path, images: Path, views: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (images / "cat" / "words.png").write_bytes(b"this is no image")
    output = trained / "rows.parquet"
    given: dict[str, Any] = {"storage": trained, "embeddings": True, "test_views": views}
    raytrain.predict("first", images, output, **given)
    table = pq.read_table(output)
    assert table.column_names == ["key", "label", "score", "embedding", "error"]
    model = raytrain.load("first", storage=trained)
    head = [layer for layer in model.network.modules() if isinstance(layer, torch.nn.Linear)][-1]
    # Lists of a fixed length, of which some are null, cannot be read by older versions of pyarrow.
    assert table["embedding"].type == pa.large_list(pa.float32())

    # Through the head, they give the scores; an image that cannot be read has none.
    is_bad = np.array([key == "cat/words.png" for key in table["key"].to_pylist()])
    assert [embedding is None for embedding in table["embedding"].to_pylist()] == is_bad.tolist()
    good = table.filter(pa.array(~is_bad))
    embeddings = np.stack(good["embedding"].to_numpy())
    assert (embeddings.shape, embeddings.dtype) == ((24, head.in_features), np.float32)
    scores = head(torch.from_numpy(embeddings)).softmax(dim=1).amax(dim=1)
    assert scores.tolist() == pytest.approx(good["score"].to_pylist(), abs=1e-5)


@pytest.mark.parametrize(
    ("model", "num_classes", "size"), [("squeezenet1_1", 3, 512), ("timm:vit_tiny_patch16_224", 3, 192)]
)
def test_embeddings_of_other_heads_have_a_number_for_each_channel(model: str, num_classes: int, size: int) -> None:
    network = build_model(model, num_classes, 3, 0, (32, 32)).eval()
    images = torch.randn(2, 3, 32, 32)
    logits, embeddings = NetworkWithEmbeddings(network, num_classes)(images).split([num_classes, size], dim=1)
    assert torch.equal(logits, network(images)) and embeddings.shape == (2, size)


def test_embeddings_that_cannot_be_written_or_found_are_refused(
    trained: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=r"--output rows\.csv holds none; write \.parquet"):
        raytrain.predict("first", images, "rows.csv", storage=trained, embeddings=True)
    assert main(["predict", "first", "--data", str(images), "--storage", str(trained), "--embeddings"]) == 2
    assert "give --output, a .parquet file" in capsys.readouterr().err
    with pytest.raises(UsageError, match="the network has no fully connected layer"):
        NetworkWithEmbeddings(torch.nn.Flatten(), 3)


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


def test_no_networks_at_all_are_refused(trained: Path, images: Path) -> None:
    with pytest.raises(UsageError, match="--workers is 0; it must be at least 1"):
        raytrain.evaluate("first", str(images), storage=str(trained), workers=0)


def test_a_run_that_looked_for_a_rate_says_that_it_keeps_no_checkpoint(tmp_path: Path) -> None:
    store_run(tmp_path, "rates", [], status="finished", schedule="rising")
    with pytest.raises(UsageError, match="'rates' has looked for a learning rate, and such a run keeps no checkpoint"):
        raytrain.load("rates", storage=str(tmp_path))


def test_a_run_that_is_over_and_has_no_checkpoint_does_not_advise_to_wait(tmp_path: Path) -> None:
    store_run(tmp_path, "first", [], status="finished")
    with pytest.raises(UsageError, match=r"'first' has no checkpoint: .* if it is over, .* --resume trains it"):
        raytrain.load("first", storage=str(tmp_path))


def test_an_image_that_kills_its_decoder_is_an_error_of_that_image(
    trained: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DECODER)
    (images / "dog" / "bad.jpg").write_bytes(encoded(Image.new("RGB", (12, 12)), "JPEG", comment=b"deadly:segfault"))
    output = tmp_path / "out.csv"
    result = raytrain.predict("first", str(images), str(output), storage=str(trained))
    assert (result.images, result.errors) == (25, 1)
    (line,) = (line for line in output.read_text().splitlines() if "bad.jpg" in line)
    assert line == '"dog/bad.jpg",,,"decoding it ends the process (SIGSEGV)"'


@pytest.mark.parametrize(
    "words", ["evaluate first --data", "predict first --output out.csv --data", "predict first --data"]
)
def test_a_command_that_can_read_no_image_is_refused(
    trained: Path, images: Path, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(images.parent)
    for file in sorted(images.glob("*/*.png")):
        if file.name != "0.png":
            file.write_bytes(b"this is no image")
    assert main([*words.split(), str(images), "--storage", str(trained)]) == 0, "some can be read"
    capsys.readouterr()
    for file in images.glob("*/0.png"):
        file.write_bytes(b"this is no image")
    assert main([*words.split(), str(images), "--storage", str(trained)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()[-1:]
    assert f"None of 24 images of {images} can be decoded" in sentence and sentence.endswith("; check the files.")
    assert ("out.csv" in words) == Path("out.csv").exists(), "where the reasons are"


def test_files_that_are_named_are_predicted_without_writing_any(
    trained: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [*sorted(images.glob("cat/*.png"))[:2], *sorted(images.glob("dog/*.png"))[:1]]
    result = raytrain.predict("first", [str(file) for file in files], storage=str(trained))
    rows = result.summary()["rows"]
    assert [row["key"] for row in rows] == [f"{file.parent.name}/{file.name}" for file in files]
    answers = raytrain.load("first", storage=str(trained)).classify(files)
    assert [row["label"] for row in rows] == [label for label, _ in answers]
    monkeypatch.chdir(images / "cat")
    one = raytrain.predict("first", files[0].name, storage=str(trained))
    assert one.summary()["rows"] == [{**rows[0], "key": files[0].name}]
    with pytest.raises(UsageError, match=r"There is no file .*cat/none\.png; check the path"):
        raytrain.predict("first", "none.png", storage=str(trained))
    with pytest.raises(UsageError, match=r"dog is a folder, .* give it alone, as --data /.*dog\."):
        raytrain.predict("first", [str(files[0]), str(images / "dog")], storage=str(trained))
    for others in ("s3://one/a.png", "s3://two/a.png"), (str(files[0]), "s3://one/a.png"):
        with pytest.raises(UsageError, match="not all in one bucket"):
            raytrain.predict("first", others, storage=str(trained))
    (images / "cat").rename(images / "cat.png")
    assert raytrain.predict("first", str(images / "cat.png"), storage=str(trained)).images > 2, "a folder of that name"


def test_rows_that_cannot_be_written_at_the_end_are_kept_elsewhere(
    trained: Path, images: Path, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(StorageError, match=r"no-such-bucket.*; the rows are in (.*), copy them from there") as raised:
        raytrain.predict("first", str(images), "s3://no-such-bucket/rows.csv", storage=str(trained))
    (kept,) = (tmp_path / "tmp").iterdir()
    assert str(kept) in str(raised.value)
    assert len(kept.read_text().splitlines()) == 1 + 24


def test_what_needs_no_cluster_joins_none_that_nobody_has_named(
    trained: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo = str(images / "cat" / "0.png")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as head:
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / CURRENT_CLUSTER_FILE).write_text(f"127.0.0.1:{head.getsockname()[1]}")
        assert ray_start_address() is not None, "one runs on this machine"
        assert raytrain.predict("first", photo, storage=str(trained)).images == 1
        assert raytrain.evaluate("first", str(images), storage=str(trained)).images == 24
    with pytest.raises(UsageError, match=r"No Ray cluster answers at 127\.0\.0\.1:9 "):
        raytrain.predict("first", photo, storage=str(trained), address="127.0.0.1:9")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(UsageError, match=r"No Ray cluster answers at 127\.0\.0\.1:9 "):
        raytrain.evaluate("first", str(images), storage=str(trained))


def test_other_files_of_the_folder_are_counted(trained: Path, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (images / "cat" / "scan.tif").write_bytes(b"II*")
    result = raytrain.predict("first", str(images), storage=str(trained))
    assert (result.images, result.left_out) == (24, "1 .tif file (not read; convert it to PNG or JPEG)")


def test_more_workers_than_four_a_core_are_refused(
    trained: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="--workers is 10000"):
        raytrain.evaluate("first", str(images), storage=str(trained), workers=10_000)


@pytest.fixture
def split(trained: Path, images: Path) -> Path:
    """The run ``first`` was trained on the cats and dogs and tested on the foxes."""
    config = options(data=str(images))
    write_config(
        run_store(str(trained), "first"),
        config.resolve(name="first", num_workers=1, device="cpu", mean=(0.2,), std=(0.3,)),
    )
    manifest = build_manifest(open_store(str(images)))
    is_fox = manifest.labels == ANIMALS.index("fox")
    train, test = (manifest.select(np.flatnonzero(chosen)) for chosen in (~is_fox, is_fox))
    write_manifests(run_store(str(trained), "first"), train, test)
    return trained


def test_without_data_a_runs_own_test_images_are_measured(split: Path, images: Path) -> None:
    result = raytrain.evaluate("first", storage=str(split))
    assert isinstance(result, EvaluationResult)
    assert [score.images for score in result.per_class] == [0, 0, 8] and result.trained_on is None
    foxes = result.per_class[2]
    assert result.macro_f1 == pytest.approx(2 * foxes.right / (8 + foxes.right))  # of the only class that has images
    with pytest.raises(UsageError, match="--labels is for other images"):
        raytrain.evaluate("first", labels="labels.csv", storage=str(split))
    shutil.rmtree(images)
    with pytest.raises(StorageError, match=f"There is no folder {images}"):
        raytrain.evaluate("first", storage=str(split))


def test_an_evaluation_tells_how_many_images_were_trained_on(split: Path, images: Path, tmp_path: Path) -> None:
    here = raytrain.evaluate("first", str(images), storage=str(split))
    assert (here.trained_on, here.all_compared) == (16, True)
    shutil.copytree(images, tmp_path / "copy")
    (tmp_path / "copy" / "cat" / "0.png").rename(tmp_path / "copy" / "cat" / "renamed.png")
    Image.new("L", (12, 20)).save(tmp_path / "copy" / "dog" / "0.png")
    elsewhere = raytrain.evaluate("first", str(tmp_path / "copy"), storage=str(split))
    assert (elsewhere.trained_on, elsewhere.all_compared) == (15, True)
    shutil.rmtree(images)
    gone = raytrain.evaluate("first", str(tmp_path / "copy"), storage=str(split))
    assert (gone.trained_on, gone.all_compared) == (0, False)


def test_one_image_is_classified_whatever_it_is(trained: Path, images: Path) -> None:
    model = raytrain.load("first", storage=str(trained))
    file = images / "cat" / "3.png"
    pixels = np.asarray(Image.open(file))
    expected = model.classify([file])[0]
    tensor = torch.from_numpy(pixels.copy())
    for image in (
        file,
        str(file),
        file.read_bytes(),
        bytearray(file.read_bytes()),
        Image.open(file),
        pixels,
        pixels[..., None],
        pixels / 255,
    ):
        assert model.classify(image) == expected
    for image in (io.BytesIO(file.read_bytes()), file.open("rb"), Image.fromarray((pixels / 255).astype(np.float32))):
        assert model.classify(image) == expected
    assert model.classify((tensor / 255).bfloat16().float()) == model.classify((tensor / 255).bfloat16())
    for image in (tensor, tensor[None], tensor[..., None].repeat(1, 1, 3), (tensor / 255)[None]):
        assert model.classify(image) == expected
    for several in ([file, pixels, tensor], np.stack([pixels] * 3)[..., None]):
        labels, scores = zip(*model.classify(several), strict=True)
        assert labels == (expected[0],) * 3 and scores == pytest.approx([expected[1]] * 3)
    everything = model.classify_all(file)
    assert next(iter(everything.items())) == expected and set(everything) == set(ANIMALS)
    assert model.classify([]) == []


def test_any_number_of_images_is_classified_a_few_at_a_time(trained: Path, images: Path) -> None:
    model = raytrain.load("first", storage=str(trained))
    seen: list[int] = []
    model.network.register_forward_pre_hook(lambda network, inputs: seen.append(len(inputs[0])))
    answers = model.classify(images / "cat" / f"{number % 8}.png" for number in range(150))
    assert seen == [64, 64, 22]
    assert [label for label, _ in answers] == [label for label, _ in answers[:8]] * 18 + [
        label for label, _ in answers[:6]
    ]


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (7, "An image is of type int; give a path"),
        ([None], "An image is of type NoneType"),
        (
            np.zeros((20, 12), np.float32) + 200,
            r"array of float32 of shape \(20, 12\); give uint8, or",
        ),
        (np.zeros((20, 12, 5), np.uint8), r"shape \(20, 12, 5\)"),
        (b"\0 is no image", "An image cannot be used: the file is not an image"),
        (b"no image", "An image cannot be used: the file is text"),
        ("nowhere.png", "There is no file nowhere.png"),
    ],
)
def test_what_is_no_image_gets_a_sentence(trained: Path, image: Any, sentence: str) -> None:
    with pytest.raises(RaytrainError, match=sentence):
        raytrain.load("first", storage=str(trained)).classify(image)


def test_a_damaged_image_of_pillow_and_a_file_of_text_get_a_sentence(trained: Path, images: Path) -> None:
    model, file = raytrain.load("first", storage=str(trained)), images / "cat" / "3.png"
    cut_off = Image.open(io.BytesIO(file.read_bytes()[:-30]))
    with pytest.raises(UsageError, match="An image of Pillow cannot be used: "):
        model.classify(cut_off)
    with file.open() as text, pytest.raises(UsageError, match="opened as text; open it as bytes"):
        model.classify(text)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize(
    "images",
    [
        *(torch.rand(2, 20, 12, 1), torch.zeros(2, 1, 20, 12, dtype=torch.uint8)),
        *(torch.zeros(20, 12, 1, dtype=torch.uint8), "photo.jpg"),
    ],
)
def test_a_network_that_gets_other_images_than_decoded_ones_says_so(trained: Path, images: Any) -> None:
    model = raytrain.load("first", storage=str(trained))
    with pytest.raises(UsageError, match=r"give decoded images, uint8 \(number, height, width, 1\), or any images to"):
        model(images)


def test_folders_and_files_may_be_paths(trained: Path, images: Path, tmp_path: Path) -> None:
    files = sorted((images / "cat").iterdir())
    expected = raytrain.predict("first", [str(file) for file in files], storage=str(trained)).table
    output = tmp_path / "rows.parquet"
    assert raytrain.predict("first", files, output, storage=trained).table == expected
    assert output.exists() and raytrain.predict("first", files[0], storage=trained).table.num_rows == 1
    measured = raytrain.evaluate("first", images, storage=trained)
    assert measured.summary() == raytrain.evaluate("first", str(images), storage=str(trained)).summary()
    assert raytrain.export("first", tmp_path / "net.safetensors", storage=trained).size_bytes > 0
    assert raytrain.load("first", storage=trained).classes == tuple(ANIMALS)


def test_views_that_do_not_exist_are_refused(trained: Path, images: Path) -> None:
    with pytest.raises(UsageError, match="--test-views is"):
        raytrain.predict("first", str(images), storage=str(trained), test_views=("mirror",))  # pyright: ignore
    mirrored = raytrain.predict("first", str(images), storage=str(trained), test_views=("flip",)).table
    assert raytrain.predict("first", str(images), storage=str(trained), test_views="flip").table == mirrored  # pyright: ignore
    assert mirrored != raytrain.predict("first", str(images), storage=str(trained)).table


def test_a_run_that_is_named_by_its_folder_is_told_how_it_is_named(trained: Path) -> None:
    with pytest.raises(UsageError, match=rf"\(a run in {trained} is named first, with --storage {trained}\)"):
        raytrain.load(f"{trained}/first")


class Brightness:
    """A predictor that tells the mean of each image, and which worker it belongs to."""

    def __init__(self, store: Store, num_threads: int, gpu: int) -> None:
        self._worker = gpu

    def __call__(self, images: Pixels, labels: Int64s) -> pa.Table:
        if images.max() == 255:
            raise UsageError("Too bright.")
        return pa.table({"mean": images.mean(axis=(1, 2, 3)), "worker": np.full(len(images), self._worker)})


def brightness(folder: Path, workers: int) -> pa.Table:
    """What :class:`Brightness` says of all images in ``folder``, in blocks of 85, or of 64 MiB."""
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
    assert table["worker"].to_pylist() == [row // 85 % workers for row in range(250)]


def test_an_error_of_the_network_is_the_users(grey_images: Path) -> None:
    Image.new("L", (4, 4), 255).save(grey_images / "255.png")
    with pytest.raises(UsageError, match="Too bright"):
        brightness(grey_images, 2)
