"""Rows of tensors, one for each image of a worker or several: whether a tensor has them, and which an index chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def has_rows(tensor: Tensor, num_images: int) -> bool:
    """Return whether ``tensor`` has one row per image, or several, such as one per patch."""
    return tensor.ndim > 0 and tensor.shape[0] > 0 and tensor.shape[0] % num_images == 0


def is_part_of_rows(tensor: Tensor, index: Any, num_images: int) -> bool:
    """Return whether ``index`` is a slice of the rows of ``tensor`` that begins or ends among the images."""
    rows = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(rows, slice) or num_images < 2 or not has_rows(tensor, num_images):
        return False
    start, stop, _ = rows.indices(len(tensor))
    return bool(start % num_images or stop % num_images)


def is_all_rows(tensor: Tensor, index: Any, num_images: int) -> bool:
    """Return whether ``index`` is a slice of the first rows of ``tensor``, one for each image, or of all its rows."""
    rows = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if rows is Ellipsis:
        return True
    return isinstance(rows, slice) and rows.indices(len(tensor)) in ((0, num_images, 1), (0, len(tensor), 1))


def covers_alike(mask: Tensor) -> bool:
    """Return whether each row of ``mask``, (m, ...), has the same sum, though not all of its numbers are the same.

    Examples are the mask of a masked autoencoder, which covers equally many patches of each image, and
    ``one_hot(labels)``.
    """
    if mask.ndim < 2 or mask.requires_grad:
        return False
    rows = mask.flatten(1)
    sums = rows.sum(1)
    return bool(torch.allclose(sums, sums[:1].expand_as(sums)) and (rows != rows[:1, :1]).any())


def parts_of_rows(name: str, args: Any, result: Any) -> list[tuple[Tensor, int]]:
    """Return what a call has cut out of a tensor's rows, each part with the number of the row at which it begins.

    ``name`` and ``args`` are those of a function of torch's, such as a slice or ``tensor_split``.
    """
    if name in ("split", "chunk", "tensor_split") and sum(map(len, result)) == len(args[0]):  # of the first dimension
        lengths = [len(part) for part in result]
        return [(part, sum(lengths[:number])) for number, part in enumerate(result)]
    if name == "narrow" and args[1:2] == (0,):
        return [(result, int(args[2]))]
    if name == "__getitem__" and isinstance(args[0], Tensor) and result.ndim:
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        dimension = next((number for number, index in enumerate(indices) if not isinstance(index, int)), 0)
        if isinstance(index := indices[dimension], slice) and len(result) < args[0].shape[dimension]:
            return [(result, index.indices(args[0].shape[dimension])[0])]
    return []


def single_rows(name: str, args: Any, kwargs: Any, result: Any) -> list[tuple[Tensor, int]]:
    """Return what a call has taken out of the first tensor's rows one by one, each with the number of its row.

    ``name``, ``args`` and ``kwargs`` are those of a function of torch's, such as ``unbind`` or ``losses[0]``.
    """
    if name == "__getitem__" and isinstance(args[1], int):
        return [(result, args[1])]
    if name == "__getitem__" and isinstance(args[1], slice) and len(result) == 1:
        return [(result, args[1].indices(len(args[0]))[0])]
    is_of_rows = (*args[1 if name == "unbind" else 2 :], kwargs.get("dim", 0))[0] == 0
    if name == "unbind" and is_of_rows:
        return [(part, row) for row, part in enumerate(result)]
    if name in ("split", "chunk", "tensor_split") and is_of_rows and all(len(part) == 1 for part in result):
        return [(part, row) for row, part in enumerate(result)]
    return []
