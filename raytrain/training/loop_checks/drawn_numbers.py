"""Follows random numbers that a loop draws for the images, until they meet the images.

A generator of the loop's, with one seed on all workers, gives the first images of each worker the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.training.loop_checks.mark_rules import Call
from raytrain.training.loop_checks.rows_of_images import has_rows, parts_of_rows
from raytrain.training.loop_checks.torch_functions import TAKE_WEIGHTS

_MAX_NUMBERS_PER_IMAGE = 16  # in a vector of random numbers, which otherwise may be for weights


class DrawnNumbers:
    """Follows tensors with random numbers through the calls of a loop, on the worker of this ``rank``.

    Example::

        drawn = DrawnNumbers(rank=0)
        drawn.begin(weights)
        drawn.follow(call, leaves)
        drawn.seeds  # of generators that have drawn numbers for the images
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.seeds: set[int] = set()  # of generators that have drawn as many numbers as there are images, or a multiple
        self._seeds_of: Any = WeakIdKeyDictionary()  # by tensor: seeds of those numbers that may yet meet images
        self._later: Any = WeakIdKeyDictionary()  # parts of these tensors that do not begin at the first row, as keys
        self._weights: set[int] = set()
        self._shapes_of_weights: set[torch.Size] = set()

    def begin(self, weights: Sequence[Tensor]) -> None:
        """Begin a step; ``weights`` are the parameters and buffers of all networks."""
        self._weights, self._shapes_of_weights = set(map(id, weights)), {weight.shape for weight in weights}
        self.seeds.clear()

    def forget(self, written: Tensor) -> None:
        """Forget what ``written`` held, because the loop has written it anew."""
        self._seeds_of.pop(written, None)

    def follow(self, call: Call, leaves: list[Any]) -> None:
        """Note the seed of a generator of the loop's that draws a number, or several, for each image.

        Noise with the shape of a weight may be for that weight, and a long vector for all weights: it counts once it
        meets images, or what is computed from them, in a ``call``. Noise that was added to a weight meets images in
        layers, and a penalty on the weights meets the loss: neither counts. ``leaves`` are all arguments of the call.
        """
        result, num_images, generator = call.result, call.num_images, call.kwargs.get("generator")
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
        if _reads_table(call, drawn):
            return
        if call.sources and call.name not in TAKE_WEIGHTS and any(tensor.ndim for tensor in (*drawn, *call.sources)):
            self.seeds |= seeds
        elif seeds and not call.sources:
            own_parts = set[int]()
            for part, first_row in parts_of_rows(call.name, call.args, result):
                if begins_later := bool(first_row) or call.args[0] in self._later:
                    self._later[part] = True
                if len(part) == num_images and begins_later == bool(self._rank):  # all but worker 0 begin later
                    own_parts.add(id(part))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and id(leaf) not in self._weights | own_parts:
                    self._seeds_of[leaf] = seeds


def _reads_table(call: Call, drawn: Sequence[Tensor]) -> bool:
    """Return whether a call takes ``drawn`` numbers by whole numbers of the batch, as ``table[batch.samples]`` does.

    These are the same for an image on whichever worker it is.
    """
    if call.name not in ("__getitem__", "index_select", "embedding") or not call.sources:
        return False
    are_indices = all(not source.is_floating_point() and source.dtype != torch.bool for source in call.sources)
    return are_indices and not any(source is tensor for source in call.sources for tensor in drawn)
