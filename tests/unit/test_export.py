"""An exported file returns the same as the run's network, without raytrain, for any number of images."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import safetensors.torch
import torch
from PIL import Image

import raytrain
from raytrain.config import TrainConfig
from raytrain.config.evaluation import TestView
from raytrain.data.images.decode import decode
from raytrain.errors import RaytrainError, UsageError
from raytrain.inference.model_card import network_lines
from raytrain.recipes import cifar10, custom, digits
from raytrain.runs.documents import CLASSES, METRICS, encode_lines, run_store, write_config
from raytrain.runs.outcome import Progress
from raytrain.runs.provenance import Provenance, record_provenance
from raytrain.runs.stored_checkpoints import Identity
from raytrain.storage.open import open_store
from raytrain.training.checkpoint import Checkpoints
from raytrain.training.networks.model import build_model
from raytrain.training.networks.transfer import initial_model, initial_weights

pytestmark = pytest.mark.not_quick

ANIMALS = ("cat", "dog", "fox")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def make_run(storage: str, config: TrainConfig, classes: tuple[str, ...] = ANIMALS) -> None:
    """A run called ``run`` with a checkpoint whose batch norm has statistics."""
    store = run_store(storage, "run")
    resolved = config.resolve(name="run", num_workers=1, device="cpu", mean=config.mean or (), std=config.std or ())
    write_config(store, resolved)
    store.put(CLASSES, json.dumps(classes).encode())
    size = resolved.full_image_size
    model = build_model(config.model, len(classes), config.channels, config.seed, size, config.model_options)
    model(torch.randn(16, config.channels, *resolved.full_image_size))
    checkpoints = Checkpoints(store, Identity(config.model, classes, "digest-of-data", 8, 0), keep=1)
    progress = Progress(step=1, evaluated_step=1, validation_accuracy=0.75, validation_loss=0.5)
    checkpoints.save({"model": model.state_dict()}, progress)
    checkpoints.close()


def small(**options: Any) -> TrainConfig:
    return digits(mean=(0.2,), std=(0.3,), image_size=(20, 12), **options)


def run_pt2(content: bytes, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    module: Any = torch.export.load(io.BytesIO(content)).module()
    return module(torch.from_numpy(images)).detach().numpy()


def run_onnx(content: bytes, images: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    (logits,) = onnxruntime.InferenceSession(content).run(None, {"images": images})
    return np.asarray(logits)


def classes_of_pt2(content: bytes) -> list[str]:
    extra = {"classes.json": ""}
    torch.export.load(io.BytesIO(content), extra_files=extra)
    return json.loads(extra["classes.json"])


def classes_of_onnx(content: bytes) -> list[str]:
    return json.loads(onnxruntime.InferenceSession(content).get_modelmeta().custom_metadata_map["classes"])


@pytest.mark.parametrize(
    ("suffix", "answer", "classes"), [("pt2", run_pt2, classes_of_pt2), ("onnx", run_onnx, classes_of_onnx)]
)
def test_the_exported_file_predicts_the_same_as_the_run_and_contains_the_classes(
    suffix: str, answer: Callable[..., Any], classes: Callable[[bytes], list[str]], tmp_path: Path
) -> None:
    make_run(str(tmp_path), small())
    file = tmp_path / f"model.{suffix}"
    result = raytrain.export("run", str(file), storage=str(tmp_path))
    classifier = raytrain.load("run", storage=str(tmp_path))
    for num_images in (1, 2, 7):
        images = np.random.default_rng(1).integers(0, 256, (num_images, 20, 12, 1), np.uint8)
        with torch.no_grad():
            expected = classifier(torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(answer(file.read_bytes(), images), expected, atol=1e-4)
    assert result.input.startswith("uint8 (batch, 20, 12, 1)")
    assert (result.size_bytes, result.classes) == (file.stat().st_size, ANIMALS)
    assert (result.images, result.same_answers) == (64, 64)
    assert result.largest_difference < 1e-4
    assert classes(file.read_bytes()) == list(ANIMALS)


TRACED = ["pt2", pytest.param("onnx", marks=pytest.mark.slow)]  # every file for ONNX is traced as one for PyTorch is


@pytest.mark.parametrize("suffix", TRACED)
def test_an_export_can_be_checked_on_real_images(suffix: str, cifar10_folder: Path, tmp_path: Path) -> None:
    make_run(str(tmp_path), cifar10(mean=(0.5, 0.5, 0.4), std=(0.2, 0.2, 0.3)), CIFAR10)
    result = raytrain.export(
        "run", str(tmp_path / f"m.{suffix}"), data=str(cifar10_folder / "test"), storage=str(tmp_path)
    )
    assert (result.images, result.same_answers) == (64, 64)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.jpg").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"None of 1 image of .* can be decoded"):
        raytrain.export("run", str(tmp_path / "other.pt2"), data=str(tmp_path / "broken"), storage=str(tmp_path))
    assert not (tmp_path / "other.pt2").exists()


@pytest.mark.slow
def test_a_network_that_onnx_cannot_hold_is_refused_with_the_reason(tmp_path: Path) -> None:
    make_run(str(tmp_path), small(precision="float64"))
    with pytest.raises(UsageError, match=r"cannot be a file of ONNX \(.*Conv.*\); use an --output that ends in \.pt2"):
        raytrain.export("run", str(tmp_path / "model.onnx"), storage=str(tmp_path))
    assert not (tmp_path / "model.onnx").exists()


@pytest.mark.parametrize("suffix", TRACED)
def test_a_network_trained_on_random_crops_takes_whole_images(suffix: str, tmp_path: Path) -> None:
    make_run(str(tmp_path), small(random_resized_crop=True, cache_side=1.15))
    result = raytrain.export("run", str(tmp_path / f"model.{suffix}"), storage=str(tmp_path))
    assert result.input.startswith("uint8 (batch, 20, 12, 1)")


def test_exported_weights_are_those_of_the_run_with_a_card_beside_them(tmp_path: Path) -> None:
    classes = ("cat\x1b[2J", "dog\n```", "Füchse")
    make_run(str(tmp_path), small(), classes)
    rows = [
        {"kind": "evaluation", "step": step, "epoch": 1, "accuracy": 0.75, "top5": top5, "my_error": None}
        for step, top5 in ((1, 0.875), (2, 0.5))
    ]
    rows.append({"kind": "test", "step": 2, "epoch": 1, "accuracy": 0.7, "loss": 0.9, "top5": 0.8})
    run_store(str(tmp_path), "run").put(METRICS, encode_lines(rows))
    file = tmp_path / "model.safetensors"
    result = raytrain.export("run", str(file), storage=str(tmp_path))
    classifier = raytrain.load("run", storage=str(tmp_path))
    weights = safetensors.torch.load_file(file)
    torch.testing.assert_close(weights, dict(classifier.network.state_dict()), rtol=0, atol=0)
    with safetensors.safe_open(file, "pt") as opened:
        assert json.loads(opened.metadata()["classes"]) == list(classes)
    assert (result.same_answers, result.card) == (
        64,
        str(tmp_path / "model.card.md"),
    ) and result.largest_difference < 1e-6
    card = (tmp_path / "model.card.md").read_text()
    told = ["# run\n", "`raytrain.models:digits`, 3 outputs, 1 input", "20×12", "minus 0.2, divided by 0.3", "Füchse"]
    assert all(
        text in card
        for text in [*told, "accuracy 75.00%, loss 0.5, top5 0.875 |", "digest-of-data", "raytrain train digits"]
    )
    assert "| test images | accuracy 70.00%, loss 0.9, top5 0.8 |" in card
    start = "train auto --data IMAGES --model raytrain.models:digits --weights model.safetensors --channels 1`"
    assert f"{start} starts a run" in card
    assert "\x1b" not in card and card.count("\n```\n") == 3
    assert f"```python\n{result.example}\n```" in card  # the lines that the command prints, and no others
    again = TrainConfig(**{**vars(small()), "weights": str(file)})
    loaded = initial_model(again, 3, initial_weights(again, classes, first_step=0)).state_dict()
    torch.testing.assert_close(dict(loaded), weights, rtol=0, atol=0)


def test_an_export_can_be_written_to_s3(s3_url: str) -> None:
    make_run(s3_url, small())
    raytrain.export("run", f"{s3_url}/model.pt2", storage=s3_url)
    assert run_pt2(open_store(s3_url).get("model.pt2"), np.zeros((1, 20, 12, 1), np.uint8)).shape == (1, 3)


def test_an_export_with_other_predictions_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(str(tmp_path), small())
    wrong = SimpleNamespace(module=lambda: lambda images: torch.ones(len(images), 3))
    monkeypatch.setattr(torch.export, "load", lambda file: wrong)
    with pytest.raises(RaytrainError, match=r"differ by up to .*model\.pt2 was not written"):
        raytrain.export("run", str(tmp_path / "model.pt2"), storage=str(tmp_path))
    assert not (tmp_path / "model.pt2").exists()


@pytest.mark.parametrize(
    ("name", "line"),
    [("winding", "flat = flat if flat.sum() > 0 else -flat"), ("refusing", "assert flat.shape[0] != 2")],
)
def test_a_network_that_cannot_be_traced_is_refused(
    name: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}_networks.py").write_text(
        "from torch import nn\n"
        "class Network(nn.Linear):\n"
        "    def forward(self, images):\n"
        "        flat = images.mean(dim=(2, 3))\n"
        f"        {line}\n"
        "        return super().forward(flat)\n"
        f"def {name}(num_classes, channels):\n    return Network(channels, num_classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make_run(str(tmp_path), small(model=f"{name}_networks:{name}"))
    with pytest.raises(UsageError, match=r"torch\.export cannot trace the network of run 'run' \(.+\)"):
        raytrain.export("run", str(tmp_path / "model.pt2"), storage=str(tmp_path), trust=True)


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        (("onnxscript",), "onnxscript is not installed"),
        (("onnxscript", "onnxruntime"), "onnxscript and onnxruntime are not installed"),
    ],
)
def test_onnx_without_its_packages_says_what_to_install(
    missing: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(str(tmp_path), small())
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else find(name, *more))
    with pytest.raises(UsageError, match=rf"and {says}; install raytrain\[onnx\] \(`"):
        raytrain.export("run", str(tmp_path / "model.onnx"), storage=str(tmp_path))
    raytrain.export("run", str(tmp_path / "model.pt2"), storage=str(tmp_path))


def test_the_format_follows_from_the_file_name(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--output is 'model.pth'; its name must end in \.pt2 or \.onnx or \.safetensors\."
    ):
        raytrain.export("run", "model.pth", storage=str(tmp_path))
    with pytest.raises(UsageError, match="There is no run 'run'"):
        raytrain.export("run", str(tmp_path / "model.pt2"), storage=str(tmp_path))
    with pytest.raises(UsageError, match="--format is 'hf'; give huggingface, or leave it out"):
        raytrain.export("run", str(tmp_path / "model.pt2"), format="hf", storage=str(tmp_path))  # pyright: ignore


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("raytrain.models:digits", {}),
        ("resnet18", {}),
        ("mobilenet_v3_small", {"channels": 3, "image_size": (32, 32)}),
        ("googlenet", {"channels": 3, "image_size": (64, 64)}),
        ("timm:resnet10t.c3_in1k", {}),
        ("timm:vit_tiny_patch16_224", {"channels": 3, "image_size": (32, 32)}),
        ("{folder}/my net.py:tiny", {}),
        ("squeezenet1_1", {"channels": 3, "image_size": (32, 32), "model_option": {"dropout": 0.1}}),
        ("timm:resnet10t.c3_in1k", {"model_option": {"act_layer": "gelu", "drop_rate": 0.1}}),
        ("{folder}/my net.py:tiny", {"model_option": {"bias": False}}),
    ],
)
def test_the_lines_for_weights_build_the_network_that_they_are_of(
    model: str, options: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "my net.py").write_text(
        "from torch import nn\ndef tiny(n_classes, in_chans, bias=True):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(n_classes + in_chans, bias))\n"
    )
    config = custom(model=model.format(folder=tmp_path), **{"channels": 1, "image_size": (20, 12), **options})
    some = (0.5,) * config.channels
    resolved = config.resolve(name="run", num_workers=1, device="cpu", mean=some, std=some)
    network = build_model(config.model, 3, config.channels, 0, resolved.full_image_size, config.model_options)
    names: dict[str, Any] = {"torch": torch}
    exec(network_lines(resolved, network, 3), names)
    names["model"].load_state_dict(network.state_dict())
    images = torch.randn(2, config.channels, *resolved.full_image_size)
    torch.testing.assert_close(names["model"].eval()(images), network.eval()(images))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("timm:resnet10t", {"channels": 1, "image_size": (20, 12), "mean": (0.2,), "std": (0.3,), "resize": "pad"}),
        ("timm:resnet10t.c3_in1k", {"model_option": {"act_layer": "gelu"}, "resize": "crop", "crop_fraction": 0.9}),
        ("timm:vit_tiny_patch16_224", {"image_size": (32, 32), "resize": "stretch", "test_views": ("flip", "shift")}),
    ],
)
def test_timm_loads_the_folder_for_the_hub(model: str, options: dict[str, Any], tmp_path: Path) -> None:
    colours = {"image_size": (64, 64), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.25), "interpolation": "bicubic"}
    config = custom(model=model, **{**colours, **options})
    make_run(str(tmp_path), config)
    made_of = Provenance(first_step=0, started_at="", command="", python="3.12.1", packages={"torch": "2.11.0"})
    record_provenance(run_store(str(tmp_path), "run"), made_of)
    result = raytrain.export("run", tmp_path / "hub", format="huggingface", storage=tmp_path)
    assert result.upload == f"hf upload OWNER/NAME {tmp_path}/hub"
    assert {file.name for file in (tmp_path / "hub").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    about = json.loads((tmp_path / "hub" / "config.json").read_text())
    assert about["architecture"] == model.removeprefix("timm:").partition(".")[0]
    assert (about["num_classes"], about["label_names"]) == (3, list(ANIMALS))
    card = (tmp_path / "hub" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: timm\npipeline_tag: image-classification") and "accuracy 75.00%" in card
    assert "| made of | torch 2.11.0, Python 3.12.1 |" in card

    # The logits are those of the run's network, for images that timm's own transform has made.
    import timm
    from timm.data.config import resolve_model_data_config

    network = timm.create_model(f"local-dir:{tmp_path}/hub", pretrained=True).eval()
    data = resolve_model_data_config(network)
    size = config.full_image_size
    assert tuple(data["input_size"]) == (config.channels, *size)
    assert (tuple(data["mean"]), tuple(data["std"])) == (config.mean, config.std)
    assert data["interpolation"] == (config.interpolation or "bilinear")
    assert data["crop_mode"] == {"pad": "border", "crop": "center", "stretch": "squash"}[str(config.resize)]
    assert data["crop_pct"] == (config.crop_fraction or 1.0)
    images = torch.randn(4, config.channels, *size)
    expected = raytrain.load("run", storage=tmp_path).network
    torch.testing.assert_close(network(images), expected(images), rtol=0, atol=0)

    # The lines of the card do the same, and a run can start from the weights.
    photo = np.random.default_rng(0).integers(0, 256, (90, 70, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.jpg", "png")  # which both decode to the same pixels
    printed: list[dict[str, float]] = []
    exec(result.example.replace("photo.jpg", f"{tmp_path}/photo.jpg"), {"print": printed.append})
    scores = raytrain.load("run", storage=tmp_path).classify_all(tmp_path / "photo.jpg")
    # timm resizes to whole pixels before it crops, and fills with the mean colour unless the lines say otherwise.
    assert printed[0] == pytest.approx(scores, abs=1e-3 if config.resize == "crop" else 1e-5)
    weights = initial_weights(
        custom(model=model, weights=f"{tmp_path}/hub/model.safetensors", **{**colours, **options}), ANIMALS, 0
    )
    assert weights is not None and weights.name_classes


def test_a_folder_for_the_hub_is_refused_for_other_networks_and_where_files_are(tmp_path: Path) -> None:
    make_run(str(tmp_path / "a"), small())
    with pytest.raises(UsageError, match=r"--format huggingface is for networks of timm, .* --output run\.safetensors"):
        raytrain.export("run", tmp_path / "hub", format="huggingface", storage=tmp_path / "a")
    make_run(str(tmp_path / "b"), custom(model="timm:resnet10t", image_size=(20, 12), mean=(0.5,) * 3, std=(0.2,) * 3))
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "README.md").write_text("mine")
    with pytest.raises(UsageError, match=r"hub holds files, such as README\.md; name a new folder"):
        raytrain.export("run", tmp_path / "hub", format="huggingface", storage=tmp_path / "b")


_OTHERS = [("onnx", "stretch"), ("onnx", "crop"), ("pt2", "crop"), ("pt2", "pad")]


@pytest.mark.parametrize(
    ("suffix", "resizing", "views"),
    [
        ("safetensors", "stretch", ()),
        ("safetensors", "stretch", ("flip", "shift")),
        ("safetensors", "crop", ("flip",)),
        ("safetensors", "pad", ("shift",)),
        ("onnx", "pad", ("flip",)),
        ("pt2", "stretch", ()),
        *(pytest.param(*both, (), marks=pytest.mark.slow) for both in _OTHERS),
    ],
)
def test_the_printed_lines_give_the_numbers_of_predict(
    suffix: str, resizing: Any, views: tuple[TestView, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)
    files: list[Path] = []
    for number in range(20):  # of sizes that are decoded whole, and at 1/2 to 1/8; some lie on their side
        size = [(50, 44), (90, 90), (64, 200), (333, 250)][number % 4]
        detail = random.integers(0, 256, (size[1] // 2, size[0] // 2, 3), np.uint8)
        pixels = Image.fromarray(detail).resize(size, Image.Resampling.BICUBIC)
        exif = Image.Exif()
        exif[0x0112] = 6 if number % 5 == 4 else 1
        pixels.save(tmp_path / f"{number}.jpg", quality=90, exif=exif if number % 5 == 4 else b"")
        files.append(tmp_path / f"{number}.jpg")
    options: dict[str, Any] = {"resize": resizing, "interpolation": "bicubic", "test_views": views}
    if views:  # that network takes the mean over the map, for which a mirror image is nearly the same
        options["model"] = "raytrain.models:digits"
    make_run("runs", cifar10(mean=(0.5, 0.5, 0.4), std=(0.2, 0.2, 0.3), **options))
    lines = raytrain.export("run", f"model.{suffix}", storage="runs").example
    assert max(map(len, lines.splitlines())) <= 80  # a terminal does not wrap them
    classifier = raytrain.load("run", storage="runs")
    expected = classifier.classify_all(files)
    some = 20 if suffix == "safetensors" else 5  # the lines load the network each time, here for seconds
    for file, scores in list(zip(files, expected, strict=True))[:some]:
        printed: list[dict[str, float]] = []
        names: dict[str, Any] = {"print": printed.append}
        exec(lines.replace("photo.jpg", file.name), names)
        assert printed[0] == pytest.approx(scores, abs=1e-4)
        seen = decode(file.read_bytes(), classifier.shape, classifier.cropping.crop)
        assert np.abs(np.asarray(names["image"], int) - seen).max() <= 1  # of 255
    about = onnxruntime.InferenceSession("model.onnx").get_modelmeta() if suffix == "onnx" else None
    if about is not None:
        stored = json.loads(about.custom_metadata_map["preprocessing"])
        assert (stored["image_size"], stored["resize"], stored["mean"]) == ([32, 32], resizing, [0.5, 0.5, 0.4])


def test_the_printed_lines_cut_out_the_whole_side_of_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("runs", cifar10(mean=(0.5,) * 3, std=(0.2,) * 3, image_size=(88, 88), resize="crop", crop_fraction=1))
    lines = raytrain.export("run", "model.safetensors", storage="runs").example
    # 88 * (25 / 88) is a little more than 25.
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (25, 31, 3), np.uint8)).save("photo.jpg")
    names: dict[str, Any] = {}
    exec(lines, names)
    classifier = raytrain.load("run", storage="runs")
    seen = decode(Path("photo.jpg").read_bytes(), classifier.shape, classifier.cropping.crop)
    assert np.abs(np.asarray(names["image"], int) - seen).max() <= 1
