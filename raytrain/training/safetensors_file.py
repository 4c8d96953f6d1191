"""Weights as a safetensors file, with the names of their classes. Such a file holds no code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import cast

from safetensors import SafetensorError, torch
from torch import Tensor

from raytrain.runs.documents import matches

SUFFIX = ".safetensors"
_CLASSES = "classes"


def to_safetensors(weights: Mapping[str, Tensor], classes: Sequence[str]) -> bytes:
    """The content of a file with ``weights``; its metadata hold the names of the classes as JSON."""
    # Each tensor gets memory of its own, for the format knows no shared weights.
    copies = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return torch.save(copies, {_CLASSES: json.dumps(list(classes)), "format": "pt"})


def from_safetensors(data: bytes) -> tuple[dict[str, Tensor] | None, tuple[str, ...] | None]:
    """The weights in a file, None if it is damaged, and their classes, None if it does not say."""
    try:
        return torch.load(data), _classes(data)
    except SafetensorError:
        return None, None


def _classes(data: bytes) -> tuple[str, ...] | None:
    """From the header: its length in 8 bytes, and its JSON."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    try:
        classes: object = json.loads(header.get("__metadata__", {})[_CLASSES])
    except (KeyError, ValueError, RecursionError):
        return None
    return tuple(cast(list[str], classes)) if matches(classes, list[str]) else None
