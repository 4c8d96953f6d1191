"""timm's networks: which are built or refused, which head they have, and the same training on any number of workers.

timm is imported where it is used: each process of the tests collects this module.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import raytrain
from raytrain.config import TrainConfig
from raytrain.errors import StorageError, UsageError
from raytrain.launch.prepare import prepare
from raytrain.training.exact import batchnorm
from raytrain.training.networks.model import build_model
from raytrain.training.networks.transfer import find_heads, initial_model, initial_weights
from raytrain.training.optimisation import build_optimizer
from tests.helpers.folder_runs import folder_run, largest_difference, train_runs
from tests.helpers.small_runs import config

HEADS = {
    "convnextv2_atto": ["head.fc"],
    "deit_tiny_distilled_patch16_224": ["head", "head_dist"],
    "efficientnet_b0": ["classifier"],
    "levit_128s": ["head", "head_dist"],
    "mobilenetv4_conv_small": ["classifier"],
    "resnet10t": ["fc"],
    "vit_tiny_patch16_224": ["head"],
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_is_the_one_that_timm_names(name: str) -> None:
    with torch.device("meta"):
        model = build_model(f"timm:{name}", 7, 3, seed=0)
    assert find_heads(model, 7) == HEADS[name]


def test_networks_take_the_classes_channels_and_sizes_that_are_asked_for() -> None:
    for name, size in (("vit_tiny_patch16_224", (32, 48)), ("resnet10t", (40, 40))):
        model = build_model(f"timm:{name}", 5, 1, seed=0, image_size=size)
        assert model(torch.zeros(2, 1, *size)).shape == (2, 5)


def test_the_initial_weights_depend_on_the_seed() -> None:
    one, same, other = (build_model("timm:test_vit", 5, 3, seed=seed).state_dict() for seed in (1, 1, 2))
    torch.testing.assert_close(one, same, rtol=0, atol=0)
    assert not torch.equal(one["head.weight"], other["head.weight"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("resnet10x", r"timm:resnet10x is no network of timm \(did you mean .*resnet10t"),
        ("resnet10t.c3_in2k", r"has no weights c3_in2k for resnet10t \(did you mean c3_in1k\?\); it has c3_in1k\."),
        ("hf-hub:timm/resnet10t.c3_in1k", "is no network of timm"),
        ("local-dir:/tmp", "is no network of timm"),
    ],
)
def test_names_that_do_not_exist_are_refused(name: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        build_model(f"timm:{name}", 5, 3, seed=0)


def test_a_size_that_a_network_cannot_have_is_refused() -> None:
    with pytest.raises(UsageError, match=r"timm cannot build nest_tiny_jx for --image-size 50 50: .* is 224 224\."):
        build_model("timm:nest_tiny_jx", 5, 3, seed=0, image_size=(50, 50))


def options(**values: Any) -> TrainConfig:
    base = {"model": "timm:test_resnet", "batch_size": 4, "learning_rate": 0.1, "image_size": (32, 32)}
    return TrainConfig(**{**base, **values})


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet", "levit_128s"])
@pytest.mark.parametrize("num_classes", [5, 7])
def test_all_weights_are_loaded_except_a_head_of_other_classes(tmp_path: Path, name: str, num_classes: int) -> None:
    import timm

    settings = options(model=f"timm:{name}", weights=str(tmp_path / "weights.pt"), image_size=(224, 224))
    before = timm.create_model(name, num_classes=5).state_dict()
    torch.save(before, tmp_path / "weights.pt")
    classes = [str(number) for number in range(num_classes)]
    model = initial_model(settings, num_classes, initial_weights(settings, classes, first_step=0))
    heads = tuple(find_heads(model, num_classes))
    fresh = build_model(settings.model, num_classes, 3, seed=0).state_dict()
    for weight, value in model.state_dict().items():
        expected = fresh if weight.startswith(heads) and num_classes == 7 else before
        assert torch.equal(value, expected[weight]), weight


def test_the_head_has_a_learning_rate_of_its_own() -> None:
    model, given = build_model("timm:test_convnext", 5, 3, seed=0), options(head_learning_rate_factor=20.0)
    resolved = given.resolve(name="run", num_workers=1, device="cpu", mean=(0.5,) * 3, std=(0.2,) * 3)
    body, head = build_optimizer(resolved, model, 5).param_groups
    assert head["lr"] == 2
    assert [*map(id, head["params"])] == [*map(id, model.get_submodule("head.fc").parameters())]
    assert len(body["params"]) + len(head["params"]) == len(list(model.parameters()))


# Preprocessing, and weights that timm would download.


def prepared(images: Path, storage: Path, **values: Any) -> TrainConfig:
    base = {"model": "timm:test_vit", "weights": "DEFAULT", "image_size": None, "workers": 1, "translate": 0}
    base |= {"mean": None, "std": None}
    # Not by settle_options, which asks whether the weights can be downloaded.
    with prepare(config(images, storage, **{**base, **values})) as run:
        return run.resolve(1, "cpu")


def test_default_weights_decide_on_the_preprocessing_as_far_as_the_options_leave_it_open(
    images: Path, tmp_path: Path
) -> None:
    found = prepared(images, tmp_path)
    assert (found.image_size, found.resize, found.crop_fraction) == ((160, 160), "crop", 0.95)
    assert (found.interpolation, found.mean, found.std) == ("bicubic", (0.5,) * 3, (0.5,) * 3)
    assert prepared(images, tmp_path, channels=1).mean == (0.5,)
    given = {"image_size": (32, 32), "resize": "stretch", "interpolation": "bilinear", "mean": (0.1,) * 3}
    found = prepared(images, tmp_path, **given)
    assert {name: getattr(found, name) for name in given} == given and found.std == (0.5,) * 3
    found = prepared(images, tmp_path, weights=None)
    assert (found.image_size, found.resize, found.interpolation) == ((224, 224), "stretch", "bilinear")
    assert found.mean != (0.5,) * 3


def cached_weights(folder: Path) -> dict[str, Tensor]:
    """Weights where Hugging Face's client keeps what it has downloaded."""
    import timm

    model = timm.create_model("test_vit")
    repository = folder / "hub" / "models--timm--test_vit.r160_in1k"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("1")
    (repository / "snapshots" / "1").mkdir(parents=True)
    save_file(model.state_dict(), repository / "snapshots" / "1" / "model.safetensors")
    return model.state_dict()


def raytrain_alone(words: str, hub: Path) -> None:
    """A command in a process of its own, without a network connection: one that trains is the only worker."""
    environment = {**os.environ, "HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["raytrain", *words.split()], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_run_starts_with_timms_weights_and_is_used_with_its_preprocessing(images: Path, tmp_path: Path) -> None:
    before = cached_weights(tmp_path / "hub")
    train = f"train custom --data {images} --storage {tmp_path} --name first --batch-size 30 --learning-rate 0"
    train += " --backend local --workers 1"
    raytrain_alone(f"{train} --epochs 1 --model timm:test_vit --weights DEFAULT", tmp_path / "hub")
    raytrain_alone(f"{train} --epochs 2 --resume", tmp_path / "nothing")
    found = json.loads((tmp_path / "first" / "config.json").read_bytes())
    assert (found["image_size"], found["resize"], found["interpolation"]) == ([160, 160], "crop", "bicubic")
    model = raytrain.load("first", storage=str(tmp_path))
    after = model.network.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if not name.startswith("head."))
    assert after["head.weight"].shape == (3, 64)
    picture = next(images.rglob("*.png"))
    pixels = Image.open(picture).convert("RGB").resize((160, 160), Image.Resampling.BICUBIC, (0.3, 0.3, 11.7, 11.7))
    wanted = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None] / 127.5 - 1
    expected = model.network(wanted).softmax(dim=1).max().item()
    assert model.classify([picture])[0][1] == pytest.approx(expected, abs=1e-5)
    raytrain.export("first", str(tmp_path / "first.pt2"), storage=str(tmp_path))


def test_weights_that_timm_lacks_or_cannot_download_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="timm has no weights for botnet50ts_256"):
        initial_weights(options(model="timm:botnet50ts_256", weights="DEFAULT"), (), first_step=0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        StorageError, match=r"timm's weights for test_resnet cannot be downloaded .*give --weights FILE"
    ):
        initial_weights(options(weights="DEFAULT"), (), first_step=0)


# Networks with batch norm that ends with an activation, dropout and drop-path.


def dropping_efficientnet(num_classes: int, channels: int) -> nn.Module:
    """A network with timm's DropPath, and its batch norm that ends with an activation."""
    import timm

    return timm.create_model("test_efficientnet", num_classes=num_classes, in_chans=channels, drop_path_rate=0.5)


def dropping_vit(num_classes: int, channels: int) -> nn.Module:
    """A network with timm's DropPath and dropout in its head, in its blocks, and behind the positions."""
    import timm

    rates: dict[str, Any] = {"drop_rate": 0.3, "drop_path_rate": 0.5, "proj_drop_rate": 0.2, "pos_drop_rate": 0.1}
    return timm.create_model("test_vit", num_classes=num_classes, in_chans=channels, img_size=32, **rates)


CASES: dict[str, dict[str, Any]] = {
    "batch norm with activation": {"model": "timm:test_efficientnet"},
    "drop-path": {"model": "tests.integration.test_timm:dropping_efficientnet"},
    "dropout": {"model": "tests.integration.test_timm:dropping_vit", "learning_rate": 0.01},
}


@pytest.mark.parametrize("kind", ["sync", "aggregate", "frozen"])
def test_batch_norm_stays_followed_by_its_activation(kind: Literal["sync", "aggregate", "frozen"]) -> None:
    from timm.layers.norm_act import BatchNormAct2d

    plain = BatchNormAct2d(4, act_layer=nn.SiLU)
    copied = copy.deepcopy(plain).train(kind != "frozen")
    ours = batchnorm.freeze(plain) if kind == "frozen" else batchnorm.convert(plain, kind)
    images = torch.randn(8, 4, 3, 3) + 1
    torch.testing.assert_close(ours.train()(images), copied(images))
    batchnorm.update_running_statistics(ours.modules())
    torch.testing.assert_close(ours.state_dict(), copied.state_dict())


def test_networks_have_what_is_tested() -> None:
    kinds = {type(layer).__name__ for layer in dropping_efficientnet(3, 3).modules()}
    assert {"BatchNormAct2d", "DropPath"} <= kinds
    kinds = {type(layer).__name__ for layer in dropping_vit(3, 3).modules()}
    assert {"Dropout", "DropPath"} <= kinds


@pytest.mark.slow
def test_the_weights_are_the_same_on_any_number_of_workers(images: Path, tmp_path: Path) -> None:
    def runs(prefix: str) -> list[Any]:
        defaults = {"batch_size": 18, "image_size": (32, 32), "epochs": 1}
        return [
            folder_run(images, tmp_path, f"{prefix}-{number}", **{**defaults, **case})
            for number, case in enumerate(CASES.values())
        ]

    alone, three = train_runs(1, *runs("1")), train_runs(3, *runs("3"))
    for name, one, other in zip(CASES, alone, three, strict=True):
        assert largest_difference(one, other) < 1e-10, name
