"""Embeddings of images: what the body of a network gives to its head, which computes the logits from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from raytrain.errors import UsageError
from raytrain.training.networks.transfer import find_heads


class NetworkWithEmbeddings(nn.Module):
    """A network that returns the embeddings beside its logits: images -> (B, num_classes + D).

    Both are one tensor, so that whoever averages the outputs over views of an image averages both with the same
    weights. The D numbers of an image are the input of the head: of a fully connected layer, the mean over the tokens
    if there are several; of a convolution, the mean over its pixels. Those of two heads are concatenated.

    Raises UsageError if the network has no head.

    Example: ``NetworkWithEmbeddings(network, 10)(images)[:, 10:]``
    """

    def __init__(self, network: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.network = network
        self._inputs: list[Tensor] = []
        self._heads = find_heads(network, num_classes)
        if not self._heads:
            raise UsageError(
                "--embeddings are what the head gets, and the network has no fully connected layer or convolution with "
                f"{num_classes} outputs, one per class; leave it out."
            )
        for name in self._heads:
            network.get_submodule(name).register_forward_pre_hook(self._keep_input)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits and embeddings, (B, num_classes + D). Raise UsageError if the network leaves its head out."""
        self._inputs.clear()
        logits: Tensor = self.network(images)
        if not self._inputs:
            raise UsageError(f"--embeddings: the network does not call its layer {self._heads[0]}; leave it out.")
        return torch.cat([logits, *(embedding.to(logits.dtype) for embedding in self._inputs)], dim=1)

    def _keep_input(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Keep the ``inputs`` of a head, averaged over the positions, (B, D); torch calls this before the head runs."""
        features: Tensor = inputs[0]
        if isinstance(layer, nn.Conv2d):
            self._inputs.append(features.mean(dim=(2, 3)))  # (B, D, H, W)
        else:
            self._inputs.append(features.reshape(len(features), -1, features.shape[-1]).mean(dim=1))  # (B, …, D)
