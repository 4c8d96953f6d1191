"""Finds out whether a hook of a tensor only multiplies its gradient, which is right on any number of workers.

The gradient is that of the mean over one worker's images, and what arrives at the weights is multiplied by the worker's
share of the images later. So a hook may keep the gradient, or return it times something, as gradient reversal does. A
bound, a norm or noise would be that of a mean over other images than on one worker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from raytrain.training.loop_checks.torch_functions import DIVISIONS, MULTIPLICATIONS

_PRODUCTS = {*DIVISIONS, *MULTIPLICATIONS, "neg", "__neg__", "neg_", "clone", "detach", "to", "double", "float"}


def watched_hook(hook: Callable[[Tensor], Any], report: Callable[[], None]) -> Callable[[Tensor], Any]:
    """Return ``hook``, which calls ``report`` if it has changed a gradient otherwise than by a product.

    Example: ``tensor.register_hook(watched_hook(lambda gradient: gradient.clamp(-1, 1), lambda: print("a bound")))``
    """

    def watched(gradient: Tensor) -> Any:
        products = _Products(gradient)
        with products:
            result = hook(gradient)
        if not products.has(gradient if result is None else result):
            report()
        return result

    return watched


class _Products(TorchFunctionMode):
    """Notes which tensors are the ``gradient`` times something, as functions of torch are called in this context."""

    def __init__(self, gradient: Tensor) -> None:
        super().__init__()
        self._is_product: Any = WeakIdKeyDictionary()  # of tensors that depend on the gradient
        self._is_product[gradient] = True

    def has(self, tensor: Tensor) -> bool:
        return self._is_product.get(tensor, False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        dependent = [tensor for tensor in tensors if tensor in self._is_product]
        if dependent:
            is_of_one = len(dependent) == 1 and (dependent[0] is args[0] or name not in DIVISIONS)
            is_product = name in _PRODUCTS and is_of_one and self.has(dependent[0])
            written = args[:1] if name == "__setitem__" else ()
            for leaf in (*tree_leaves(result), *written):
                if isinstance(leaf, Tensor):
                    self._is_product[leaf] = is_product
        return result
