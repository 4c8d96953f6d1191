"""`--compile`: a network through torch.compile, in a mode of it, also in those that record CUDA graphs.

A CUDA graph is a step's kernels, recorded once, which the GPU then runs without the host. It reads and writes the same
memory each time. What comes out of a network is therefore copied: a loop may keep it for as long as it likes. Gradients
stay where they are. Each batch begins a new round of graphs (:func:`begin_graphs`), and until then nothing is written
over: a loop may call its network, and ``backward``, several times in a batch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from raytrain.config.network import CompileMode
from raytrain.errors import UsageError
from raytrain.training import batchnorm
from raytrain.training.autocast import map_tensors


def compile_network(model: nn.Module, mode: CompileMode) -> None:
    """Have the calls of ``model`` compiled, from the first one on; its class stays.

    Example::

        compile_network(model, "reduce-overhead")
        logits = model(images)
    """
    # nn.Module.compile does the same, but torch 2.11 leaves out classes of its own, such as nn.Sequential. A function
    # around the call is compiled whatever the class.
    call = model._call_impl  # pyright: ignore[reportPrivateUsage]

    def call_all(*args: Any, **options: Any) -> Any:
        return call(*args, **options)

    compiled = torch.compile(call_all, mode=mode)
    model._compiled_call_impl = partial(_call_and_copy, compiled) if records_graphs(mode) else compiled


def records_graphs(mode: CompileMode | None) -> bool:
    """Return whether ``mode`` records CUDA graphs, on a GPU."""
    return mode in ("reduce-overhead", "max-autotune")


def begin_graphs() -> None:
    """Let CUDA graphs write over the activations of all networks until now, but not over their outputs."""
    torch.compiler.cudagraph_mark_step_begin()


def check_recordable(model: nn.Module, mode: CompileMode) -> None:
    """Raise UsageError if several workers cannot record ``model`` in CUDA graphs."""
    if records_graphs(mode) and any(isinstance(layer, batchnorm.SynchronisedBatchNorm) for layer in model.modules()):
        instead = "default" if mode == "reduce-overhead" else "max-autotune-no-cudagraphs"
        raise UsageError(
            f"--compile is {mode}, which records CUDA graphs, and --batch-norm sync has several workers wait for each "
            f"other within the network; give --batch-norm aggregate, or --compile {instead}."
        )


def _call_and_copy(call: Any, *args: Any, **options: Any) -> Any:
    return map_tensors(Tensor.clone, call(*args, **options))
