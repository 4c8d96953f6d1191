"""Which of a worker's images a tensor holds, and how many of them count, as the batch says that it came in.

A network gets a tensor and not a batch. So each :class:`~raytrain.training.batch.Batch` remembers its images here, for
batch norm, dropout and gradients, which must not count a placeholder, and draw random numbers by sample.
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


_of_tensor: Any = WeakIdKeyDictionary()
_expected: list[LocalImages] = []  # what a network will get next, at most one


def remember(images: Tensor, local: LocalImages) -> None:
    """Remember which images the tensor ``images`` holds, as long as it lives."""
    _of_tensor[images] = local


def expect(images: Tensor) -> None:
    """Take tensors of as many rows for ``images`` from now on: a loop may copy them to a GPU, or mix them."""
    _expected[:] = [_of_tensor[images]] if images in _of_tensor else []


def expect_nothing() -> None:
    """Take no other tensor for images of a batch: the loop has used the last one."""
    _expected.clear()


def known(images: Tensor | None) -> LocalImages | None:
    """Return which of this worker's images the tensor ``images`` holds; None if it came in no batch."""
    return None if images is None else _of_tensor.get(images)


def known_or_expected(images: Tensor | None, num_rows: int) -> LocalImages | None:
    """Return which images the tensor ``images`` holds, or is made of if it has as many rows; None without a batch."""
    local = known(images)
    if local is None and _expected and _expected[0].num_rows == num_rows:
        return _expected[0]
    return local
