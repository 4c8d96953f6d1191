"""Watches the first steps of a loop on several workers for what would make the run depend on their number.

A loop is exact if its loss is a mean over images, each of which is alone in its term. Whether it is cannot be proved
from outside, but the usual exceptions show in the calls of torch that the loop makes: :class:`_Calls` sees each of them
in the first two steps. It follows what is computed from the batch, from tensor to tensor, and marks a sum that is not
divided, a mean over something else than images, a comparison of images with each other, and what one step keeps for
the next. A note is made only if the loss depends on a tensor with such a mark; what a loop does with it besides, for a
metric say, changes no weight. Nothing is replaced, and from the third step on nothing is watched.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.data.plan.permutation import mix
from raytrain.errors import UsageError, some_of
from raytrain.training.batch import Batch
from raytrain.training.gradients import HOOK_NOTE
from raytrain.training.random_numbers import held_generators, used_generators

if TYPE_CHECKING:
    from raytrain.training.run import Run

_NUM_WATCHED = 2  # steps
_NOTES = {
    "sum": (
        "the loss is a sum over images, and a run of several workers takes it for a mean: let it be a mean "
        '(reduction="mean"), as in a loop for one GPU'
    ),
    "other mean": (
        "the loss is a mean over something else than images, such as the weights of their classes or those that a mask "
        "or ignore_index leaves, so it depends on the number of workers; write run.mean(sum, divisor), in "
        "docs/your-own-loop.md"
    ),
    "compares": (
        "the loss compares the images of a worker with each other (by a statistic over them, or by products of their "
        "features), so it depends on the number of workers; take the rows of all workers, run.gather(rows), in "
        "docs/your-own-loop.md"
    ),
    "kept": (
        "the loss depends on a tensor of a step before, which was computed from one worker's images, so it depends on "
        "the number of workers; compute it from run.gather(rows) or run.total(sums), or keep it in a network's buffer"
    ),
    "generator": (
        "the loop or a network draws random numbers from a generator of its own, the same on each worker for other "
        "images, so that the run depends on the number of workers; draw for each image by its number in batch.samples, "
        "or train on one worker"
    ),
    "hook": HOOK_NOTE,
}
_DRAWS = (
    "the loop or its network draws random numbers from {names}: each worker draws its own, so that the run depends on "
    "the number of workers; docs/images.md names the layers with which it does not"
)
_STATISTICS = {"mean", "sum", "nanmean", "nansum"}  # linear ones, if they are over images
_COMPARISONS = {
    *("std", "var", "std_mean", "var_mean", "norm", "vector_norm", "normalize", "cov", "corrcoef"),
    *("softmax", "log_softmax", "logsumexp", "amax", "amin", "max", "min", "median", "quantile"),
    *("sort", "argsort", "topk", "cumsum", "prod"),
}
_PRODUCTS = {"matmul", "mm", "__matmul__", "__rmatmul__", "mv", "dot", "tensordot", "addmm", "linear", "inner"}
_LINEAR = {
    *("mean", "sum", "add", "sub", "neg", "__add__", "__radd__", "__sub__", "__rsub__", "__neg__", "stack", "cat"),
    *("mul", "__mul__", "__rmul__", "div", "__truediv__", "detach", "clone", "to", "float", "double", "__getitem__"),
    *("squeeze", "unsqueeze", "reshape", "view", "flatten", "lerp", "item", "__float__", "tolist", "backward", "size"),
}
_DIVISIONS = {"div", "__truediv__", "true_divide", "divide"}
_NOT_FOLLOWED = {"grad", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty"}
_LIKE_ANOTHER = {"to", "type_as", "expand_as", "view_as", "reshape_as"}  # which gives its type or shape, no numbers


class LoopWatch:
    """Finds out in the first steps of an attempt whether the loop depends on the number of workers.

    ``report`` gets a note, on all workers, for each sign that it does on any of them.
    """

    def __init__(self, run: Run, report: Callable[[str], None]) -> None:
        self._run, self._report = run, report
        self._notes: set[str] = set()  # of this worker
        self._is_compared = True  # what this worker has found, with the others
        self._calls = _Calls(self._notes.add, run.config.batch_size)
        self._num_left = _NUM_WATCHED if run.world_size > 1 and not run.config.compile else 0

    @contextmanager
    def step(self, batch: Batch, frame: FrameType | None) -> Iterator[None]:
        """In this context the loop makes a step; ``frame`` is that of the function that loops over the batches."""
        if not self._num_left:
            yield
            return
        self._num_left -= 1
        run = self._run
        weights = [each for model in run.models.trained for each in (*model.parameters(), *model.buffers())]
        self._calls.begin(batch, set(map(id, weights)))
        held = held_generators([*_variables(frame, run), *run.models.trained])
        held = [each for each in held if not isinstance(each, torch.Generator)]  # of those, all calls are seen
        before = [_state_of(each) for each in held]
        with self._calls:
            yield
        if any(_state_of(each) != state for each, state in zip(held, before, strict=True)):
            self._notes.add(_NOTES["generator"])
        if drawn := used_generators(mix(run.config.seed, batch.step, run.rank), run.device):
            self._notes.add(_DRAWS.format(names=" and ".join(drawn)))
        self._is_compared = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In this context nothing is watched: the run itself computes."""
        before, self._calls.is_paused = self._calls.is_paused, True
        try:
            yield
        finally:
            self._calls.is_paused = before

    def compare(self) -> None:
        """Report the notes of all workers, and numbers outside of buffers that differ between their networks.

        Workers call it where they are known to be together, after a step.
        """
        if self._is_compared:
            return
        self._is_compared = True
        numbers = {
            f"{type(layer).__name__}.{name}": value
            for model in self._run.models.trained
            for layer in model.modules()
            for name, value in vars(layer).items()
            if isinstance(value, float) and not name.startswith("_")
        }
        gathered: list[Any] = [None] * self._run.world_size
        dist.all_gather_object(gathered, (sorted(self._notes), numbers))
        for note in sorted({each for notes, _ in gathered for each in notes}):
            self._report(note)
        differing = [name for name in numbers if any(other.get(name) != numbers[name] for _, other in gathered)]
        if differing:
            self._report(
                f"the workers differ in {some_of(differing)}, which a network computes from one worker's images: keep "
                "it in a buffer, computed with run.total or run.gather"
            )


class _Calls(TorchFunctionMode):
    """Follows what is computed from the batch through the calls of torch that a loop makes."""

    def __init__(self, report: Callable[[str], None], batch_size: int) -> None:
        super().__init__()
        self._batch_size = batch_size  # of the global batch
        self.is_paused = False
        self._report = report
        self._marks: Any = WeakIdKeyDictionary()  # of tensors that depend on the batch: a set of words
        self._num_images = 0
        self._weights: set[int] = set()

    def begin(self, batch: Batch, weights: set[int]) -> None:
        """The next step has this ``batch``; ``weights`` are the IDs of parameters and buffers, which need no marks."""
        for marks in self._marks.values():
            marks.add("kept")
        for each in (batch.images, batch.labels, batch.targets, batch.samples):
            self._marks[each] = set()
        self._num_images, self._weights = batch.num_used, weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.is_paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "backward" and args:
            for mark in self._marks.get(args[0], ()):
                if mark in _NOTES:
                    self._report(_NOTES[mark])
        if name == "register_hook":
            self._report(_NOTES["hook"])
        result = func(*args, **kwargs)
        is_drawn = kwargs.get("generator") is not None and isinstance(result, Tensor)
        if is_drawn and self._num_images > 1 and _has_rows(result, self._num_images):
            self._report(_NOTES["generator"])
        given = args[:1] if name in _LIKE_ANOTHER else (args, kwargs)
        sources = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each in self._marks]
        if getattr(func, "__module__", "").startswith("torch.distributed"):  # a collective of the loop's own
            for each in sources:
                del self._marks[each]
            return result
        if sources and self._num_images > 1 and name not in _NOT_FOLLOWED:
            marks = self._marks_of(func, name, args, kwargs, sources, result)
            for each in tree_leaves(result):
                if isinstance(each, Tensor) and id(each) not in self._weights:
                    self._marks[each] = set(marks)
        return result

    def _marks_of(self, func: Any, name: str, args: Any, kwargs: Any, sources: list[Tensor], result: Any) -> set[str]:
        """Return the words for the result of a call whose arguments ``sources`` depend on the batch."""
        marks: set[str] = set().union(*(self._marks[each] for each in sources))
        first, num_images = sources[0], self._num_images
        if func is F.batch_norm and (kwargs.get("training") or (len(args) > 5 and args[5])):
            raise UsageError(
                "A network that is not prepared has batch norm in training mode, which normalises with one worker's "
                "images: give it to run.prepare, or call its eval() if it is to stay as it is; or train on one worker."
            )
        of_statistics = [each for each in sources if "statistic" in self._marks[each]]
        is_spread = len(of_statistics) < len(sources) and isinstance(result, Tensor) and _has_rows(result, num_images)
        is_squared = len(of_statistics) > 1 and name in (*_DIVISIONS, "mul", "__mul__", "__rmul__")
        if of_statistics and (name not in _LINEAR or is_spread or is_squared):
            marks.add("compares")
        # A sum or a mean over the images.
        over_images = _is_over_images(first, name, args, kwargs, num_images)
        if over_images and first.ndim > 1 and name in _COMPARISONS:
            marks.add("compares")
        if over_images and first.ndim > 1 and name in _STATISTICS:
            marks.add("statistic")
        is_whole = isinstance(result, Tensor) and result.ndim == 0
        if is_whole and (
            (name in ("sum", "nansum") and _has_rows(first, num_images)) or kwargs.get("reduction") == "sum"
        ):
            marks.add("sum")
        # A mean over something else than images.
        indices = [each for each in tree_leaves(args[1:]) if isinstance(each, Tensor)]
        if name in ("__getitem__", "masked_select") and any(each.dtype == torch.bool for each in indices):
            marks.add("selected")
        if name == "mean" and "selected" in marks:
            marks.add("other mean")
        if name in ("cross_entropy", "nll_loss") and kwargs.get("reduction", "mean") == "mean":
            weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
            target = kwargs.get("target", args[1] if len(args) > 1 else None)
            is_ignored = isinstance(target, Tensor) and target.ndim == 1 and not target.is_floating_point()
            if weight is not None or (is_ignored and bool((target == kwargs.get("ignore_index", -100)).any())):
                marks.add("other mean")
        if name in _DIVISIONS and len(args) > 1:
            if isinstance(args[1], Tensor) and "sum" in self._marks.get(args[1], ()):
                marks.add("other mean")
            if isinstance(args[1], Tensor) or (args[1] % num_images == 0 and args[1] != self._batch_size):
                marks.discard("sum")
        # A product of images with images, or all pairs of them.
        if name in _PRODUCTS and len(sources) > 1 and any(each.ndim < 3 for each in sources):
            marks.add("compares")
        if name == "einsum" and len(sources) > 1 and not _keeps_images(args[0]):
            marks.add("compares")
        if name in ("cdist", "pdist") and first.ndim == 2:
            marks.add("compares")
        if isinstance(result, Tensor) and result.ndim > 1 and len(sources) > 1:
            is_of_pairs = result.shape[0] % num_images == 0 == result.shape[1] % num_images
            if is_of_pairs and any(each.ndim > 1 and each.shape[0] == 1 for each in sources):
                marks.add("compares")
        return marks


def _is_over_images(tensor: Tensor, name: str, args: Any, kwargs: Any, num_images: int) -> bool:
    """Whether a reduction is over the first dimension of ``tensor`` alone, if that is of images."""
    if not _has_rows(tensor, num_images):
        return False
    dim = kwargs.get("dim", kwargs.get("axis", next((a for a in args[1:] if isinstance(a, (int, tuple, list))), None)))
    if name in ("norm", "vector_norm", "normalize") and "dim" not in kwargs:
        dim = args[2] if len(args) > 2 else None
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return 0 in [d if not isinstance(d, int) or d >= 0 else d + tensor.ndim for d in dims if not isinstance(d, bool)]


def _has_rows(tensor: Tensor, num_images: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] > 0 and tensor.shape[0] % num_images == 0


def _keeps_images(equation: Any) -> bool:
    """Whether an einsum computes each image alone: all operands and the result begin with the same letter."""
    operands, _, result = str(equation).replace(" ", "").partition("->")
    return len({each[:1] for each in (*operands.split(","), result)}) == 1


def _variables(frame: FrameType | None, run: Run) -> list[Any]:
    """The variables of the function that loops over the batches, without the run itself."""
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return [] if frame is None else [each for each in frame.f_locals.values() if each is not run]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    return repr(generator.getstate() if isinstance(generator, random.Random) else generator.get_state(legacy=False))
