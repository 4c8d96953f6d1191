"""The networks of the recipes, and building and seeding a network by its name."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain import models
from raytrain.errors import UsageError
from raytrain.training.networks.model import build_model


def kinds(model: nn.Module) -> Counter[type]:
    return Counter(type(layer) for layer in model.modules() if not list(layer.children()))


def test_digits_has_the_parameters_of_its_document() -> None:
    model = models.digits(num_classes=10, channels=1)
    assert len(list(model.parameters())) == 14
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert [layer.kernel_size for layer in model.modules() if isinstance(layer, nn.Conv2d)] == [(5, 5), (3, 3), (3, 3)]


def test_digits_does_not_pool_images_of_28x28() -> None:
    first_two = models.digits(num_classes=10, channels=1)[:2]  # type: ignore[index]
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(first_two(images), first_two[0](images))


@pytest.mark.not_quick
def test_cifar10_has_the_layers_of_its_document() -> None:
    model = models.cifar10(num_classes=10, channels=3)
    found = kinds(model)
    assert (found[nn.Conv2d], found[nn.BatchNorm2d], found[nn.ReLU]) == (12, 12, 12)
    assert (found[nn.MaxPool2d], found[nn.AdaptiveAvgPool2d], found[nn.Linear]) == (2, 1, 1)
    assert [layer.out_channels for layer in model.modules() if isinstance(layer, nn.Conv2d)] == [32] * 4 + [64] * 4 + [
        128
    ] * 4
    assert model[:-3](torch.zeros(2, 3, 32, 32)).shape == (2, 128, 8, 8)  # type: ignore[index]
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_cifar10_fast_has_the_layers_and_the_initial_weights_of_its_paper() -> None:
    model = models.cifar10_fast(num_classes=10, channels=3)
    found = kinds(model)
    assert (found[nn.Conv2d], found[nn.BatchNorm2d], found[nn.GELU], found[nn.MaxPool2d]) == (7, 6, 7, 3)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [24, 64, 64, 256, 256, 256, 256]
    assert model[:-4](torch.zeros(2, 3, 32, 32)).shape == (2, 256, 3, 3)  # type: ignore[index]
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert trainable == 24 + 9 * (24 * 64 + 64 * 64 + 64 * 256 + 3 * 256 * 256) + 2 * (64 + 256 + 256) + 2560
    maps = torch.randn(2, 64, 8, 8)
    torch.testing.assert_close(convolutions[3](maps)[:, :64], maps, rtol=0, atol=0.1)  # passes its input on


def test_the_first_layer_of_cifar10_fast_makes_patches_uncorrelated() -> None:
    whitening = models.cifar10_fast(num_classes=10, channels=3)[0]  # type: ignore[index]
    assert isinstance(whitening, nn.Conv2d) and not whitening.weight.requires_grad
    first, second = whitening.weight.chunk(2)
    assert torch.equal(first, -second)
    smooth = nn.functional.avg_pool2d(torch.randn(400, 1, 20, 20, generator=torch.Generator().manual_seed(0)), 5, 1)
    grey = (smooth / smooth.std()).expand(-1, 3, -1, -1)  # neighbouring pixels are much alike, as in photographs
    maps = nn.functional.conv2d(grey, first).transpose(0, 1).flatten(1).view(4, 3, -1)[:, 0]  # grey of each pattern
    assert maps.std(dim=1).min() > 0.3 and maps.std(dim=1).max() < 3
    assert (torch.corrcoef(maps) - torch.eye(4)).abs().max() < 0.1


def test_a_bias_of_cifar10_fast_learns_64_times_as_fast() -> None:
    layers = models.cifar10_fast(10, 3).modules()
    layer = next(layer for layer in layers if [name for name, _ in layer.named_parameters()] == ["bias"])
    layer(torch.zeros(1, 64, 1, 1)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.01).step()
    torch.testing.assert_close(layer(torch.zeros(1, 64, 1, 1)), torch.full((1, 64, 1, 1), -0.64))


def test_digits_lstm_reads_rows_and_keeps_no_state() -> None:
    model = models.digits_lstm(num_classes=10, channels=1).double()
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    logits = model(images)
    assert logits.shape == (3, 10)
    assert torch.equal(model(images), logits)  # No state from the previous batch.
    torch.testing.assert_close(
        torch.cat([model(image[None]) for image in images]), logits
    )  # Nor from the previous image.
    assert not torch.allclose(model(images.flip(2)), logits) and not torch.allclose(model(images.roll(1, 3)), logits)
    assert kinds(model)[nn.LSTM] == 1


@pytest.mark.parametrize("build", [models.digits, models.digits_lstm, models.cifar10, models.cifar10_fast])
@pytest.mark.parametrize(("channels", "height", "width"), [(1, 28, 28), (3, 40, 24), (3, 9, 9)])
def test_networks_accept_other_sizes_and_channels(build: Any, channels: int, height: int, width: int) -> None:
    assert build(num_classes=4, channels=channels)(torch.zeros(2, channels, height, width)).shape == (2, 4)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(7)
    first = weights(build_model("raytrain.models:cifar10", 10, 3, seed=1))
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), after)  # The global generator was not used.
    assert torch.equal(weights(build_model("raytrain.models:cifar10", 10, 3, seed=1)), first)
    assert not torch.equal(weights(build_model("raytrain.models:cifar10", 10, 3, seed=2)), first)


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [("resnet18", 3, 64), ("squeezenet1_1", 1, 64), ("googlenet", 3, 64), ("vit_b_16", 1, 224)],
)
@pytest.mark.not_quick
def test_torchvision_networks_are_found_by_name(name: str, channels: int, size: int) -> None:
    model = build_model(name, 7, channels, seed=0).train()
    assert model(torch.zeros(2, channels, size, size)).shape == (2, 7)


def test_a_users_network_is_found_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_networks.py").write_text(
        "from torch import nn\n"
        "def tiny(num_classes, channels):\n    return nn.Linear(channels, num_classes)\n"
        "def narrow(num_classes):\n    return nn.Linear(3, num_classes)\n"
        "def fixed():\n    return nn.Linear(3, 5)\n"
        "def called_otherwise(in_chans, channels=7, n_classes=9):\n    return nn.Linear(in_chans, n_classes)\n"
        "class Net(nn.Linear):\n    def __init__(self, num_classes=10):\n        super().__init__(3, num_classes)\n"
        "def any_keywords(**options):\n    return tiny(**options)\n"
        "def deep(num_classes, depth):\n    return None\n"
        "made = Net()\n"
        "def nothing(**_):\n    return None\n"
    )
    (tmp_path / "broken_networks.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("tiny", "narrow", "fixed", "called_otherwise", "Net", "any_keywords"):
        assert build_model(f"my_networks:{name}", 5, 3, seed=0)(torch.zeros(1, 3)).shape == (1, 5)
    with pytest.raises(
        UsageError, match=r"deep is called with num_classes, .*'depth'; call .* num_classes and channels"
    ):
        build_model("my_networks:deep", 5, 3, seed=0)
    with pytest.raises(UsageError, match=r"my_networks:made is a network; name a function or class that makes it, so"):
        build_model("my_networks:made", 5, 3, seed=0)
    with pytest.raises(UsageError, match=r"returned nothing; it must return a network, an object of torch\.nn\.Module"):
        build_model("my_networks:nothing", 5, 3, seed=0)
    with pytest.raises(UsageError, match=r"no function 'tinny' \(did you mean tiny\?\)"):
        build_model("my_networks:tinny", 5, 3, seed=0)
    with pytest.raises(UsageError, match=r"broken_networks:tiny cannot be imported: .*'a_package_that_is_not_there'"):
        build_model("broken_networks:tiny", 5, 3, seed=0)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"resnet19 is no classifier of torchvision \(did you mean .*resnet1(8|01|52)"):
        build_model("resnet19", 10, 3, seed=0)
    with pytest.raises(UsageError, match="there is no module nowhere_at_all"):
        build_model("nowhere_at_all.networks:f", 10, 3, seed=0)


@pytest.mark.not_quick
def test_torchvision_is_imported_only_if_it_is_used() -> None:
    program = (
        "import sys; from raytrain.training.networks.model import build_model;"
        "build_model('raytrain.models:digits', 10, 1, 0);"
        "sys.exit('torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
