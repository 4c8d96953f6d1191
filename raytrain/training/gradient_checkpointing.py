"""Gradient checkpointing: less memory for more computation (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrain.errors import UsageError


def checkpoint_gradients(model: nn.Module) -> nn.Module:
    """Let ``model`` keep the inputs of its blocks only, and compute what is in them again when it needs gradients.

    Networks of timm know their blocks. Of others they are what follows each other in an ``nn.Sequential`` or
    ``nn.ModuleList`` and has layers of its own. The weights that are trained stay the same: our dropout draws the same
    numbers again, and our batch norm counts a batch once. Changes the network in place, and returns it. Raises
    UsageError if it has no blocks.
    """
    enable: Callable[[], Any] | None = getattr(model, "set_grad_checkpointing", None)
    if enable is not None:
        _enable(enable)
        return model
    blocks = list(_blocks(model))
    if not blocks:
        raise UsageError(
            "--gradient-checkpointing computes blocks of layers again, and the network has none in a sequence; omit "
            "it, or use --accumulate to need less memory."
        )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def _enable(enable: Callable[[], Any]) -> None:
    try:
        enable()
    except AssertionError as error:  # what timm's networks raise that have no blocks
        raise UsageError(f"--gradient-checkpointing: the network refuses it ({error}); omit it.") from None


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost blocks of layers that follow each other."""
    for child in module.children():
        is_block = isinstance(module, _SEQUENCES) and not isinstance(child, _SEQUENCES) and any(child.children())
        yield from [child] if is_block else _blocks(child)


_SEQUENCES = (nn.Sequential, nn.ModuleList)
