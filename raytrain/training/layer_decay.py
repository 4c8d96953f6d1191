"""Layer-wise decay of the learning rate: the nearer a layer is to the images, the slower it learns."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from raytrain.errors import UsageError


def layer_scales(model: nn.Module, decay: float) -> dict[Tensor, float]:
    """The factor of the learning rate of each parameter: 1 in the last layer, and ``decay`` times that in each before.

    Clark et al. 2020 (ELECTRA), as in BEiT and timm: the network itself says which parameters make a layer, with its
    method ``group_matcher``. Raises UsageError if it has none.
    """
    matcher: Any = getattr(model, "group_matcher", None)
    if matcher is None:
        raise UsageError(
            f"--layer-decay is {decay:g}, and the network does not say how its layers follow each other, as those of "
            "timm do; take one of these (--model timm:NAME), or leave the decay at 1."
        )
    from timm.models import group_parameters

    layer_of: Any = group_parameters(model, matcher(coarse=False), reverse=True)
    last = max(layer_of.values())
    return {parameter: decay ** (last - layer_of[name]) for name, parameter in model.named_parameters()}


def split_by_layer(group: dict[str, Any], scales: dict[Tensor, float], learning_rate: float) -> list[dict[str, Any]]:
    """An optimizer's group, whose default is ``learning_rate``, as a group for each scale, the largest first."""
    rate = group.get("lr", learning_rate)
    params: list[Tensor] = group["params"]
    return [
        {**group, "params": [each for each in params if scales[each] == scale], "lr": rate * scale}
        for scale in sorted({scales[each] for each in params}, reverse=True)
    ]
