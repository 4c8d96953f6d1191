"""Follows what a loop computes from a batch through its calls of torch, and marks what workers would do differently.

:class:`WatchedCalls` sees each call of a step that :mod:`raytrain.training.loop_checks.loop_watch` watches, and follows
all that is computed from the batch, from tensor to tensor.

A tensor that depends on the batch has a set of marks. All tensors that are computed from it inherit them:

- ``statistic``: the tensor is a number that is a sum or a mean over the images. ``gradient``: it is a gradient of
  weights, which is one, too. Both are harmless alone, because a loss may be linear in them.
- ``compares``: a gradient is used in a way that is not linear, or a number of several images in a function that bends.
  The loss has this mark, too, if it changes with swapped images in a way in which a mean over images does not
  (:mod:`raytrain.training.loop_checks.swapped_images`), as it does if images are compared with each other.
- ``columns``: the tensor has means over the images, as of ``mean(0)``, perhaps as many as there are images.
- ``sum``: the tensor is a sum over images that has not been divided by their number.
- ``count``: the tensor is the sum of a mask that covers equally many numbers of each image. It may be a divisor.
- ``selected``: a mask has selected rows, whose number differs between workers.
- ``other mean``: the tensor is a mean over something other than images.
- ``scaled``: the tensor is a gradient of a mean over the worker's images, with a row for each of them, or grows with
  one: with fewer images it is larger. Its signs and directions are harmless. ``inverse``: the tensor is divided by one.
- ``gathered``: the tensor is a gradient that has passed ``run.gather``, and so belongs to this worker's rows alone.
- ``kept``: the tensor was computed in an earlier step. ``now``: it depends on the batch of this one. A loss with the
  first alone is of a batch that is over.
- ``placed``: rows were written whose places are a part of the batch, such as its first half. ``filled``: the first
  such write was into a new tensor, which may be filled part by part.
- ``guard``: the tensor says whether there is any of something, or compares a number with 0 or 1.
- ``row 3``: the tensor depends on that number of a vector with a number for each image, which Python has taken out of
  it, as a loop over the vector does. This is harmless unless Python compares two of them, as ``sorted`` does.

A note is made only if the loss has a mark when its backward is called, because other uses of a tensor, such as in a
metric, change no weight (:mod:`raytrain.training.loop_checks.watch_notes`). Marks without a note only lead to others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.errors import UsageError
from raytrain.training.batches.batch import Batch
from raytrain.training.exact import gather
from raytrain.training.loop_checks.hooks_of_gradients import watched_hook
from raytrain.training.loop_checks.loop_numbers import LoopNumbers
from raytrain.training.loop_checks.rows_of_images import (
    covers_alike,
    has_rows,
    is_all_rows,
    is_part_of_rows,
    parts_of_rows,
)
from raytrain.training.loop_checks.searching import searching
from raytrain.training.loop_checks.swapped_images import SwappedImages, is_collective
from raytrain.training.loop_checks.torch_functions import (
    ADDITIONS,
    BENDS,
    COMPARISONS,
    DIVISIONS,
    JOINS,
    LIKE_ANOTHER,
    LINEAR,
    LOSSES,
    MULTIPLICATIONS,
    NEW_TENSORS,
    PUT_BACK,
    SCALE_FREE,
    STATISTICS,
    TAKE_WEIGHTS,
)
from raytrain.training.loop_checks.watch_notes import HOOK, NOTES_ON_LOSSES

_MAX_NUMBERS_PER_IMAGE = 16  # in a vector of random numbers, which otherwise may be for weights
_BY_PLACE = -1  # stands for a seed: a row of a tensor of the loop's for each place among this worker's images
_GRAD = cast(Any, Tensor).grad.__get__  # what reads a tensor's gradient


class _Call(NamedTuple):
    """A call of a function of torch's, and what it has returned. ``sources`` are the arguments that have marks."""

    name: str
    args: Any
    kwargs: Any
    sources: list[Tensor]
    result: Any
    num_images: int  # of this worker; at least 2

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by its position or by its name."""
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)

    @property
    def gives_one_number(self) -> bool:
        """True if the result is a tensor without dimensions."""
        return isinstance(self.result, Tensor) and self.result.ndim == 0


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
        self._batch_size, self._rank = batch_size, rank  # of the global batch, of this worker
        self._num_images = 0  # of this worker
        self.seeds: set[int] = set()  # of generators that have drawn as many numbers as there are images, or a multiple
        self._marks: Any = WeakIdKeyDictionary()  # of tensors that depend on the batch: a set of words
        # Tensors that depend on random numbers of the loop's generators which have the shape of a weight: the seeds.
        self._drawn: Any = WeakIdKeyDictionary()
        self._buffers: Any = WeakIdKeyDictionary()  # tensors into which the loop has written images, as keys
        self._weights: set[int] = set()
        self._shapes_of_weights: set[torch.Size] = set()
        self._has_compared = False  # True if Python has compared numbers of two images in this step
        self._has_mean_loss = False  # True if the loss of a backward of this step was a mean over images
        self._image_shape = torch.Size()  # (C, H, W)
        self.numbers = LoopNumbers()  # that enter the losses from outside of torch's calls
        self._swapped = SwappedImages()

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
        self._num_images, self._has_compared = batch.num_used, False
        self._has_mean_loss, self._image_shape = False, batch.images.shape[1:]
        self._weights, self._shapes_of_weights = set(map(id, weights)), {weight.shape for weight in weights}
        self.numbers.begin(batch.num_used, self._weights)
        for weight in weights:
            hooks: dict[int, Any] = weight._backward_hooks or {}  # pyright: ignore[reportAttributeAccessIssue]
            hooks.update({key: self._watched_hook(hook, of_weight=True) for key, hook in hooks.items()})
        if swaps:
            self._swapped.begin(batch, self._weights)
        else:
            self._swapped.end()  # a step before may have raised
        self.seeds.clear()

    def end(self, *, draws: bool) -> None:
        """Compute with no swapped images any more, after the step; ``draws`` is True if it has drawn random numbers."""
        self._is_watching = False
        if not draws and self._swapped.depends_on_places:
            self._report(NOTES_ON_LOSSES["placed"])
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what a call of torch's function ``func`` does, and follow it; torch calls this for each call."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.is_paused:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")

        if name == "backward":  # of a tensor, or torch.autograd.backward of several
            self._report_on(
                [leaf for leaf in tree_leaves((args[:1], kwargs.get("tensors"))) if isinstance(leaf, Tensor)]
            )
        if name == "register_hook" and len(args) == 2:
            args = args[0], self._watched_hook(args[1], of_weight=id(args[0]) in self._weights)
        if name == "__iter__" and args[0] in self._marks and args[0].ndim == 1:  # what it gives cannot be seen
            return iter(self.__torch_function__(Tensor.unbind, types, args))

        num_gathers = gather.num_backwards
        result = self._swapped.call(func, name, args, kwargs)
        leaves = tree_leaves((args, kwargs))  # once for numbers and marks, because it takes longest
        # A buffer that each step writes anew depends on what is written alone, also if a part of it is written whole.
        if (anew := self._written_anew(name, args, kwargs)) is not None:
            leaves = [leaf for leaf in leaves if leaf is not anew]
            buffer = anew if anew._base is None else anew._base
            self._buffers[buffer] = True
            for tensor in (anew, buffer):
                self._marks.pop(tensor, None)
                self._drawn.pop(tensor, None)
        self.numbers.follow(name, args, leaves, result, sys._getframe(1))
        # The result depends on the batch if an argument does, unless that gives only its type or shape.
        inputs = tree_leaves(args[:1]) if name in LIKE_ANOTHER else leaves
        sources = [leaf for leaf in inputs if isinstance(leaf, Tensor) and leaf in self._marks]
        if is_collective(func):  # its result is the same on all workers
            for source in sources:
                del self._marks[source]
            return result
        result_or_written = args[0] if name == "__setitem__" else result
        parts: list[tuple[Tensor, int]] = []
        with searching(f"which rows {name} cuts out"):
            parts = parts_of_rows(name, args, result) if self._num_images > 1 and not sources else []
            for part, first_row in parts:
                if self._is_by_place(args[0], part, first_row):
                    self._drawn[part] = {_BY_PLACE}
        self._follow_drawn(name, kwargs.get("generator"), sources, leaves, result_or_written, parts)
        if name == "__bool__" and sources and self._is_decision(sources[0]):
            self.numbers.note_decision(result, sys._getframe(1))
        if name == "__setitem__" and is_part_of_rows(args[0], args[1], self._num_images):
            # A new tensor may be filled part by part, as by a network that gets a few images at once.
            if args[0] in self._marks and "filled" not in self._marks[args[0]]:
                self._marks[args[0]].add("placed")
            elif sources and id(args[0]) not in self._weights:
                self._marks[args[0]] = {"filled"}
                sources.append(args[0])
        if func is torch.autograd.grad:
            self._follow_gradients(args, kwargs, result)
            if gather.num_backwards > num_gathers:
                for gradient in tree_leaves(result):
                    if isinstance(gradient, Tensor):
                        self._marks[gradient] = {"now", "gathered"}
        elif name == "__get__" and func == _GRAD:
            if isinstance(result, Tensor) and self._has_mean_loss and self._is_of_images(args[0]):
                self._marks[result] = {"now", "scaled"}
        elif sources and self._num_images > 1 and name not in NEW_TENSORS:
            call = _Call(name, args, kwargs, sources, result_or_written, self._num_images)
            if func is F.batch_norm and call.argument(5, "training"):
                raise UsageError(
                    "A network that is not prepared has batch norm in training mode, which normalises with one "
                    "worker's images, or one that is prepared calls F.batch_norm by itself: give it to run.prepare, "
                    "with a layer such as nn.BatchNorm2d, or call its eval() if it is to stay as it is; or train on "
                    "one worker."
                )
            with searching(f"what the result of {name} depends on"):
                marks = self._marks_of(call)
                for leaf in tree_leaves(result_or_written):
                    if isinstance(leaf, Tensor) and id(leaf) not in self._weights:
                        self._marks[leaf] = marks - (set() if leaf.is_floating_point() else {"scaled", "inverse"})
                self._follow_single_numbers(name, args, sources, result)
        return result

    def _watched_hook(self, hook: Callable[[Tensor], Any], *, of_weight: bool) -> Callable[[Tensor], Any]:
        """Return a user's ``hook`` of a gradient, which is watched in those steps that are followed."""
        weights = self._weights if of_weight else None
        return watched_hook(hook, lambda: self._report(HOOK), lambda: self._is_watching, weights)

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
        if self._has_compared and _rows_of(marks):
            marks.add("compares")
        if "kept" in marks and "now" not in marks:
            marks = {"late"}
        for mark in marks:
            if mark in NOTES_ON_LOSSES:
                self._report(NOTES_ON_LOSSES[mark])

    def _follow_drawn(
        self,
        name: str,
        generator: Any,
        sources: list[Tensor],
        leaves: list[Any],
        result: Any,
        parts: list[tuple[Tensor, int]],
    ) -> None:
        """Note the seed of a ``generator`` of the loop's that draws a number, or several, for each image.

        Noise with the shape of a weight may be for that weight, and a long vector for all weights: it counts once it
        meets images, or what is computed from them, in a call of ``name``. Noise that was added to a weight meets
        images in layers, and a penalty on the weights meets the loss: neither counts. ``sources`` are those of the
        ``leaves``, of all arguments, that depend on the batch, ``parts`` those of the result that are cut out of one.
        """
        is_drawn = isinstance(result, Tensor) and self._num_images > 1 and has_rows(result, self._num_images)
        if is_drawn and generator is not None:
            is_long = result.ndim == 1 and len(result) > _MAX_NUMBERS_PER_IMAGE * self._num_images
            is_for_all = len(result) > self._num_images  # perhaps, so that each worker cuts out its own part
            if not (is_long or is_for_all) and result.shape not in self._shapes_of_weights:
                self.seeds.add(generator.initial_seed())
            elif id(result) not in self._weights:
                self._drawn[result] = {generator.initial_seed()}
        if not len(self._drawn):
            return
        drawn = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf in self._drawn]
        seeds = set[int]().union(*(self._drawn[tensor] for tensor in drawn))
        if sources and name not in TAKE_WEIGHTS and any(tensor.ndim for tensor in (*drawn, *sources)):
            self.seeds |= seeds - {_BY_PLACE}
            if _BY_PLACE in seeds and name not in JOINS and self._meets_rows(drawn, sources, result):
                self._report(NOTES_ON_LOSSES["placed"])
        elif seeds and not sources:
            own = {id(part) for part, first_row in parts if self._may_be_own_part(part, first_row)}
            for leaf in [result] if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(leaf, Tensor) and id(leaf) not in self._weights | own:
                    self._drawn[leaf] = seeds

    def _meets_rows(self, drawn: list[Tensor], sources: list[Tensor], result: Any) -> bool:
        """Return whether a call takes a row of one of ``drawn`` and a row of ``sources`` with an image together.

        An outer product, whose ``result`` has more dimensions, takes each row with each image. An index is no number.
        """
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return False
        shapes = {(tensor.ndim, tensor.shape[:1]) for tensor in drawn if 0 < tensor.ndim >= result.ndim}
        return any((rows.ndim, rows.shape[:1]) in shapes and self._swapped.follows_rows(rows) for rows in sources)

    def _is_by_place(self, whole: Any, part: Tensor, first_row: int) -> bool:
        """Return whether a call has cut ``part`` from ``whole``, with numbers for the places of this worker's images.

        Such is ``noise[:len(images)]``, which begins at the first row on each worker.
        """
        if not part.is_floating_point() or first_row or not self._rank or len(part) != self._num_images:
            return False
        is_known = isinstance(whole, Tensor) and (id(whole) in self._weights or whole in self._buffers)
        return not is_known and bool((part != part[:1]).any())

    def _may_be_own_part(self, part: Tensor, first_row: int) -> bool:
        """Return whether ``part`` of what is drawn for all workers' images may be that of this worker's images."""
        return len(part) == self._num_images and bool(first_row) == bool(self._rank)

    def _written_anew(self, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """Return the tensor, perhaps a part of another one, all of whose rows for the images a call writes; or None."""
        if name == "__setitem__":
            return args[0] if is_all_rows(args[0], args[1], self._num_images) else None
        written = args[0] if name in ("copy_", "zero_", "fill_") else kwargs.get("out")
        return written if isinstance(written, Tensor) and id(written) not in self._weights else None

    def _follow_gradients(self, args: Any, kwargs: Any, gradients: Any) -> None:
        """Mark ``gradients`` of weights and the like as statistics, because they are sums over this worker's images.

        Gradients of images, and of tensors computed from them, have a row for each image. They get a mark if they are
        those of a mean over images. The arguments are those of ``torch.autograd.grad``.
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
                self._marks[gradient] = {*marks, "gradient"}
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

    def _follow_single_numbers(self, name: str, args: Any, sources: list[Tensor], result: Any) -> None:
        """Mark the numbers that Python takes out of a vector, and note whether it compares those of two images."""
        vector = sources[0]
        if vector.ndim == 1 and has_rows(vector, self._num_images):
            if name == "unbind":
                for row, number in enumerate(result):
                    self._marks[number].add(f"row {row % self._num_images}")
            elif name == "__getitem__" and isinstance(args[1], int):
                self._marks[result].add(f"row {args[1] % self._num_images}")
        elif name in COMPARISONS and len(sources) == 2 and result.ndim == 0:
            first, second = (_rows_of(self._marks[source]) for source in sources)
            self._has_compared |= bool(first and second and first != second)

    def _is_decision(self, truth: Tensor) -> bool:
        """Return whether ``truth``, which Python asks for, compares a number of several images with a limit.

        A guard against an empty selection, as in ``if mask.any():``, is none: nothing would be added to the loss.
        """
        marks = self._marks[truth]
        return truth.dtype == torch.bool and "guard" not in marks and not _rows_of(marks)

    def _marks_of(self, call: _Call) -> set[str]:
        """Return the marks for the result of a call: those of all its sources, and those that it adds or takes away."""
        marks: set[str] = set().union(*(self._marks[source] for source in call.sources))
        if not all("columns" in self._marks[source] for source in call.sources):
            marks.discard("columns")
        self._mark_statistics(call, marks)
        self._mark_selections(call, marks)
        self._mark_sums_and_means(call, marks)
        self._mark_scales(call, marks)
        return marks

    def _mark_statistics(self, call: _Call, marks: set[str]) -> None:
        """Add ``statistic`` to the ``marks`` after a sum or a mean over images, ``compares`` after a use not linear."""
        is_mean = call.name in STATISTICS or LOSSES.fullmatch(call.name)
        if call.gives_one_number and is_mean and has_rows(call.sources[0], call.num_images):
            marks.add("statistic")
        is_mean_over_first = call.name in ("mean", "nanmean") and call.argument(1, "dim") in (0, (0,), [0])
        if is_mean_over_first and has_rows(call.sources[0], call.num_images):
            marks.add("columns")

        # A number of several images is harmless as long as the loss is linear in it, because the mean over all workers'
        # images is the mean of the workers' means. Swapped images show whether the loss is linear, but not if it bends
        # elsewhere, such as at a bound that is not reached yet, nor for gradients, which have no variants.
        has_gradients = any("gradient" in self._marks[source] for source in call.sources)
        is_product = len(call.sources) > 1 and call.name not in ADDITIONS
        if has_gradients and (call.name not in LINEAR or is_product):
            marks.add("compares")
        # The largest of several images are chosen by a comparison, even if as many of them are in both groups.
        chooses = call.name in ("topk", "kthvalue") and call.sources[0].ndim == 1
        is_chosen = chooses and has_rows(call.sources[0], call.num_images)
        if is_chosen or (call.name in BENDS and any(map(self._swapped.mixes, call.sources))):
            marks.add("compares")

        # What is computed from the answer of a guard is none.
        marks.discard("guard")
        other = call.argument(1, "other")
        is_with_none = call.name in COMPARISONS and isinstance(other, (int, float)) and other in (0, 1)
        if call.name in ("any", "all") or is_with_none:
            marks.add("guard")

    def _mark_selections(self, call: _Call, marks: set[str]) -> None:
        """Add ``selected`` to the ``marks`` if the number of the result's rows depends on the images."""
        # A number has no rows, such as one of labels.unique(), and rows that are put back where they were are complete.
        result, first, num_images = call.result, call.sources[0], call.num_images
        is_put_back = call.name in PUT_BACK and has_rows(result, num_images)
        is_of_selection = any(source.ndim and "selected" in self._marks[source] for source in call.sources)
        if isinstance(result, Tensor) and result.ndim and (is_put_back or not is_of_selection):
            marks.discard("selected")

        # A mask selects more rows on some workers than on others, and so do the indices of nonzero(), and what has
        # another number of rows with swapped images. A mask that selects equally many numbers of each image, as
        # one_hot(labels), does not. Of the rows of all workers, it may select this worker's own.
        indices = [leaf for leaf in tree_leaves(call.args[1:]) if isinstance(leaf, Tensor)]
        masks = [index for index in indices if index.dtype == torch.bool]
        is_by_mask = call.name in ("__getitem__", "masked_select") and not all(map(covers_alike, masks))
        gives_indices = call.name in ("nonzero", "argwhere") or (call.name == "where" and len(call.args) == 1)
        is_selection = is_by_mask or (gives_indices and not covers_alike(first))
        is_selection |= any(self._swapped.selects(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        if is_selection and not (first.ndim and len(first) > num_images and len(result) == num_images):
            marks.add("selected")

        # So does Python if it joins the numbers of some images alone, as after `sorted(losses, key=float)[-4:]`.
        are_numbers = call.name in JOINS and all(_rows_of(self._marks[source]) for source in call.sources)
        if are_numbers and len(_rows_of(marks)) < num_images:
            marks.add("selected")

    def _mark_sums_and_means(self, call: _Call, marks: set[str]) -> None:
        """Add ``sum``, ``count`` and ``other mean`` to the ``marks``; a quotient is no sum any more."""
        # A number that adds up the images, or one for each column, is larger if the worker has more of them. The sum of
        # a mask that covers equally many numbers of each image counts the images.
        first = call.sources[0]
        is_sum = call.name in ("sum", "nansum") or call.kwargs.get("reduction") == "sum"
        is_over_images = has_rows(first, call.num_images) and "columns" not in self._marks[first]
        is_over_first = call.name in ("sum", "nansum") and call.argument(1, "dim") in (0, (0,), [0])
        is_of_columns = is_over_first and self._swapped.follows_rows(first)  # its rows may be no images, only as many
        if is_of_columns or (call.gives_one_number and is_sum and ("selected" in marks or is_over_images)):
            marks.add("count" if covers_alike(first) else "sum")

        # A mean over selected rows, such as a loss of torch, weights the workers wrongly.
        is_mean_loss = LOSSES.fullmatch(call.name) and call.kwargs.get("reduction", "mean") in ("mean", "batchmean")
        if (call.name == "mean" or is_mean_loss) and "selected" in marks:
            marks.add("other mean")

        # The same holds for a cross entropy with class weights, which divides by their sum, or with labels left out.
        if call.name in ("cross_entropy", "nll_loss") and call.kwargs.get("reduction", "mean") == "mean":
            target, weight = call.argument(1, "target"), call.argument(2, "weight")
            has_classes = isinstance(target, Tensor) and target.ndim == 1 and not target.is_floating_point()
            ignored = call.kwargs.get("ignore_index", -100)
            if weight is not None or (has_classes and bool((target == ignored).any())):
                marks.add("other mean")

        # A quotient of two sums is a mean over something else, which the divisor counts. A sum that is divided by this
        # worker's number of images, or by a tensor, counts as a mean; divided by the global batch size, it is a sum.
        divisor = call.argument(1, "other")
        if call.name in MULTIPLICATIONS and isinstance(divisor, float) and divisor:  # as in 1 / len(images) * losses
            divisor = round(1 / divisor, 6)
        elif call.name not in DIVISIONS:
            return
        if "sum" in self._marks_of_divisor(call):
            marks.add("other mean")
        is_of_images = (
            not isinstance(divisor, Tensor) and divisor % call.num_images == 0 and divisor != self._batch_size
        )
        if marks >= {"sum", "selected"} and not is_of_images:  # such as the number of those that are selected
            marks.add("other mean")
        if isinstance(divisor, Tensor) or is_of_images or "other mean" in marks:
            marks -= {"sum", "count"}

    def _mark_scales(self, call: _Call, marks: set[str]) -> None:
        """Take ``scaled`` away from the ``marks`` if the scale of a gradient cancels; its inverse is ``inverse``."""
        of_divisor = self._marks_of_divisor(call)
        is_inverse = call.name in ("__rdiv__", "reciprocal", "rsqrt")

        # The scale cancels in a quotient, also in one that is a product with an inverse.
        if call.name in SCALE_FREE or (call.name in MULTIPLICATIONS and marks >= {"scaled", "inverse"}):
            marks -= {"scaled", "inverse"}
        elif "scaled" in marks and (is_inverse or "scaled" in of_divisor):
            marks.discard("scaled")
            dividend = call.sources[0]
            if is_inverse or dividend is call.argument(1, "other") or "scaled" not in self._marks[dividend]:
                marks.add("inverse")

    def _marks_of_divisor(self, call: _Call) -> set[str]:
        """Return the marks of the tensor by which the call divides; none if it divides by a number, or not at all."""
        divisor = call.argument(1, "other") if call.name in DIVISIONS else None
        return self._marks.get(divisor, set()) if isinstance(divisor, Tensor) else set()


def _rows_of(marks: set[str]) -> set[str]:
    """Return those of ``marks`` that say of which single images a number is."""
    return {mark for mark in marks if mark.startswith("row ")}
