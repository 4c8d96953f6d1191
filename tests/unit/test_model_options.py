"""`--model-option NAME=VALUE`: it reaches the function of the network, and a mistake in it is a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from raytrain.config import TrainConfig
from raytrain.errors import UsageError
from raytrain.launch.resumed_options import resumed_options
from raytrain.recipes import custom
from raytrain.runs.outcome import train_command
from raytrain.training.networks.model import build_model
from raytrain.training.networks.transfer import initial_model

pytestmark = pytest.mark.not_quick


def network(model: str, *options: str) -> nn.Module:
    return initial_model(custom(model=model, model_option=options, image_size=32), 3, None)


def test_values_are_read_as_python_writes_them() -> None:
    words = ("a=0.1", "b=3", "c=True", "d=None", "e=gelu", "f=[1, 2]", "g='1'", "h=a=b", "i=")
    assert TrainConfig(batch_size=1, model_option=words).model_options == {
        "a": 0.1,
        "b": 3,
        "c": True,
        "d": None,
        "e": "gelu",
        "f": [1, 2],
        "g": "1",
        "h": "a=b",
        "i": "",
    }


def test_in_python_they_may_be_a_dictionary() -> None:
    options = {"drop_path_rate": 0.1, "act_layer": "gelu", "name": "1", "sizes": [1, 2], "none": None}
    config = custom(model_option=options)
    assert config.model_options == options
    assert config.model_option[:2] == ("drop_path_rate=0.1", "act_layer=gelu")
    assert "--model-option drop_path_rate=0.1 act_layer=gelu" in train_command(config)


def test_networks_of_torchvision_timm_and_ones_own_get_them(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef tiny(num_classes, depth=1, *, act):\n"
        "    return nn.Sequential(nn.Flatten(), nn.LazyLinear(num_classes), *[getattr(nn, act)()] * depth)\n"
    )
    dropouts = [
        layer.p for layer in network("squeezenet1_1", "dropout=0.25").modules() if isinstance(layer, nn.Dropout)
    ]
    assert dropouts == [0.25]
    paths: list[Any] = [
        layer.drop_prob for layer in network("timm:resnet10t", "drop_path_rate=0.3").modules() if is_drop_path(layer)
    ]
    assert max(paths) == pytest.approx(0.3)
    assert not any(map(is_drop_path, network("timm:resnet10t").modules()))
    own: Any = network(f"{tmp_path}/net.py:tiny", "depth=2", "act=ReLU")
    assert [type(layer) for layer in own] == [nn.Flatten, nn.Linear, nn.ReLU, nn.ReLU]


def is_drop_path(layer: Any) -> bool:
    return type(layer).__name__ == "DropPath"


@pytest.mark.parametrize(
    ("model", "option", "says"),
    [
        ("resnet18", "zero_init=True", "--model-option zero_init: --model resnet18 has no such argument"),
        ("squeezenet1_1", "dropouts=1", "has no such argument (did you mean dropout?)"),
        (
            "squeezenet1_1",
            "dropout=much",
            "--model squeezenet1_1 cannot be built with --model-option dropout='much' (Ty",
        ),
        ("timm:resnet10t", "drop_pth_rate=1", "has no such argument (did you mean drop_path_rate"),
        (
            "timm:resnet10t",
            "act_layer=no_such",
            "--model timm:resnet10t cannot be built with --model-option act_layer=",
        ),
        ("net.py:tiny", "num_classes=2", "--model-option num_classes: it is filled in, as 3 here; leave it out"),
        ("net.py:tiny", "dept=2", "--model-option dept: net.py:tiny has no such parameter (did you mean depth?)"),
    ],
)
def test_an_option_that_the_network_does_not_take_is_refused(
    model: str, option: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text("from torch import nn\ndef tiny(num_classes, depth=1):\n    return nn.Flatten()\n")
    with pytest.raises(UsageError) as error:
        network(model, option)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("0.1",), "--model-option is '0.1'; give NAME=VALUE"),
        (("drop path=0.1",), "give NAME=VALUE"),
        (("num_classes=3",), "the data say how many classes there are"),
        (("pretrained=True",), "--weights says it"),
        (("checkpoint_path=x.pt",), "--weights says it"),
        (("img_size=96",), "--image-size says it"),
        (("a=1", "a=2"), "gives a 2 times"),
    ],
)
def test_a_malformed_option_and_one_that_raytrain_gives_are_refused_at_once(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError) as error:
        custom(model_option=words)
    assert says in str(error.value)


def test_a_run_that_resumes_keeps_them() -> None:
    before = custom(model_option={"drop_path_rate": 0.1})
    assert resumed_options(before, before).model_options == {"drop_path_rate": 0.1}
    with pytest.raises(UsageError, match="--model-option is"):
        resumed_options(custom(model_option={"drop_path_rate": 0.2}), before)


def test_without_them_a_network_is_as_before() -> None:
    plain, given = (build_model("squeezenet1_1", 3, 3, 0, None, options) for options in (None, {}))
    assert all(map(lambda a, b: a.equal(b), plain.parameters(), given.parameters()))
