"""Layer-wise decay of the learning rate: the same as timm's, beside groups of the head and without weight decay."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.errors import UsageError
from raytrain.training.networks.model import build_model
from raytrain.training.optimisation import build_optimizer


def resolved(**given: Any) -> ResolvedConfig:
    config = TrainConfig(batch_size=2, learning_rate=0.5, layer_decay=0.75, **given)
    return config.resolve(name="run", num_workers=1, device="cpu", mean=(0.5,) * 3, std=(0.2,) * 3)


def rates(model: nn.Module, **given: Any) -> dict[str, tuple[float, float]]:
    """The learning rate and weight decay of each parameter."""
    optimizer = build_optimizer(resolved(**given), model, 5)
    of = {each: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for each in group["params"]}
    assert len(of) == sum(len(group["params"]) for group in optimizer.param_groups)
    return {name: of[parameter] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_convnext"])
def test_every_parameter_learns_at_the_rate_that_timm_gives_it(name: str) -> None:
    import timm.optim  # deferred: each process of the tests collects this module

    model = build_model(f"timm:{name}", 5, 3, 0)
    ours = rates(model, optimizer="adamw", weight_decay=0.05, decay_norms_and_biases=False)
    groups = timm.optim.param_groups_layer_decay(model, 0.05, layer_decay=0.75)  # pyright: ignore[reportPrivateImportUsage]
    theirs = {each: (0.5 * group["lr_scale"], group["weight_decay"]) for group in groups for each in group["params"]}
    for parameter, found in ours.items():
        assert found == pytest.approx(theirs[model.get_parameter(parameter)])
    assert build_optimizer(resolved(), model, 5).param_groups[0]["lr"] == 0.5  # the rate that is shown
    assert len({rate for rate, _ in ours.values()}) > 3


def test_the_head_keeps_a_factor_of_its_own() -> None:
    model = build_model("timm:test_vit", 5, 3, 0)
    plain, faster = rates(model), rates(model, head_learning_rate_factor=10)
    for name, (rate, _) in plain.items():
        assert faster[name][0] == pytest.approx(rate * (10 if name.startswith("head.") else 1))
    assert plain["patch_embed.proj.weight"][0] < plain["blocks.1.mlp.fc1.weight"][0] < plain["head.weight"][0] == 0.5


def test_other_networks_are_refused() -> None:
    with pytest.raises(UsageError, match=r"--layer-decay is 0.75, and the network does not say how its layers follow"):
        build_optimizer(resolved(), build_model("resnet18", 5, 3, 0), 5)
