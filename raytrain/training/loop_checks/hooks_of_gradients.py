"""Finds out whether a hook of a tensor only multiplies its gradient, which is right on any number of workers.

The gradient is that of the mean over one worker's images, and what arrives at the weights is multiplied by the worker's
share of the images later. So a hook may keep the gradient, or return it times something, as gradient reversal does. Of
a weight, it may also add numbers or what is computed from weights, as weight decay does, because the shares add up to
one. A bound, a norm or noise would be that of a mean over other images than on one worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.training.loop_checks.torch_functions import ADDITIONS, DIVISIONS, MULTIPLICATIONS

_PRODUCTS = {*DIVISIONS, *MULTIPLICATIONS, "neg", "__neg__", "neg_", "clone", "detach", "to", "double", "float"}
_FILLS = {"__setitem__", "masked_fill", "masked_fill_", "index_fill_", "where"}  # with zeros, a product, too


def watched_hook(
    hook: Callable[[Tensor], Any], report: Callable[[], None], is_watching: Callable[[], bool], weights: set[int] | None
) -> Callable[[Tensor], Any]:
    """Return a function that calls ``hook``, and ``report`` if the hook does anything but multiply the gradient.

    A hook of a weight may also add to the gradient what is computed from weights: ``weights`` has the IDs of all
    weights then, and is None for a hook of another tensor. Calls are watched while ``is_watching()`` is true. A hook
    that is watched already is returned as it is.

    Example::

        hook = watched_hook(lambda gradient: gradient.clamp(-1, 1), lambda: print("a bound"), lambda: True, None)
        tensor.register_hook(hook)
    """
    if getattr(hook, "__qualname__", "") == _WATCHED:
        return hook

    def watched(gradient: Tensor) -> Any:
        if not is_watching():
            return hook(gradient)
        products = _Products(gradient, weights)
        with products:
            result = hook(gradient)
        if not products.has(gradient if result is None else result):
            report()
        return result

    return watched


_WATCHED = f"{watched_hook.__qualname__}.<locals>.watched"  # the name of what it returns


class _Products(TorchFunctionMode):
    """Notes which tensors are the ``gradient`` times something, as functions of torch are called in this context.

    With the IDs of ``weights``, something that is computed from these alone may be added.
    """

    def __init__(self, gradient: Tensor, weights: set[int] | None) -> None:
        super().__init__()
        self._weights = weights
        self._is_product: Any = WeakIdKeyDictionary()  # of tensors that depend on the gradient
        self._is_product[gradient] = True
        self._of_weights: Any = WeakIdKeyDictionary()  # tensors that are computed from weights and numbers, as keys

    def has(self, tensor: Tensor) -> bool:
        return self._is_product.get(tensor, False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dependent = [tensor for tensor in tensors if tensor in self._is_product]
        independent = [tensor for tensor in tensors if tensor not in self._is_product]
        are_of_weights = self._weights is not None and all(
            id(tensor) in self._weights or tensor in self._of_weights for tensor in independent
        )
        written = args[:1] if name == "__setitem__" else ()
        results = [leaf for leaf in (*tree_leaves(result), *written) if isinstance(leaf, Tensor)]
        if dependent:
            is_of_one = len(dependent) == 1 and (dependent[0] is args[0] or name not in DIVISIONS)
            last = args[-1] if args else None
            fills_with_zeros = name in _FILLS and isinstance(last, (int, float)) and not last
            is_sum = name in ADDITIONS and are_of_weights
            is_product = (name in _PRODUCTS or fills_with_zeros or is_sum) and is_of_one and self.has(dependent[0])
            for leaf in results:
                self._is_product[leaf] = is_product
        elif are_of_weights:
            for leaf in results:
                self._of_weights[leaf] = True
        return result
