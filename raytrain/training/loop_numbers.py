"""Follows numbers that enter a loss from outside of torch's calls, or from an earlier step, and compares the workers'.

A number that a worker has computed from its own images makes the result depend on the number of workers. If it has
been a Python number, a list or an array meanwhile, as after ``loss.item()``, ``np.bincount(labels)`` or ``sorted``, its
origin cannot be followed from tensor to tensor. Its value can be compared: what is the same on all workers, such as a
weight of a loss, a temperature or a count by ``run.total``, does no harm. The same holds for tensors of an earlier
step, such as a queue or targets of single images, into which each worker may have written rows of its own.

Only what the user's own lines give to a call is compared, and only if a loss depends on it. What belongs to single
images differs between workers anyway: tensors with a row for each of them, and lines that run once for each of them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.config.user_code import is_of_user, line_of
from raytrain.training.agreement import digest_of_tensors, has_digest

_log = logging.getLogger(__name__)
Place = tuple[int, str, int]
"""A step of this attempt, a file and a line of the user's."""

_FROM_NUMBERS = {"tensor", "as_tensor", "asarray", "scalar_tensor"}
_INDEXED = ("__getitem__", "__setitem__")
_BETWEEN = ("torch/overrides.py", "torch/functional.py", "torch/nn/functional.py", "torch/_tensor.py")
_ROUNDING = 1e-6  # relative


class LoopNumbers:
    """The numbers in the losses of this worker.

    Example::

        numbers = LoopNumbers()
        numbers.begin(12, set())
        numbers.follow("mul", (loss, 0.5), {}, scaled, sys._getframe(1))  # after each call of torch
        numbers.note_losses([scaled])
        differing_lines([numbers.in_losses(), *those_of_other_workers])
    """

    def __init__(self) -> None:
        self._step = self._num_images = 0
        self._weights: set[int] = set()
        self._values: dict[Place, list[float | Tensor]] = {}  # in the order of the calls
        self._in_losses: set[Place] = set()
        # Tensors of this step with the places whose numbers they depend on, and those of earlier steps.
        self._places: Any = WeakIdKeyDictionary()
        self._earlier: Any = WeakIdKeyDictionary()

    def begin(self, num_images: int, weights: set[int]) -> None:
        """Follow a step of ``num_images`` of this worker; ``weights`` are the IDs of parameters and buffers."""
        self._step, self._num_images, self._weights = self._step + 1, num_images, weights
        for tensor in list(self._places):
            self._earlier[tensor] = True
        self._places = WeakIdKeyDictionary()

    def follow(self, name: str, args: Any, given: list[Any], result: Any, frame: FrameType | None) -> None:
        """Follow a call of torch's function ``name``, for which ``frame`` has called the watch.

        ``given`` are the leaves of all its arguments, ``args`` and those by name.
        """
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        try:
            values = list(self._new_values(name, args, given, result, tensors))
        except Exception:  # all kinds of the user's objects are met here, and no run must fail by a search
            _log.debug("the numbers of a call of %s are not known", name, exc_info=True)
            values = []
        places = frozenset[Place]().union(*(self._places.get(tensor, ()) for tensor in tensors))
        if values and (line := _users_line(frame)):
            place = (self._step, *line)
            self._values.setdefault(place, []).extend(values)
            places |= {place}
        for tensor in tensors:
            self._places.setdefault(tensor, frozenset())
        written = args[:1] if name == "__setitem__" else ()
        results = [result] if isinstance(result, Tensor) else tree_leaves(result)
        for leaf in (*results, *written):
            if isinstance(leaf, Tensor) and id(leaf) not in self._weights:
                self._places[leaf] = places

    def note_losses(self, losses: Iterable[Tensor]) -> None:
        """Note that the backward of ``losses`` is called."""
        self._in_losses.update(place for loss in losses for place in self._places.get(loss, ()))

    def in_losses(self) -> dict[Place, list[float]]:
        """Return the numbers that the losses since then depend on, but for lines that run once for each image."""
        counts = {place: len(self._values[place]) for place in self._in_losses}
        return {
            (step, Path(file).name, line): [
                value.item() if isinstance(value, Tensor) else value for value in self._values[step, file, line]
            ]
            for (step, file, line), count in counts.items()
            if count % max(self._num_images, 2)
        }

    def lines(self) -> dict[tuple[str, int], str]:
        """Return the lines of these numbers, as a sentence shows them."""
        return {(Path(file).name, line): line_of(file, line) for _, file, line in self._in_losses}

    def forget(self) -> None:
        """Forget the numbers of the losses so far, which have been compared."""
        self._values.clear()
        self._in_losses.clear()

    def _new_values(
        self, name: str, args: Any, given: list[Any], result: Any, tensors: Sequence[Tensor]
    ) -> Iterable[float | Tensor]:
        """Yield the numbers, or digests of tensors, that a call brings in."""
        of_images = (self._num_images, 1 / max(self._num_images, 1))
        for leaf in given:
            if isinstance(leaf, (float, np.floating)) and leaf not in of_images:
                yield float(leaf)
            elif isinstance(leaf, np.ndarray) and not self._is_of_images(leaf.shape) and leaf.dtype.kind in "biuf":
                yield _digest(torch.as_tensor(np.ascontiguousarray(leaf)))
        if name in _FROM_NUMBERS and has_digest(result) and not self._is_of_images(result.shape):
            yield _digest(result)
        indices = args[1] if name in _INDEXED and isinstance(args[1], tuple) else args[1:2]
        for index in indices if name in _INDEXED else ():
            if isinstance(index, list) and len(index) != self._num_images:
                yield from map(float, (number for number in tree_leaves(index) if isinstance(number, (int, float))))
        for tensor in tensors:
            if self._is_new(tensor):
                yield _digest(tensor)

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether a call gets ``tensor`` from an earlier step, or from NumPy, for the first time in this step.

        An array becomes a tensor without a call that can be seen; only small ones, such as a number for each class, are
        compared, as larger ones may be images of a loader of the user's own.
        """
        if tensor in self._places or id(tensor) in self._weights or self._is_of_images(tensor.shape):
            return False
        if not has_digest(tensor):
            return False
        return tensor in self._earlier or (tensor.is_cpu and tensor.ndim < 2 and tensor.numel() < self._num_images)

    def _is_of_images(self, shape: Sequence[int]) -> bool:
        """Return whether something of this ``shape`` has a row for each of this worker's images, or for two views."""
        return len(shape) > 0 and shape[0] in (self._num_images, 2 * self._num_images)


def differing_lines(numbers: Sequence[Mapping[Place, list[float]]]) -> list[tuple[str, int]]:
    """Return the lines whose numbers differ between workers, given what :meth:`LoopNumbers.in_losses` says on each.

    A line that has run more often on one worker than on another is left out: it may be for some images alone.

    Example::

        differing_lines([{(1, "loop.py", 7): [0.5]}, {(1, "loop.py", 7): [0.4]}])  # [("loop.py", 7)]
    """
    lines: set[tuple[str, int]] = set()
    for place in numbers[0]:
        rows = [each.get(place, []) for each in numbers]
        if len({len(row) for row in rows}) == 1:
            pairs = [pair for row in rows[1:] for pair in zip(rows[0], row, strict=True)]
            if not all(math.isclose(*pair, rel_tol=_ROUNDING) or all(map(math.isnan, pair)) for pair in pairs):
                lines.add(place[1:])
    return sorted(lines)


def _digest(tensor: Tensor) -> Tensor:
    """Return a number that changes if ``tensor`` does, on its device, so that the host does not wait for it now."""
    return (digest_of_tensors([tensor])[0] * torch.tensor([1.0, 2.0, 3.0, 5.0], device=tensor.device)).sum()


def _users_line(frame: FrameType | None) -> tuple[str, int] | None:
    """Return the file and the line of the user's that has called torch's function, if no library is between."""
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith(_BETWEEN):
        frame = frame.f_back
    if frame is None or not is_of_user(frame.f_code.co_filename):
        return None
    return frame.f_code.co_filename, frame.f_lineno
