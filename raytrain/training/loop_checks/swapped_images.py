"""Computes a step of a loop again with some images swapped, which shows whether its loss compares images.

Let A and B be two groups of a worker's images, of equal number, and a and b what is in them. A loss that is a mean over
images of terms that depend on one image each is a sum of a function of A's rows and one of B's rows::

    L(a, b) = f(a) + g(b)    and so    L(a, b) + L(b, a) = L(a, a) + L(b, b)

where L(a, a) is the loss with the images of A in the rows of both groups. A loss that compares images, that is not
linear in a mean over them, or that divides by a number that depends on several, such as that of a class, does not obey
this, whatever functions it is made of, and in whichever dimension of a tensor the images are.

A loss that treats images by their places, such as that of a worker's first half alone, obeys it, but L(a, b) and
L(b, a) differ. So they do, rightly, if the loop tells images apart by what it has read or drawn for each of them, or if
it takes from a table, for all places of the global batch, the part of this worker. Then the workers have other rows in
a :class:`Table`; those of ``torch.arange(len(images))`` are the same on all of them, whose images are others.

So :class:`SwappedImages` computes L(b, a), L(a, a) and L(b, b) beside the loop's own L(a, b): each tensor that is
computed from the batch has three *variants*, and each call of torch's functions is made with them, too. Nothing of this
changes the loop's own tensors, random numbers or gradients. Most layers compute each row alone. Variants of their
results are rows of the loop's own result in another order, and are not computed again.

What the run computes over all workers, such as ``run.gather(rows)``, has no variants, because it is the same for all
of them. Neither has what Python computes from numbers that it has taken out of tensors, nor a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.training.batches.batch import Batch
from raytrain.training.exact import gather
from raytrain.training.exact.agreement import has_digest
from raytrain.training.loop_checks.loop_numbers import digest
from raytrain.training.loop_checks.searching import searching
from raytrain.training.loop_checks.torch_functions import (
    ELEMENTWISE,
    LAYERS,
    NOT_REPEATED,
    READ_BY_PYTHON,
    TAKE_WEIGHTS,
)

_NUM_VARIANTS = 3
_ROUNDING = {torch.float64: 1e-10, torch.float32: 3e-5}  # in a loss, relative to it
_COARSE_ROUNDING = 1e-2  # if a part of the step is computed in float16 or bfloat16


class Table(NamedTuple):
    """Digests of a tensor of the loop's that does not depend on the batch, and has a row for each image or more.

    ``num_images`` is the number of images of this worker, ``first`` is of the first row, and ``rows`` of as many rows
    as there are images.
    """

    num_images: int
    first: float
    rows: float


class _VariantCall(NamedTuple):
    """A call of a function with a variant of its arguments: its ``result``, and the ``leaves`` of the arguments."""

    result: Any
    leaves: list[Any]


class SwappedImages:
    """The variants of a step's tensors in which images are swapped.

    Example::

        swapped = SwappedImages()
        swapped.begin(batch, set())
        loss = swapped.call(torch.mean, "mean", (batch.images,), {})
        swapped.add_losses([loss])
        swapped.compares_images  # False

    Attributes:
        compares_images: True if the sum of the losses that were added last compares images.
        tables: what the losses so far may depend on, in the order of the calls.
    """

    def __init__(self) -> None:
        # Three variants of each tensor that depends on the batch. None means that they are the tensor's own rows, in
        # the three orders.
        self._variants: Any = WeakIdKeyDictionary()
        self._selections: Any = WeakIdKeyDictionary()  # tensors whose number of rows depends on the images
        self._orders = torch.empty(0)
        self._weights: set[int] = set()
        self.compares_images = False
        self._is_coarse = False  # True if a tensor of this step has float16 or bfloat16
        # True if the loop may know which image is in which row, or variants are missing.
        self._tells_images_apart = False
        # A loop may call backward for several parts of a batch, so the losses of a step are judged by their sum: by how
        # much it changes if all images are exchanged, how much of that may be rounding, and whether something else than
        # places may explain it.
        self._exchange_adds = self._bound = 0.0
        self._may_change = False
        self._has_microbatches = False  # True if the run divides the batch
        self._num_gathers = 0  # of this process before the step
        self._tables: list[Table] = []  # that the step has used so far
        self.tables: list[Table] = []

    def begin(self, batch: Batch, weights: set[int]) -> None:
        """Begin a step of ``batch``; ``weights`` are the IDs of parameters and buffers, which get no variants.

        If it has fewer than two images, nothing has variants.
        """
        self.end()
        self._weights, self._is_coarse, self._tells_images_apart = weights, False, False
        self._num_gathers, self._has_microbatches = gather.num_gathers, len(batch.microbatch_sizes) > 1
        if (num_images := batch.num_used) < 2:
            return

        # Draw the images of the two groups, because a loop may compare neighbours. Sort them by their classes, so that
        # the groups have different numbers of each class. Then exchange every fourth pair of images, so that most
        # classes are in both groups.
        half = num_images // 2
        drawn = torch.randperm(num_images, generator=torch.Generator().manual_seed(num_images))
        drawn = drawn[batch.labels.cpu()[drawn].argsort(stable=True)]
        first, second = drawn[:half].clone(), drawn[half : 2 * half].clone()
        first[1::4], second[1::4] = second[1::4].clone(), first[1::4].clone()
        self._orders = torch.arange(num_images).repeat(_NUM_VARIANTS, 1)  # of rows in (b, a), (a, a) and (b, b)
        self._orders[0, first], self._orders[0, second] = second, first
        self._orders[1, second] = first
        self._orders[2, first] = second
        for tensor in (batch.images, batch.labels, batch.targets, batch.samples):
            self._variants[tensor] = None

    def end(self) -> None:
        """Follow no tensor any more, until the next :meth:`begin`."""
        self._variants, self._selections = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._exchange_adds, self._bound, self._may_change = 0.0, 0.0, False
        self._tables, self.tables = [], []

    def forget(self, tensor: Tensor) -> None:
        """Drop the variants of ``tensor``, which is the same in all of them."""
        self._variants.pop(tensor, None)

    def scale(self, source: Tensor, result: Tensor) -> None:
        """Follow a ``result`` (), which the run has computed as the product of ``source`` () and a number."""
        if self._variants.get(source) is not None:
            factor = result.detach() / source.detach()
            self._variants[result] = [variant * factor for variant in self._variants[source]]

    def keep_rows(self, sources: Sequence[Tensor], result: Tensor) -> None:
        """Follow a ``result`` that has a row for each row of the ``sources``, each computed from that row alone."""
        are_own_rows = all(source in self._variants and self._variants[source] is None for source in sources)
        if are_own_rows and len(result) == self._orders.shape[1]:
            self._variants[result] = None

    def call(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return what torch's function ``func``, called ``name``, returns, and follow the result.

        The function is called with each variant of the arguments, too, unless none has variants or it computes each row
        alone. The run is computed with what the loop's own call returns or raises, and with nothing else.
        """
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)] if self._variants else []
        sources = [tensor for tensor in tensors if tensor in self._variants]
        with searching(f"what {name} returns for swapped images"):
            self._tells_images_apart |= bool(self._variants) and self._may_tell_images_apart(name, kwargs, tensors)
            self._note_tables(name, tensors if sources else [])
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
        self._tells_images_apart |= name == "grad" and bool(sources)  # gradients have no variants
        if not sources or is_transformed or name in NOT_REPEATED:  # tensors of torch.func must not outlive it
            return func(*args, **kwargs)
        if is_collective(func):
            for source in sources:  # all workers have the same now, and may cut their own rows out of it
                self._tells_images_apart |= source.ndim > 0 and len(source) >= self._orders.shape[1]
                self.forget(source)
            return func(*args, **kwargs)

        # A layer that computes each row alone has nothing to compute for the variants.
        if self._computes_rows_alone(name, args, kwargs, sources):
            result = func(*args, **kwargs)
            self._keep_one(result, None)
            return result
        calls: list[_VariantCall] = []
        with searching(f"what {name} returns for swapped images"):
            devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
            calls = [self._call_variant(number, func, args, kwargs, devices) for number in range(_NUM_VARIANTS)]
        result = func(*args, **kwargs)
        with searching(f"what {name} returns for swapped images"):
            self._keep(calls, args, kwargs, result)
        return result

    def _call_variant(self, number: int, func: Any, args: Any, kwargs: Any, devices: list[int]) -> _VariantCall:
        """Call ``func`` with a variant of the arguments, and copies of those without variants.

        They are copied because the function may write into them. Random numbers on the CPU and the GPUs ``devices`` are
        those that the loop's own call is to draw.
        """
        leaves, structure = tree_flatten((args, kwargs))
        variants = {id(leaf): self._variant(leaf, number) for leaf in leaves}  # one for a leaf that comes twice
        of_call = [variants[id(leaf)] for leaf in leaves]
        own_args, own_kwargs = tree_unflatten(of_call, structure)
        with torch.no_grad(), torch.random.fork_rng(devices):
            return _VariantCall(func(*_with_statistics(func, args, own_args), **own_kwargs), of_call)

    def _keep(self, calls: list[_VariantCall], args: Any, kwargs: Any, result: Any) -> None:
        """Keep the results of ``calls`` as the variants of the loop's own ``result``; none if a variant has failed."""
        if not calls:  # an argument that the loop's own call has written into has changed, unlike its variants
            self._tells_images_apart = True
            for written in (leaf for leaf in args[:1] if isinstance(leaf, Tensor)):
                self.forget(written)
            return

        # What the function has written into is a result, too. New copies have been written into if their version is
        # not 0. Other variants are kept already.
        for position, leaf in enumerate(tree_leaves((args, kwargs))):
            is_copied = isinstance(leaf, Tensor) and self._variants.get(leaf) is None
            if is_copied and _is_written(calls[0].leaves[position]):
                self._keep_one(leaf, [call.leaves[position] for call in calls])
        results = [tree_leaves(call.result) for call in calls]
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, Tensor) and all(position < len(of_call) for of_call in results):
                self._keep_one(leaf, [of_call[position] for of_call in results])

    def add_losses(self, losses: Sequence[Tensor]) -> None:
        """Add ``losses``, whose backward the loop calls, to those of this step.

        Losses that are not single numbers are left out.
        """
        self.compares_images = False
        numbers = [loss for loss in losses if loss.numel() == 1]
        self._may_change |= self._tells_images_apart or len(numbers) < len(losses)
        self._may_change |= gather.num_gathers > self._num_gathers  # as rows of all workers may be cut by a mask
        self.tables = [*self._tables]
        if not any(loss in self._variants for loss in numbers):
            return
        with searching("the loss with swapped images"):
            loss_of_step = sum(loss.item() for loss in numbers)
            exchanged, first, second = (
                sum(self._variant(loss, variant).item() for loss in numbers) for variant in range(_NUM_VARIANTS)
            )
            rounding = max(_ROUNDING.get(loss.dtype, _COARSE_ROUNDING) for loss in numbers)
            largest = max(map(abs, (loss_of_step, exchanged, first, second)))
            bound = (_COARSE_ROUNDING if self._is_coarse else rounding) * largest
            self._exchange_adds += loss_of_step - exchanged
            self._bound += bound
            self.compares_images = abs(loss_of_step + exchanged - first - second) > bound  # False for NaN
            self._may_change |= self.compares_images  # as a loss that compares neighbours does, which has its own note

    @property
    def is_swapping(self) -> bool:
        """True in a step that is computed with swapped images, too."""
        return bool(self._variants)

    @property
    def depends_on_places(self) -> bool:
        """True if the sum of the step's losses so far depends on the images' places.

        False if the loop may know which image is in which row. The caller must know that the step has drawn no random
        numbers, which may differ from row to row, and that the ``tables`` are the same on all workers.
        """
        return not self._may_change and abs(self._exchange_adds) > self._bound

    def selects(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` has another number of rows with swapped images, as after ``logits[mask]``."""
        return tensor in self._selections

    def follows_rows(self, tensor: Tensor, dim: int = 0) -> bool:
        """Return whether ``tensor`` has, in its dimension ``dim``, a row for each image, which goes with the image.

        False if the rows are alike when images are swapped, which shows nothing.
        """
        if tensor not in self._variants or not tensor.ndim or tensor.shape[dim] != self._orders.shape[1]:
            return False
        exchanged, values = self._variant(tensor, 0), tensor.detach()
        swapped_rows = values.index_select(dim, self._orders[0].to(values.device))
        return bool(_are_close(swapped_rows, exchanged).all()) and not bool(_are_close(values, exchanged).all())

    def mixes(self, tensor: Tensor) -> bool:
        """Return whether a number in ``tensor`` depends on images of both groups; False if it has no variants."""
        variants = self._variants.get(tensor)
        if variants is None:
            return False
        exchanged, first, second = variants
        values = tensor.detach()
        # A number of A's images alone is the same in L(a, b) and L(a, a), and so on.
        is_of_first = _are_close(values, first) & _are_close(exchanged, second)
        is_of_second = _are_close(values, second) & _are_close(exchanged, first)
        return not bool((is_of_first | is_of_second).all())

    def _may_tell_images_apart(self, name: str, kwargs: Any, tensors: list[Tensor]) -> bool:
        """Return whether a call may treat images differently, rightly: by random numbers, in Python or in batch norm.

        Batch norm normalises the images of a microbatch together.
        """
        is_in_microbatch = self._has_microbatches and name in ("batch_norm", "batch_norm_update_stats")
        if kwargs.get("generator") is not None or is_in_microbatch:
            return True
        of_batch = [tensor for tensor in tensors if tensor in self._variants]
        return name in READ_BY_PYTHON and not all(map(self._is_same_if_exchanged, of_batch))

    def _note_tables(self, name: str, tensors: list[Tensor]) -> None:
        """Note those of the ``tensors`` that a call gets which may have another row for each place of an image."""
        num_images = self._orders.shape[1]
        for tensor in tensors if name not in TAKE_WEIGHTS else ():
            is_of_loop = tensor not in self._variants and id(tensor) not in self._weights and has_digest(tensor)
            if is_of_loop and tensor.ndim and len(tensor) >= num_images and bool((tensor != tensor[:1]).any()):
                first, rows = digest(tensor[:1]).item(), digest(tensor[:num_images]).item()
                self._tables.append(Table(num_images, first, rows))

    def _is_same_if_exchanged(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, one that has variants, has one number, the same if all images are exchanged."""
        variants = self._variants[tensor]
        return variants is not None and tensor.numel() == 1 and bool(_are_close(tensor.detach(), variants[0]).all())

    def _computes_rows_alone(self, name: str, args: Any, kwargs: Any, sources: list[Tensor]) -> bool:
        """Return whether torch's function ``name`` computes each row of its result from the same row of its arguments.

        The variants of the result are then its own rows in another order, and need not be computed. ``sources`` are the
        arguments with variants.
        """
        if not args or any(self._variants[source] is not None for source in sources):
            return False
        images = sources[0]
        if name in ELEMENTWISE:
            without_variants = [leaf for leaf in args if isinstance(leaf, Tensor) and leaf not in self._variants]
            are_same_for_rows = all(
                tensor.ndim < images.ndim or tensor.shape[:1] == (1,) for tensor in without_variants
            )
            return are_same_for_rows and all(source.shape == images.shape for source in sources)
        if len(sources) > 1 or images is not args[0]:
            return False
        if name == "flatten":
            return (*args[1:], kwargs.get("start_dim", 0))[0] == 1
        if name == "dropout":
            return kwargs.get("training") is False
        if name == "layer_norm":
            return len(kwargs.get("normalized_shape", args[1:2] and args[1])) < images.ndim
        return name in LAYERS and (images.ndim == 4 or (images.ndim > 1 and "2d" not in name))

    def _keep_one(self, tensor: Tensor, variants: list[Any] | None) -> None:
        """Keep the ``variants`` of a ``tensor`` that is no weight, if they are like it; None means its own rows."""
        fit = all(
            isinstance(variant, Tensor) and variant.shape == tensor.shape and variant.dtype == tensor.dtype
            for variant in variants or ()
        )
        if id(tensor) in self._weights:
            self.forget(tensor)
            return
        if not fit:
            self.forget(tensor)
            self._tells_images_apart = True
            variants_with_rows = [variant for variant in variants or () if isinstance(variant, Tensor) and variant.ndim]
            if tensor.ndim and any(len(variant) != len(tensor) for variant in variants_with_rows):
                self._selections[tensor] = True
            return
        self._is_coarse |= tensor.dtype in (torch.float16, torch.bfloat16)
        # An index beyond a tensor's end ends the process on a GPU. So no whole number in a variant is larger or smaller
        # than all that the loop has there, with which its calls work.
        is_index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        if variants is not None and is_index and not tensor.is_cpu and tensor.numel():
            variants = [variant.clamp(*tensor.aminmax()) for variant in variants]
        self._variants[tensor] = variants

    def _variant(self, leaf: Any, number: int) -> Any:
        """Return a variant of an argument, and a copy of a tensor or a generator without variants."""
        if isinstance(leaf, torch.Generator):
            return leaf.clone_state()
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf not in self._variants:
            return leaf.detach().clone()
        variants = self._variants[leaf]
        return leaf.detach()[self._orders[number].to(leaf.device)] if variants is None else variants[number]


def are_alike(tables_of_workers: Sequence[Sequence[Table]]) -> bool:
    """Return whether several workers have the same tables, so that none has taken its own part of one.

    Example: ``are_alike([[], []])``
    """
    if len(tables_of_workers) < 2 or len(set(map(len, tables_of_workers))) > 1:
        return False
    return all(
        math.isclose(one.rows, table.rows, rel_tol=1e-6)
        if one.num_images == table.num_images
        else math.isclose(one.first, table.first, rel_tol=1e-6)
        for tables in tables_of_workers
        for one, table in zip(tables_of_workers[0], tables, strict=True)
    )


def is_collective(func: Any) -> bool:
    """Return whether ``func`` is one of torch's functions or operators that several workers call together."""
    module = getattr(func, "__module__", None) or ""
    return module.startswith(("torch.distributed", "torch._ops._c10d_functional", "torch._ops.c10d"))


def _with_statistics(func: Any, loops_args: Any, args: Any) -> Any:
    """Return ``args``, a variant of ``loops_args``; for batch norm, with the statistics of the loop's own images.

    Otherwise a layer that normalises with its batch would compare the images; one of a prepared network may do that.
    """
    if func is not torch.batch_norm or not args[5]:
        return args
    images = loops_args[0].detach()
    variance, mean = torch.var_mean(images, [dim for dim in range(images.ndim) if dim != 1], correction=0)
    return (*args[:3], mean, variance, False, *args[6:])


def _are_close(first: Tensor, second: Tensor) -> Tensor:
    """Return for each number of two tensors of one shape whether it is the same, up to rounding."""
    rounding = 10 * _ROUNDING.get(first.dtype, _COARSE_ROUNDING)
    scale = float(first.abs().nan_to_num(0, 0, 0).max()) if first.numel() and first.is_floating_point() else 0
    return torch.isclose(first, second, rtol=rounding, atol=rounding * scale, equal_nan=True)


def _is_written(copy: Any) -> bool:
    """Return whether a function has written into ``copy``, a tensor that was new before its call."""
    return isinstance(copy, Tensor) and not copy.is_inference() and copy._version > 0
