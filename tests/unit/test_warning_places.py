"""Warnings of torch in the watched steps of a loop name the loop's line, once for both kinds of steps."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from raytrain.training.loop_checks.loop_watch import LoopWatch


def warned(images: Tensor) -> None:
    _ = images.T  # of C
    F.mse_loss(images.sum((1, 2, 3)), torch.zeros(1))  # of Python
    warnings.warn("of the loop", stacklevel=1)


def test_the_lines_of_the_loop_are_named_once() -> None:
    images = torch.ones(4, 3, 2, 2)
    tensors = dict.fromkeys(("images", "labels", "targets", "samples"), images)
    batch: Any = SimpleNamespace(**tensors, num_used=4, step=0, epoch=0, microbatch_sizes=(4,))
    config, worker = (
        SimpleNamespace(batch_size=8, compile=None, seed=0),
        SimpleNamespace(world_size=2, rank=0, device=torch.device("cpu")),
    )
    watch = LoopWatch(cast(Any, config), cast(Any, worker), cast(Any, SimpleNamespace(trained=[])), print)
    show_before = warnings.showwarning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        show_inside = warnings.showwarning
        for _ in range(3):  # of which two are watched
            with watch.step(batch, None, None):
                warned(images)
        assert warnings.showwarning is show_inside
    assert warnings.showwarning is show_before
    first = inspect.getsourcelines(warned)[1]
    assert [(warning.filename, warning.lineno) for warning in caught] == [
        (__file__, first + line) for line in (1, 2, 3)
    ]
