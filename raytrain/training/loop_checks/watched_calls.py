"""Follows what a loop computes from a batch through its calls of torch, and marks what workers would do differently.

:class:`WatchedCalls` sees each call of a step that :mod:`raytrain.training.loop_checks.loop_watch` watches, and follows
all that is computed from the batch, from tensor to tensor. Such a tensor has a set of marks, which
:mod:`raytrain.training.loop_checks.mark_rules` describes. A note is
made only if the loss has a mark when its backward is called, because other uses of a tensor, such as in a metric,
change no weight (:mod:`raytrain.training.loop_checks.watch_notes`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.errors import UsageError
from raytrain.training.batches.batch import Batch
from raytrain.training.exact import gather
from raytrain.training.loop_checks.drawn_numbers import DrawnNumbers
from raytrain.training.loop_checks.hooks_of_gradients import watched_hook
from raytrain.training.loop_checks.loop_numbers import ComparedNumber, LoopNumbers, users_call
from raytrain.training.loop_checks.mark_rules import Call, MarkRules, rows_of
from raytrain.training.loop_checks.rows_of_images import has_rows, is_all_rows, is_part_of_rows, single_rows
from raytrain.training.loop_checks.searching import searching
from raytrain.training.loop_checks.swapped_images import SwappedImages, Table, is_collective
from raytrain.training.loop_checks.torch_functions import COMPARISONS, LIKE_ANOTHER, NEW_TENSORS
from raytrain.training.loop_checks.watch_notes import GRADIENTS, HOOK, NOTES_ON_LOSSES

_GRAD = cast(Any, Tensor).grad.__get__  # what reads a tensor's gradient


class WatchedCalls(TorchFunctionMode):
    """Follows the tensors that are computed from the batch through the calls of torch that a loop makes in its context.

    ``report`` gets the note on a sign as soon as it is found, ``batch_size`` is that of the global batch, and ``rank``
    that of this worker.

    Example::

        calls = WatchedCalls(print, batch_size=64, rank=0)
        calls.begin(batch, weights, swaps=True)
        with calls:
            ...  # the loop's step
    """

    def __init__(self, report: Callable[[str], None], batch_size: int, rank: int) -> None:
        super().__init__()
        self.is_paused = False
        self._is_watching = False  # True within a step that is followed
        self._report = report
        self._num_images = 0  # of this worker
        self._marks: Any = WeakIdKeyDictionary()  # of tensors that depend on the batch: a set of words
        self._weights: set[int] = set()
        self._has_compared = False  # True if Python has compared numbers of two images in this step
        # Marks of single images whose losses had a backward each in this step, until all had one, and whether one of
        # these losses was a share of a mean.
        self._rows_of_losses, self._has_shares = set[str](), False
        self.has_backward = False  # True if the loop has called a backward in this step
        self._has_mean_loss = False  # True if the loss of a backward of this step was a mean over images
        self._image_shape = torch.Size()  # (C, H, W)
        self.numbers = LoopNumbers()  # that enter the losses from outside of torch's calls
        self._swapped = SwappedImages()
        self.depends_on_places = False  # True if the losses of the last step did, unless the workers' tables differ
        self.tables: list[Table] | None = []  # of the last step; None with less than two images
        self._rules = MarkRules(self._marks, self._swapped, batch_size)
        self.drawn = DrawnNumbers(rank)

    def begin(self, batch: Batch, weights: Sequence[Tensor], *, swaps: bool) -> None:
        """Follow a step of ``batch``; ``weights`` are the parameters and buffers, which need no marks.

        If ``swaps``, compute the step with swapped images, too.
        """
        self._is_watching = True
        for marks in self._marks.values():
            marks.discard("now")
            marks.add("kept")
        for tensor in (batch.images, batch.labels, batch.targets, batch.samples):
            self._marks[tensor] = {"now"}
        self._num_images, self._has_compared, self.has_backward = batch.num_used, False, False
        self._has_mean_loss, self._image_shape = False, batch.images.shape[1:]
        self._rows_of_losses, self._has_shares = set[str](), False
        self._weights = set(map(id, weights))
        self.numbers.begin(batch.num_used, self._weights)
        for weight in weights:
            hooks: dict[int, Any] = weight._backward_hooks or {}  # pyright: ignore[reportAttributeAccessIssue]
            hooks.update({key: self._watched_hook(hook, of_weight=True) for key, hook in hooks.items()})
        if swaps:
            self._swapped.begin(batch, self._weights)
        else:
            self._swapped.end()  # a step before may have raised
        self.drawn.begin(weights)

    def end(self, *, draws: bool) -> None:
        """Compute with no swapped images any more, after the step; ``draws`` is True if it has drawn random numbers."""
        self._is_watching = False
        self.depends_on_places = not draws and self._swapped.depends_on_places
        self.tables = self._swapped.tables if self._num_images > 1 else None
        self._swapped.end()

    def follow_mean(self, numerator: Tensor, mean: Tensor) -> None:
        """Follow a ``mean`` that the run has computed of a ``numerator``, while this is paused."""
        inherited = self._marks.get(numerator, set()) - {"sum", "count", "selected"}
        self._marks[mean] = {*inherited, "now", "statistic"}
        self.numbers.follow_computed(numerator, mean)
        self._swapped.scale(numerator, mean)

    def call_compiled(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what the compiled ``function`` of a network returns for the arguments.

        What it computes within is not followed. Its results count as computed from each image alone.
        """
        with _pop_mode_temporarily():  # it would be compiled again for a step that is watched
            result = function(*args, **options)
        sources = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor) and leaf in self._marks]
        for leaf in tree_leaves(result) if sources else ():
            if isinstance(leaf, Tensor):
                self._marks[leaf] = set().union(*(self._marks[source] for source in sources))
                self._swapped.keep_rows(sources, leaf)
                for source in sources:
                    self.numbers.follow_computed(source, leaf)
        return result

    def call_scripted(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return what a ``function`` of TorchScript returns for the arguments, and follow it as one of torch's."""
        if not torch._C._is_torch_function_mode_enabled():  # within a call that is followed
            return function(*args, **options)
        with _pop_mode_temporarily():
            return self.__torch_function__(function, (), args, options)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what a call of torch's function ``func`` does, and follow it; torch calls this for each call."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.is_paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")

        self.has_backward |= name == "backward" or func is torch.autograd.grad
        if name == "backward":  # of a tensor, or torch.autograd.backward of several
            self._report_on(self._weighted_losses(types, args, kwargs))
        if name == "register_hook" and len(args) == 2:
            args = args[0], self._watched_hook(args[1], of_weight=id(args[0]) in self._weights)
        if name == "__iter__" and args[0] in self._marks and args[0].ndim:  # what it gives cannot be seen
            return iter(self.__torch_function__(Tensor.unbind, types, args))

        num_gathers = gather.num_backwards
        result = self._swapped.call(func, name, args, kwargs)
        leaves = tree_leaves((args, kwargs))  # once for numbers and marks, because it takes longest
        # A buffer that each step writes anew depends on what is written alone, also if a part of it is written whole.
        if (anew := self._written_anew(name, args, kwargs)) is not None:
            leaves = [leaf for leaf in leaves if leaf is not anew]
            buffer = anew if anew._base is None else anew._base
            for tensor in (anew, buffer):
                self._marks.pop(tensor, None)
                self.drawn.forget(tensor)
        self.numbers.follow(name, args, leaves, result, sys._getframe(1))
        # The result depends on the batch if an argument does, unless that gives only its type or shape.
        inputs = tree_leaves(args[:1]) if name in LIKE_ANOTHER else leaves
        sources = [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf in self._marks]
        if is_collective(func):  # its result is the same on all workers
            for source in sources:
                del self._marks[source]
            return result
        if name in ("__bool__", "item") and sources and self._is_decision(sources[0]):
            self.numbers.note_decision(result, sys._getframe(1))
        elif name == "item" and isinstance(result, float) and sources and len(rows_of(self._marks[sources[0]])) != 1:
            return ComparedNumber(result, self._note_comparison)
        call = Call(name, args, kwargs, sources, args[0] if name == "__setitem__" else result, self._num_images)
        has_gathered = gather.num_backwards > num_gathers
        self._mark_result(func, call, leaves, sys._getframe(1), has_gathered=has_gathered)
        return result

    def _mark_result(self, func: Any, call: Call, leaves: list[Any], frame: FrameType, *, has_gathered: bool) -> None:
        """Mark what a ``call`` of torch's function ``func`` in ``frame`` has returned or written.

        ``leaves`` are all its arguments, and ``has_gathered`` is True if gradients have passed ``run.gather`` in it.
        """
        name, args, sources = call.name, call.args, call.sources
        if call.num_images > 1:
            with searching(f"which numbers {name} draws or cuts out"):
                self.drawn.follow(call, leaves)

        # A new tensor may be filled part by part, as by a network that gets a few images at once.
        if name == "__setitem__" and is_part_of_rows(args[0], args[1], call.num_images):
            if args[0] in self._marks and "filled" not in self._marks[args[0]]:
                self._marks[args[0]].add("placed")
            elif sources and id(args[0]) not in self._weights:
                self._marks[args[0]] = {"filled"}
                sources.append(args[0])

        if func is torch.autograd.grad:
            self._follow_gradients(args, call.kwargs, call.result)
            for gradient in tree_leaves(call.result) if has_gathered else ():
                if isinstance(gradient, Tensor):
                    self._marks[gradient] = {"now", "gathered"}
        elif name == "__get__" and func == _GRAD:
            if isinstance(call.result, Tensor) and self._has_mean_loss and self._is_of_images(args[0]):
                self._marks[call.result] = {"now", "scaled"}
            elif self._rows_of_losses and id(args[0]) in self._weights and users_call(frame):
                self._report(GRADIENTS)
                self._rows_of_losses.clear()  # their sum has a note already
        elif sources and call.num_images > 1 and name not in NEW_TENSORS:
            if func is F.batch_norm and call.argument(5, "training"):
                raise UsageError(
                    "A network that is not prepared has batch norm in training mode, which normalises with one "
                    "worker's images, or one that is prepared calls F.batch_norm by itself: give it to run.prepare, "
                    "with a layer such as nn.BatchNorm2d, or call its eval() if it is to stay as it is; or train on "
                    "one worker."
                )
            with searching(f"what the result of {name} depends on"):
                marks = self._rules.marks_of(call)
                for leaf in tree_leaves(call.result):
                    if isinstance(leaf, Tensor) and id(leaf) not in self._weights:
                        self._marks[leaf] = marks - (set() if leaf.is_floating_point() else {"scaled", "inverse"})
                self._follow_single_numbers(call)

    def _watched_hook(self, hook: Callable[[Tensor], Any], *, of_weight: bool) -> Callable[[Tensor], Any]:
        """Return a user's ``hook`` of a gradient, which is watched in those steps that are followed."""
        weights = self._weights if of_weight else None
        return watched_hook(hook, lambda: self._report(HOOK), lambda: self._is_watching, weights)

    def _weighted_losses(self, types: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the losses that a backward with these arguments differentiates.

        That of several numbers is their sum, weighted by the gradient that the backward gets for them.
        """
        losses = tree_leaves((args[:1], kwargs.get("tensors", ())))
        gradients = tree_leaves((args[1:2], kwargs.get("gradient", ()), kwargs.get("grad_tensors", ())))
        for number, (loss, gradient) in enumerate(zip(losses, gradients, strict=False)):
            if isinstance(gradient, Tensor) and loss.numel() > 1:
                is_sum = bool((gradient == 1).all())
                call = (torch.sum, types, (loss,)) if is_sum else (torch.tensordot, types, (loss, gradient, loss.ndim))
                losses[number] = self.__torch_function__(*call)
        return [loss for loss in losses if isinstance(loss, Tensor)]

    def _report_on(self, losses: list[Tensor]) -> None:
        """Report the marks of ``losses`` whose backward the loop calls."""
        self.numbers.note_losses(losses)
        marks = set[str]().union(*(self._marks.get(loss, ()) for loss in losses))
        self._has_mean_loss |= self._has_mean_among(losses)
        self._swapped.add_losses(losses)
        if self._swapped.compares_images and "other mean" not in marks:
            marks.add("compares")
        if "scaled" in marks:  # then the loss is neither a sum nor a mean over images
            marks.discard("sum")
        if "gathered" in marks:  # the loop has gathered rows already, only not those of its images
            marks.discard("compares")
        if self._has_compared and rows_of(marks):
            marks.add("compares")
        if self._swapped.is_swapping and len(rows_of(marks)) == 1:
            self._rows_of_losses |= rows_of(marks)
            self._has_shares |= "share" in marks
            if len(self._rows_of_losses) == self._num_images:
                marks |= set() if self._has_shares else {"sum"}
                self._rows_of_losses.clear()
        if "kept" in marks and "now" not in marks:
            marks = {"late"}
        for mark in marks:
            if mark in NOTES_ON_LOSSES:
                self._report(NOTES_ON_LOSSES[mark])

    def _written_anew(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return the tensor, perhaps a part of another one, all of whose rows for the images a call writes; or None."""
        if name == "__setitem__":
            return args[0] if is_all_rows(args[0], args[1], self._num_images) else None
        written = args[0] if name in ("copy_", "zero_", "fill_") else kwargs.get("out")
        return written if isinstance(written, Tensor) and id(written) not in self._weights else None

    def _follow_gradients(self, args: Any, kwargs: Any, gradients: Any) -> None:
        """Mark ``gradients`` of weights and the like as statistics, because they are sums over this worker's images.

        Those of the loss of a single image belong to it. Gradients of images, and of tensors computed from them, have a
        row for each image. They get a mark if they are those of a mean over images. The arguments are those of
        ``torch.autograd.grad``.
        """
        outputs = [leaf for leaf in tree_leaves((args[:1], kwargs.get("outputs"))) if isinstance(leaf, Tensor)]
        inputs = [leaf for leaf in tree_leaves((args[1:2], kwargs.get("inputs"))) if isinstance(leaf, Tensor)]
        marks = set().union(*(self._marks.get(output, ()) for output in outputs)) - {"sum"}
        if self._num_images < 2 or not any(output in self._marks for output in outputs):
            return
        is_of_mean = self._has_mean_among(outputs)
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if gradient is None:
                continue
            if not self._is_of_images(tensor):
                is_of_one = len(rows_of(marks)) == 1
                self._marks[gradient] = {*marks} if is_of_one else {*marks, "gradient"}
            elif is_of_mean:
                self._marks[gradient] = {"now", "scaled"}

    def _has_mean_among(self, losses: list[Tensor]) -> bool:
        """Return whether one of ``losses`` is a mean over this worker's images."""
        of_losses = (self._marks.get(loss, set()) for loss in losses if loss.ndim == 0)
        return self._num_images > 1 and any("statistic" in marks and "sum" not in marks for marks in of_losses)

    def _is_of_images(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is computed from the batch, or has a row for each image, as an attack on it has."""
        if tensor in self._marks or id(tensor) in self._weights:
            return tensor in self._marks
        has_shape = tensor.shape[1:] == self._image_shape and has_rows(tensor, self._num_images)
        return has_shape or tensor.shape[:1] == (self._num_images,)

    def _follow_single_numbers(self, call: Call) -> None:
        """Mark what Python takes out of the rows of a tensor, and note whether it compares numbers of two images."""
        name, sources, result = call.name, call.sources, call.result
        if name in COMPARISONS and len(sources) == 2 and result.ndim == 0:
            first, second = (rows_of(self._marks[source]) for source in sources)
            self._has_compared |= bool(first and second and first != second)
            return

        # Rows of a vector are numbers of images. Those of another tensor may be classes, of which there are as many:
        # swapped images show it.
        rows = single_rows(name, call.args, call.kwargs, result)
        if not rows or not has_rows(sources[0], self._num_images):
            return
        if sources[0].ndim > 1 and len(sources[0]) > self._num_images:
            return
        if sources[0].ndim > 1 and self._swapped.is_swapping and not self._swapped.follows_rows(sources[0]):
            return
        for part, row in rows:
            self._marks[part] = {*self._marks[part], f"row {row % self._num_images}"}

    def _note_comparison(self, is_true: bool, frame: FrameType) -> None:
        """Note what Python's comparison of a number in ``frame`` returned, if the step is one that is followed."""
        if self._is_watching and not self.is_paused:
            self.numbers.note_decision(is_true, frame)

    def _is_decision(self, truth: Tensor) -> bool:
        """Return whether ``truth``, which Python asks for, compares a number of several images with a limit.

        A guard against an empty selection, as in ``if mask.any():``, is none: nothing would be added to the loss.
        """
        marks = self._marks[truth]
        return truth.dtype == torch.bool and "guard" not in marks and len(rows_of(marks)) != 1
