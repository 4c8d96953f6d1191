"""Follows random numbers and weights by place, which a loop makes for the images, until they meet the images.

Both are numbers that a worker with other images would have to make otherwise. A generator of the loop's, with one seed
on all workers, gives the first images of each worker the same numbers. A cut such as ``weights[:len(images)]`` begins
at the first row on each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.training.loop_checks.mark_rules import Call
from raytrain.training.loop_checks.rows_of_images import has_rows, parts_of_rows
from raytrain.training.loop_checks.swapped_images import SwappedImages
from raytrain.training.loop_checks.torch_functions import JOINS, TAKE_WEIGHTS
from raytrain.training.loop_checks.watch_notes import NOTES_ON_LOSSES

_MAX_NUMBERS_PER_IMAGE = 16  # in a vector of random numbers, which otherwise may be for weights
_BY_PLACE = -1  # stands for a seed: a row of a tensor of the loop's for each place among this worker's images


class DrawnNumbers:
    """Follows tensors with random numbers, and with weights by place, through the calls of a loop.

    ``report`` gets the note on weights by place that meet images, ``swapped`` knows which tensors have a row for each
    image, and ``rank`` is that of this worker.

    Example::

        drawn = DrawnNumbers(print, SwappedImages(), rank=0)
        drawn.begin(weights)
        drawn.follow(call, leaves)
        drawn.seeds  # of generators that have drawn numbers for the images
    """

    def __init__(self, report: Callable[[str], None], swapped: SwappedImages, rank: int) -> None:
        self._report, self._swapped, self._rank = report, swapped, rank
        self.seeds: set[int] = set()  # of generators that have drawn as many numbers as there are images, or a multiple
        self._seeds_of: Any = WeakIdKeyDictionary()  # by tensor: seeds of those numbers that may yet meet images
        self._buffers: Any = WeakIdKeyDictionary()  # tensors into which the loop has written images, as keys
        self._weights: set[int] = set()
        self._shapes_of_weights: set[torch.Size] = set()

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Begin a step; ``weights`` are the parameters and buffers of all networks."""
        self._weights, self._shapes_of_weights = set(map(id, weights)), {weight.shape for weight in weights}
        self.seeds.clear()

    def forget(self, buffer: Tensor, written: Tensor) -> None:
        """Forget what ``buffer`` held, because the loop has written ``written`` anew, which is a part or all of it."""
        self._buffers[buffer] = True
        for tensor in (written, buffer):
            self._seeds_of.pop(tensor, None)

    def follow(self, call: Call, leaves: list[Any]) -> None:
        """Note the seed of a generator of the loop's that draws a number, or several, for each image.

        Noise with the shape of a weight may be for that weight, and a long vector for all weights: it counts once it
        meets images, or what is computed from them, in a ``call``. Noise that was added to a weight meets images in
        layers, and a penalty on the weights meets the loss: neither counts. ``leaves`` are all arguments of the call.
        """
        result, num_images, generator = call.result, call.num_images, call.kwargs.get("generator")
        parts = [] if call.sources else parts_of_rows(call.name, call.args, result)
        for part, first_row in parts:
            if self._is_by_place(call.args[0], part, first_row, num_images):
                self._seeds_of[part] = {_BY_PLACE}

        if generator is not None and isinstance(result, Tensor) and has_rows(result, num_images):
            is_long = result.ndim == 1 and len(result) > _MAX_NUMBERS_PER_IMAGE * num_images
            is_for_all = len(result) > num_images  # perhaps, so that each worker cuts out its own part
            if not (is_long or is_for_all) and result.shape not in self._shapes_of_weights:
                self.seeds.add(generator.initial_seed())
            elif id(result) not in self._weights:
                self._seeds_of[result] = {generator.initial_seed()}
        if not len(self._seeds_of):
            return

        # What has met images counts. What is computed without images inherits the seeds, except for a worker's own
        # part of the numbers for the images of all workers.
        drawn = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf in self._seeds_of]
        seeds = set[int]().union(*(self._seeds_of[tensor] for tensor in drawn))
        if call.sources and call.name not in TAKE_WEIGHTS and any(tensor.ndim for tensor in (*drawn, *call.sources)):
            self.seeds |= seeds - {_BY_PLACE}
            if _BY_PLACE in seeds and call.name not in JOINS and self._meet_rows(drawn, call):
                self._report(NOTES_ON_LOSSES["placed"])
        elif seeds and not call.sources:
            own_parts = {
                id(part)
                for part, first_row in parts
                if len(part) == num_images and bool(first_row) == bool(self._rank)  # all but worker 0 begin later
            }
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and id(leaf) not in self._weights | own_parts:
                    self._seeds_of[leaf] = seeds

    def _is_by_place(self, whole: Any, part: Tensor, first_row: int, num_images: int) -> bool:
        """Return whether a call has cut ``part`` from ``whole``, with numbers for the places of this worker's images.

        Such is ``noise[:len(images)]``, which begins at the first row on each worker.
        """
        if not part.is_floating_point() or first_row or not self._rank or len(part) != num_images:
            return False
        is_known = isinstance(whole, Tensor) and (id(whole) in self._weights or whole in self._buffers)
        return not is_known and bool((part != part[:1]).any())

    def _meet_rows(self, drawn: list[Tensor], call: Call) -> bool:
        """Return whether ``call`` takes a row of one of ``drawn`` and a row of an image together.

        An outer product, whose result has more dimensions, takes each row with each image. An index is no number.
        """
        if not isinstance(call.result, Tensor) or not call.result.is_floating_point():
            return False
        shapes = {(tensor.ndim, tensor.shape[:1]) for tensor in drawn if 0 < tensor.ndim >= call.result.ndim}
        return any((rows.ndim, rows.shape[:1]) in shapes and self._swapped.follows_rows(rows) for rows in call.sources)
