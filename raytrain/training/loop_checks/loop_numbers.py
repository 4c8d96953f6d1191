"""Follows numbers that enter a loss from outside of torch's calls, or from an earlier step, and compares the workers'.

A number that a worker has computed from its own images makes the result depend on the number of workers. If it has
been a Python number, a list or an array meanwhile, as after ``loss.item()``, ``np.bincount(labels)`` or ``sorted``, its
origin cannot be followed from tensor to tensor. Its value can be compared: what is the same on all workers, such as a
weight of a loss, a temperature or a count by ``run.total``, does no harm. The same holds for tensors of an earlier
step, such as a queue or targets of single images, into which each worker may have written rows of its own.

Only what the user's own lines give to a call is compared, and only if a loss depends on it. So are decisions before a
loss's backward, such as ``if loss > 2`` and ``if loss.item() > 2``. What belongs to single images differs between
workers anyway, and is left out: tensors with a row for each image, and lines that run once for each image.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.config.user_code import is_of_user, line_of
from raytrain.training.exact.agreement import digest_of_tensors, has_digest
from raytrain.training.loop_checks.searching import searching
from raytrain.training.loop_checks.torch_functions import DIVISIONS, MULTIPLICATIONS

Place = tuple[int, str, int, int]
"""A watched step of this attempt, counted from 1, a file of the user's, the number of a line, and of a call in it."""

_FROM_NUMBERS = {"tensor", "as_tensor", "asarray", "scalar_tensor"}  # torch's functions that take Python's numbers
_INDEXING = ("__getitem__", "__setitem__")
_CUTS = {"__getitem__", "split", "chunk", "tensor_split", "narrow", "nonzero", "where", "masked_select", "index_select"}
# Files of torch whose functions stand between the user's line and the call that the watch sees.
_TORCH_WRAPPERS = ("torch/overrides.py", "torch/functional.py", "torch/nn/functional.py", "torch/_tensor.py")
_ROUNDING = 1e-6  # relative difference of numbers that counts as none


class LoopNumbers:
    """The numbers in the losses of this worker.

    Example::

        numbers = LoopNumbers()
        numbers.begin(12, set())
        numbers.follow("mul", (loss, 0.5), [loss, 0.5], scaled, sys._getframe(1))  # after each call of torch
        numbers.note_losses([scaled])
        differing_lines([numbers.in_losses(), *those_of_other_workers])
    """

    def __init__(self) -> None:
        self._step = self._num_images = 0
        self._weights: set[int] = set()
        self._sizes: set[int] = set()  # numbers of rows of the parts that this step has cut out of tensors
        self._values: dict[Place, list[float | Tensor]] = {}  # in the order of the calls
        self._in_losses: set[Place] = set()
        self._decisions: set[Place] = set()  # of this step, which the next losses may depend on
        # Tensors of this step with the places whose numbers they depend on, and those of earlier steps.
        self._places: Any = WeakIdKeyDictionary()
        self._earlier: Any = WeakIdKeyDictionary()

    def begin(self, num_images: int, weights: set[int]) -> None:
        """Begin to follow a step in which this worker has ``num_images``.

        ``weights`` are the IDs of parameters and buffers, whose values are never compared here.
        """
        self._step, self._num_images, self._weights = self._step + 1, num_images, weights
        self._decisions.clear()
        self._sizes.clear()
        for tensor in list(self._places):
            self._earlier[tensor] = True
        self._places = WeakIdKeyDictionary()

    def follow(self, name: str, args: Any, leaves: list[Any], result: Any, frame: FrameType | None) -> None:
        """Record which numbers the ``result`` of a call of torch's function ``name`` depends on.

        ``args`` are the positional arguments, ``leaves`` the leaves of all arguments, also of those by name. ``frame``
        is the one that has called torch.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values: list[float | Tensor] = []
        with searching(f"which numbers {name} gets"):
            values = list(self._new_values(name, args, leaves, result, tensors))

        # The result depends on all that the arguments depend on, and on what this line of the user's adds.
        places = frozenset[Place]().union(*(self._places.get(tensor, ()) for tensor in tensors))
        if values and (call := users_call(frame)):
            place = (self._step, *call)
            self._values.setdefault(place, []).extend(values)
            places |= {place}

        # Note the sizes of parts, as of images.chunk(2) or losses[mask], by which a loop may weight their losses.
        results = [result] if isinstance(result, Tensor) else tree_leaves(result)
        if name in _CUTS:
            sizes = {len(leaf) for leaf in results if isinstance(leaf, Tensor) and leaf.ndim}
            self._sizes |= {size for size in sizes if size < self._num_images}

        # The arguments are no longer new to this step. What was written into is a result, too.
        for tensor in tensors:
            self._places.setdefault(tensor, frozenset())
        written = args[:1] if name == "__setitem__" else ()
        if name == "__array_wrap__":  # NumPy has made a tensor of its own, as by np.argsort(losses)
            results = []
        for leaf in (*results, *written):
            if isinstance(leaf, Tensor) and id(leaf) not in self._weights:
                self._places[leaf] = places

    def follow_computed(self, source: Tensor, result: Tensor) -> None:
        """Record that ``result``, which the run has computed, depends on the numbers that ``source`` depends on."""
        self._places[result] = self._places.get(source, frozenset())

    def note_decision(self, is_true: bool, frame: FrameType | None) -> None:
        """Record that Python has asked whether a number of several images ``is_true``, as ``if loss > 2`` does.

        What the loop computes next may depend on it. ``frame`` is the one that has asked.
        """
        if call := users_call(frame):
            place = (self._step, *call)
            self._values.setdefault(place, []).append(float(is_true))
            self._decisions.add(place)

    def note_losses(self, losses: Iterable[Tensor]) -> None:
        """Note that the backward of ``losses`` is called, so that the numbers in them matter."""
        self._in_losses.update(place for loss in losses for place in self._places.get(loss, ()))
        self._in_losses |= self._decisions

    def in_losses(self) -> dict[Place, list[float]]:
        """Return the numbers in the losses since the last :meth:`forget`, for each place in the order of the calls.

        Files are named without their folders, which may differ between machines. Calls that run once for each image are
        left out. They are known by their numbers: a multiple of the images, or with one image, of two.
        """
        in_losses: dict[Place, list[float]] = {}
        for step, file, line, call in self._in_losses:
            values = self._values[step, file, line, call]
            if len(values) % max(self._num_images, 2):
                numbers = [value.item() if isinstance(value, Tensor) else value for value in values]
                in_losses[step, Path(file).name, line, call] = numbers
        return in_losses

    def lines(self) -> dict[tuple[str, int], str]:
        """Return the lines of the numbers in the losses, by file and number, as a sentence shows them."""
        return {(Path(file).name, line): line_of(file, line) for _, file, line, _ in self._in_losses}

    def forget(self) -> None:
        """Forget the numbers of the losses so far, which have been compared."""
        self._values.clear()
        self._in_losses.clear()

    def _new_values(
        self, name: str, args: Any, leaves: list[Any], result: Any, tensors: Sequence[Tensor]
    ) -> Iterable[float | Tensor]:
        """Yield the numbers, or digests of tensors, that a call brings in; the arguments are those of :meth:`follow`.

        ``tensors`` are those of the ``leaves``.
        """
        # Python's integers are left out, which are mostly sizes and dimensions, unless they multiply or divide. So are
        # the number of this worker's images and its inverse, because whoever divides by it makes a mean, and sizes of
        # parts of the images, also as fractions of that number.
        num_images = max(self._num_images, 1)
        of_images = {num_images, 1 / num_images, *self._sizes, *(size / num_images for size in self._sizes)}
        is_product = name in MULTIPLICATIONS | DIVISIONS
        is_made_of_images = name in _FROM_NUMBERS and self._is_of_images(result.shape)  # a number for each, say
        for leaf in leaves if not is_made_of_images else ():
            is_factor = type(leaf) is int and is_product and leaf % num_images > 0
            if (isinstance(leaf, (float, np.floating)) or is_factor) and leaf not in of_images:
                yield float(leaf)
            elif isinstance(leaf, np.ndarray) and not self._is_of_images(leaf.shape) and leaf.dtype.kind in "biuf":
                yield digest(torch.as_tensor(np.ascontiguousarray(leaf)))

        # A tensor that is made of numbers counts as these numbers, integers too.
        if name in _FROM_NUMBERS and has_digest(result) and not self._is_of_images(result.shape):
            yield digest(result)

        # A list as an index, such as [0, 4] in queue[[0, 4]], chooses rows, unless it has a number for each image.
        if name in _INDEXING:
            for index in args[1] if isinstance(args[1], tuple) else (args[1],):
                if isinstance(index, list) and len(index) != self._num_images:
                    yield from (float(number) for number in tree_leaves(index) if isinstance(number, (int, float)))

        for tensor in tensors:
            if self._is_new(tensor):
                yield digest(tensor)

    def _is_new(self, tensor: Tensor) -> bool:
        """Return whether a call gets ``tensor`` from an earlier step, or from NumPy, for the first time in this step.

        Weights, tensors with a row for each image, and tensors whose values cannot be added up are never new. An order
        of the images is, as of np.argsort(losses): whoever cuts it chooses some of them.
        """
        if tensor in self._places or id(tensor) in self._weights or not has_digest(tensor):
            return False
        if self._is_of_images(tensor.shape):
            return self._is_order(tensor)
        # An array becomes a tensor without a call that can be seen. Only small ones, such as a number for each class,
        # are compared, as larger ones may be images of a loader of the user's own.
        may_be_of_numpy = tensor.is_cpu and tensor.ndim < 2 and tensor.numel() < self._num_images
        return tensor in self._earlier or may_be_of_numpy

    def _is_of_images(self, shape: Sequence[int]) -> bool:
        """Return whether something of this ``shape`` has a row for each of this worker's images, or for two of each."""
        return len(shape) > 0 and shape[0] in (self._num_images, 2 * self._num_images)

    def _is_order(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` has the number of each of this worker's images once, in another order.

        Of up to four images, it may also be their labels.
        """
        if not tensor.is_cpu or tensor.is_floating_point() or tensor.shape != (self._num_images,) or len(tensor) < 5:
            return False
        numbers = tensor.tolist()
        return numbers != sorted(numbers) == list(range(self._num_images))


def differing_lines(numbers: Sequence[Mapping[Place, list[float]]]) -> list[tuple[str, int]]:
    """Return the file and number of each line whose numbers differ between workers, beyond rounding.

    ``numbers`` has what :meth:`LoopNumbers.in_losses` returns on each worker. A call that has run more often on one
    worker than on another is left out: it may be for some images alone.

    Example::

        differing_lines([{(1, "loop.py", 7, 30): [0.5]}, {(1, "loop.py", 7, 30): [0.4]}])  # [("loop.py", 7)]
    """
    lines: set[tuple[str, int]] = set()
    for place in numbers[0]:
        rows = [of_worker.get(place, []) for of_worker in numbers]
        if len({len(row) for row in rows}) == 1:
            pairs = [pair for row in rows[1:] for pair in zip(rows[0], row, strict=True)]
            if not all(math.isclose(*pair, rel_tol=_ROUNDING) or all(map(math.isnan, pair)) for pair in pairs):
                lines.add(place[1:3])
    return sorted(lines)


def digest(tensor: Tensor) -> Tensor:
    """Return a number that changes if ``tensor`` does, as a tensor on its device, for which the host need not wait.

    Example: ``digest(torch.arange(6)) != digest(torch.arange(6).flip(0))``
    """
    # The weights of the four sums differ, so that changes of two sums do not cancel each other.
    return (digest_of_tensors([tensor])[0] * torch.tensor([1.0, 2.0, 3.0, 5.0], device=tensor.device)).sum()


def users_call(frame: FrameType | None) -> tuple[str, int, int] | None:
    """Return the file, the number of the line and that of the instruction in the user's code that has called torch.

    None if another library has called it. Functions of torch that only wrap the call are skipped.
    """
    while frame is not None and frame.f_code.co_filename.replace("\\", "/").endswith(_TORCH_WRAPPERS):
        frame = frame.f_back
    if frame is None or not is_of_user(frame.f_code.co_filename):
        return None
    return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti


class ComparedNumber(float):
    """A number that Python has taken out of a tensor of several images, whose comparisons are decisions.

    ``note`` gets what each comparison returns, and the frame that compares. One with 0 or 1 is a guard, and not noted.
    A difference, a product, a quotient and an absolute value are such numbers, too. Sums, in which a loop keeps what it
    shows, are plain floats, and so are copies and what is pickled.

    Example::

        loss_value = ComparedNumber(2.5, lambda is_true, frame: print(is_true))
        if loss_value > 2:  # prints True
            ...
    """

    __slots__ = ("_note",)
    _note: Callable[[bool, FrameType], None]

    def __new__(cls, value: float, note: Callable[[bool, FrameType], None]) -> ComparedNumber:
        """Return ``value`` as a number that calls ``note`` for each comparison."""
        number = super().__new__(cls, value)
        number._note = note
        return number

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Return what makes a plain float of the number."""
        return float, (float(self),)

    def __sub__(self, other: Any) -> Any:
        return self._followed(super().__sub__(other))

    def __rsub__(self, other: Any) -> Any:
        return self._followed(super().__rsub__(other))

    def __mul__(self, other: Any) -> Any:
        return self._followed(super().__mul__(other))

    def __rmul__(self, other: Any) -> Any:
        return self._followed(super().__rmul__(other))

    def __truediv__(self, other: Any) -> Any:
        return self._followed(super().__truediv__(other))

    def __rtruediv__(self, other: Any) -> Any:
        return self._followed(super().__rtruediv__(other))

    def __abs__(self) -> ComparedNumber:
        return self._followed(super().__abs__())

    def _followed(self, result: Any) -> Any:
        """Return the ``result`` of arithmetic with this number as such a number, if it is one."""
        return ComparedNumber(result, self._note) if isinstance(result, float) else result

    def __lt__(self, other: Any) -> Any:
        return self._noted(other, super().__lt__(other), sys._getframe(1))

    def __le__(self, other: Any) -> Any:
        return self._noted(other, super().__le__(other), sys._getframe(1))

    def __gt__(self, other: Any) -> Any:
        return self._noted(other, super().__gt__(other), sys._getframe(1))

    def __ge__(self, other: Any) -> Any:
        return self._noted(other, super().__ge__(other), sys._getframe(1))

    def _noted(self, other: Any, answer: Any, frame: FrameType) -> Any:
        """Return the ``answer`` of a comparison with ``other``, which the note gets unless that is 0 or 1."""
        if answer is not NotImplemented and other not in (0, 1):
            self._note(answer, frame)
        return answer
