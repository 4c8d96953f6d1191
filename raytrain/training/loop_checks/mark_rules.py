"""Says which marks the result of a call of torch has: those of its arguments, and those that the call adds.

A tensor that depends on the batch has a set of marks. All tensors that are computed from it inherit them:

- ``statistic``: the tensor is a number that is a sum or a mean over the images. ``gradient``: it is a gradient of
  weights, which is one, too. Both are harmless alone, because a loss may be linear in them.
- ``compares``: a gradient is used in a way that is not linear, or a number of several images in a function that bends.
  The loss has this mark, too, if it changes with swapped images in a way in which a mean over images does not
  (:mod:`raytrain.training.loop_checks.swapped_images`), as it does if images are compared with each other.
- ``columns``: the tensor has means over the images, as of ``mean(0)``, perhaps as many as there are images.
- ``sum``: the tensor is a sum over images that has not been divided by their number.
- ``share``: the tensor has been divided by the number of images, so that the sum of its rows is a mean.
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
- ``ordered``: the tensor is a vector of the images' numbers by their size, or of their places in that order.
- ``guard``: the tensor says whether there is any of something, or compares a number with 0 or 1.
- ``row 3``: the tensor depends on that row of a tensor with a row for each image, which Python has taken out of it, as
  a loop over the images does. This is harmless unless Python compares two of them, as ``sorted`` does, or adds up all
  of them.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from raytrain.training.loop_checks.rows_of_images import covers_alike, has_rows, is_part_of_rows
from raytrain.training.loop_checks.swapped_images import SwappedImages
from raytrain.training.loop_checks.torch_functions import (
    ADDITIONS,
    BENDS,
    COMPARISONS,
    CONTRACTIONS,
    DIVISIONS,
    JOINS,
    LINEAR,
    LOSSES,
    MULTIPLICATIONS,
    NORMS,
    PUT_BACK,
    SCALE_FREE,
    STATISTICS,
)


class Call(NamedTuple):
    """A call of a function of torch's, and what it has returned. ``sources`` are the arguments that have marks."""

    name: str
    args: Any
    kwargs: Any
    sources: list[Tensor]
    result: Any
    num_images: int  # of this worker

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument that may be given by its position or by its name."""
        return self.kwargs.get(name, self.args[position] if len(self.args) > position else default)

    @property
    def reduction(self) -> str:
        """What a loss of torch's makes of the losses of single images, as ``mean``, ``sum`` or ``none``."""
        if self.kwargs.get("size_average") is False:  # an older name of a sum
            return "none" if self.kwargs.get("reduce") is False else "sum"
        return self.kwargs.get("reduction", "mean")

    @property
    def all_have_marks(self) -> bool:
        """True if there is no tensor among the arguments but the sources."""
        return len(self.sources) == sum(isinstance(leaf, Tensor) for leaf in tree_leaves(self.args))

    @property
    def dims(self) -> list[int] | None:
        """The dimensions over which a sum or a mean goes, counted from 0; None for all of them."""
        dims = self.kwargs.get("axis", self.argument(1, "dim"))
        return None if dims is None else [dim % max(self.sources[0].ndim, 1) for dim in tree_leaves(dims)]

    @property
    def gives_one_number(self) -> bool:
        """True if the result is a tensor without dimensions."""
        return isinstance(self.result, Tensor) and self.result.ndim == 0


class MarkRules:
    """Rules by which the marks of a call's result follow from ``marks``, those of all tensors that are followed.

    ``swapped`` knows which of the tensors change with swapped images, ``batch_size`` is that of the global batch.

    Example::

        rules = MarkRules(marks, SwappedImages(), batch_size=64)
        marks[call.result] = rules.marks_of(call)
    """

    def __init__(self, marks: MutableMapping[Tensor, set[str]], swapped: SwappedImages, batch_size: int) -> None:
        self._marks, self._swapped, self._batch_size = marks, swapped, batch_size

    def marks_of(self, call: Call) -> set[str]:
        """Return the marks for the result of a call: those of all its sources, and those that it adds or takes away."""
        marks: set[str] = set().union(*(self._marks[source] for source in call.sources))
        if not all("columns" in self._marks[source] for source in call.sources):
            marks.discard("columns")
        # One factor of a product, or the dividend, is divided by the number of images; of a sum, all terms are.
        num_shares = sum("share" in self._marks[source] for source in call.sources)
        is_product = call.name in MULTIPLICATIONS | DIVISIONS | CONTRACTIONS
        if num_shares != (1 if is_product else len(call.sources)) or "share" in self._marks_of_divisor(call):
            marks.discard("share")
        self._mark_statistics(call, marks)
        self._mark_selections(call, marks)
        self._mark_sums_and_means(call, marks)
        self._mark_products(call, marks)
        self._mark_scales(call, marks)
        return marks

    def _mark_statistics(self, call: Call, marks: set[str]) -> None:
        """Add ``statistic`` to the ``marks`` after a sum or a mean over images, ``compares`` after a use not linear."""
        is_mean = call.name in STATISTICS or LOSSES.fullmatch(call.name)
        if call.gives_one_number and is_mean and has_rows(call.sources[0], call.num_images):
            marks.add("statistic")
        is_mean_over_first = call.name in ("mean", "nanmean") and call.dims == [0]
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
        first, num_images = call.sources[0], call.num_images
        is_vector = first.ndim == 1 and has_rows(first, num_images)
        is_cut = call.name == "__getitem__" and is_part_of_rows(first, call.args[1], num_images)
        is_chosen = is_vector and (call.name in ("topk", "kthvalue") or (is_cut and "ordered" in self._marks[first]))
        marks.discard("ordered")
        if is_vector and call.name in ("sort", "argsort", "msort") and first.is_floating_point():
            marks.add("ordered")
        # Rows of a selection are of other images in the swapped order, so that a comparison row by row says nothing.
        have_places = (source for source in call.sources if not source.ndim or "selected" not in self._marks[source])
        if is_chosen or (call.name in BENDS and any(map(self._swapped.mixes, have_places))):
            marks.add("compares")

        # What is computed from the answer of a guard is none.
        marks.discard("guard")
        other = call.argument(1, "other")
        is_with_none = call.name in COMPARISONS and isinstance(other, (int, float)) and other in (0, 1)
        if call.name in ("any", "all") or is_with_none:
            marks.add("guard")

    def _mark_selections(self, call: Call, marks: set[str]) -> None:
        """Add ``selected`` to the ``marks`` if the number of the result's rows depends on the images."""
        # A number has no rows, such as one of labels.unique(), and rows that are put back where they were are complete.
        # So are selections that are joined to as many rows as there are images, such as those of a mask and of ~mask.
        result, first, num_images = call.result, call.sources[0], call.num_images
        is_put_back = call.name in PUT_BACK | JOINS and has_rows(result, num_images)
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
        are_numbers = call.name in JOINS and all(
            rows_of(self._marks[source]) and source.numel() == 1 for source in call.sources
        )
        if are_numbers and len(rows_of(marks)) < num_images:
            marks.add("selected")

    def _mark_sums_and_means(self, call: Call, marks: set[str]) -> None:
        """Add ``sum``, ``count`` and ``other mean`` to the ``marks``; a quotient is no sum any more."""
        # A number that adds up the images, or one for each column, is larger if the worker has more of them. The sum of
        # a mask that covers equally many numbers of each image counts the images.
        first = call.sources[0]
        is_sum = call.name in ("sum", "nansum") or call.reduction == "sum"
        is_over_images = has_rows(first, call.num_images) and "columns" not in self._marks[first]
        if call.name not in LINEAR:  # such as a loss of what was divided
            marks.discard("share")
        adds_up = call.gives_one_number and is_sum and ("selected" in marks or is_over_images)
        adds_up |= self._adds_last_image(call, rows_of(marks))
        # Of a sum over some dimensions, or of several vectors in a stack, swapped images show whether one of the
        # dimensions has the images, or only as many numbers. A contraction is a sum of products, and a norm its root.
        if call.name in ("sum", "nansum"):
            dims = range(first.ndim) if call.dims is None else call.dims
            adds_up |= any(self._swapped.follows_rows(first, dim) for dim in dims)
        contracts = call.name in CONTRACTIONS | NORMS and call.gives_one_number and call.all_have_marks
        contracts = contracts and any(map(self._swapped.follows_rows, call.sources))
        if (adds_up or contracts) and "share" not in marks:
            marks.add("count" if adds_up and covers_alike(first) else "sum")

        # A mean over selected rows, such as a loss of torch, weights the workers wrongly. A mean over other dimensions
        # keeps the rows.
        is_mean_loss = LOSSES.fullmatch(call.name) and call.reduction in ("mean", "batchmean")
        is_mean_over_rows = call.name == "mean" and (call.dims is None or 0 in call.dims)
        if (is_mean_loss or is_mean_over_rows) and "selected" in marks:
            marks.add("other mean")

        # The same holds for a cross entropy with class weights, which divides by their sum, or with labels left out. If
        # the targets are chances of the classes, it divides by the number of images.
        if call.name in ("cross_entropy", "nll_loss") and call.reduction == "mean":
            target, weight = call.argument(1, "target"), call.argument(2, "weight")
            has_classes = isinstance(target, Tensor) and not target.is_floating_point()
            left_out = target == call.kwargs.get("ignore_index", -100)
            if has_classes and (weight is not None or (bool(left_out.any()) and not covers_alike(left_out))):
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
        is_number = isinstance(divisor, Tensor) and divisor.ndim == 0 and divisor not in self._marks
        is_by_images = (is_number or is_of_images) and bool(divisor == call.num_images)
        if is_by_images and not marks & {"sum", "selected"}:
            marks ^= {"share"}  # what is divided twice is no share any more
        if isinstance(divisor, Tensor) or is_of_images or "other mean" in marks:
            marks -= {"sum", "count"}

    def _adds_last_image(self, call: Call, rows: set[str]) -> bool:
        """Return whether a call adds a number of one image to those of all others, as `sum(losses)` in Python does.

        ``rows`` are the marks of the images that the result depends on. False without swapped images, by which rows
        are known to be those of images.
        """
        if call.name not in ADDITIONS - JOINS or not call.gives_one_number or len(rows) < call.num_images:
            return False
        of_sources = [rows_of(self._marks[source]) for source in call.sources]
        return self._swapped.is_swapping and rows not in of_sources and 1 in map(len, of_sources)

    def _mark_products(self, call: Call, marks: set[str]) -> None:
        """Add ``compares`` to the ``marks`` of a product or a quotient of two numbers of several images each.

        It is not linear in them, even if the loss does not show it, as loss / loss.detach() does not, which is always
        1. A mean over something else than images has a note of its own.
        """
        if call.name not in MULTIPLICATIONS | DIVISIONS or len(call.sources) < 2 or "other mean" in marks:
            return
        are_of_several = not any(has_rows(source, call.num_images) for source in call.sources)
        if are_of_several and all(map(self._swapped.mixes, call.sources)):
            marks.add("compares")

    def _mark_scales(self, call: Call, marks: set[str]) -> None:
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

    def _marks_of_divisor(self, call: Call) -> set[str]:
        """Return the marks of the tensor by which the call divides; none if it divides by a number, or not at all."""
        divisor = call.argument(1, "other") if call.name in DIVISIONS else None
        return self._marks.get(divisor, set()) if isinstance(divisor, Tensor) else set()


def rows_of(marks: set[str]) -> set[str]:
    """Return those of ``marks`` that say of which single images a number is."""
    return {mark for mark in marks if mark.startswith("row ")}
