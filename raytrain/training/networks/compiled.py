"""`--compile`: compiles a network with torch.compile, in any of its modes, also those that record CUDA graphs.

A CUDA graph has the kernels of a step, recorded once, which the GPU then runs without the host. It reads and writes the
same memory each time. The outputs of a network are therefore copied, so that a loop may keep them; gradients stay where
they are. Each batch begins a new round of graphs (``PreparedModels.begin_images``), and until then no memory is
overwritten: a loop may call its network, and ``backward``, several times in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.config.network import CompileMode
from raytrain.errors import UsageError
from raytrain.training.exact import batchnorm
from raytrain.training.networks.mixed_precision import map_tensors


def compile_network(model: nn.Module, mode: CompileMode) -> None:
    """Let torch compile ``model`` at its first call; its class stays the same.

    Example::

        compile_network(model, "reduce-overhead")
        logits = model(images)
    """
    # nn.Module.compile would do the same, but torch 2.11 skips modules of its own classes, such as nn.Sequential. A
    # function around the call is compiled whatever the class is.
    call = model._call_impl  # pyright: ignore[reportPrivateUsage]

    def call_all(*args: Any, **options: Any) -> Any:
        return call(*args, **options)

    compiled = torch.compile(call_all, mode=mode)

    # The next replay of a graph would overwrite the outputs, which a loop may keep.
    def call_and_copy(*args: Any, **options: Any) -> Any:
        return map_tensors(Tensor.clone, compiled(*args, **options))

    model._compiled_call_impl = call_and_copy if records_graphs(mode) else compiled


@contextmanager
def compiled_calls_by(models: Iterable[nn.Module], call: Callable[..., Any]) -> Iterator[None]:
    """In this context, have ``call`` make the calls of the compiled networks among ``models``.

    It gets the compiled function and its arguments, and returns what the network is to return.
    """
    compiled = [(model, model._compiled_call_impl) for model in models if model._compiled_call_impl is not None]
    for model, function in compiled:
        model._compiled_call_impl = partial(call, function)
    try:
        yield
    finally:
        for model, function in compiled:
            model._compiled_call_impl = function


def records_graphs(mode: CompileMode | None) -> bool:
    """Return whether ``mode`` records CUDA graphs, which it does on a GPU only; None, without --compile, does not."""
    return mode in ("reduce-overhead", "max-autotune")


def check_recordable(model: nn.Module, mode: CompileMode) -> None:
    """Raise UsageError if ``mode`` records CUDA graphs and workers wait for each other within ``model``."""
    if records_graphs(mode) and any(isinstance(layer, batchnorm.SynchronisedBatchNorm) for layer in model.modules()):
        instead = "default" if mode == "reduce-overhead" else "max-autotune-no-cudagraphs"
        raise UsageError(
            f"--compile is {mode}, which records CUDA graphs, and --batch-norm sync has several workers wait for each "
            f"other within the network; give --batch-norm aggregate, or --compile {instead}."
        )
