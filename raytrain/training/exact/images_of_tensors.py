"""Remembers, for the tensors of a batch, which of the worker's images they hold, and how many of these count.

A network gets a tensor, not a batch. But its batch norm, dropout and gradients need to know about the batch: they must
not count a placeholder, and draw random numbers by sample. So each :class:`~raytrain.training.batches.batch.Batch`
notes its images here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True)
class LocalImages:
    """This worker's images in one tensor."""

    num_rows: int  # also of a placeholder
    num_used: int  # images that count, m; 0 for a placeholder
    samples: Tensor | None = None  # int64 (rows,): indices into the manifest; None if nothing names them
    step: int = 0  # counted from 0


_of_tensor: Any = WeakIdKeyDictionary()  # LocalImages of each tensor that was remembered
_expected: list[LocalImages] = []  # at most one: the images that a network will get next


def remember(images: Tensor, local: LocalImages) -> None:
    """Remember that the tensor ``images`` holds the images ``local``, as long as the tensor lives."""
    _of_tensor[images] = local


def expect(images: Tensor) -> None:
    """From now on, take an unknown tensor with as many rows for ``images``: a loop may copy them to a GPU, or mix them.

    If ``images`` are unknown themselves, no other tensor is taken for them.
    """
    _expected[:] = [_of_tensor[images]] if images in _of_tensor else []


def expect_nothing() -> None:
    """Take no other tensor for the images of a batch any more, because the loop has used the last batch."""
    _expected.clear()


def known(images: Tensor | None) -> LocalImages | None:
    """Return which of this worker's images the tensor ``images`` holds; None if :func:`remember` has not got it."""
    return None if images is None else _of_tensor.get(images)


def known_or_expected(images: Tensor | None, num_rows: int) -> LocalImages | None:
    """Return which images the tensor ``images`` holds; if it is unknown, the expected ones, if these have ``num_rows``.

    None if it is neither.
    """
    local = known(images)
    if local is None and _expected and _expected[0].num_rows == num_rows:
        return _expected[0]
    return local
