"""Loops of a user's own on a GPU: they end as plain PyTorch does there, also with what people write for GPUs alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.gpu.trial import Trial
from tests.helpers.loops_beside_torch import (
    OPTIONS,
    sgd,
    small,
    with_a_run,
    with_torch,
)
from tests.helpers.loops_of_others import LOOPS


def of_others(trial: Trial) -> None:
    """The loops that a test compares on CPUs, in float64."""
    options = dataclasses.replace(OPTIONS, device=trial.device)
    for loop in LOOPS:
        _compare(trial, loop, options, at_most=1e-8)


def on_cuda(run: Any) -> list[nn.Module]:
    """Everything is moved by hand, and steps are timed with events."""
    model = run.prepare(small().cuda().to(memory_format=torch.channels_last))  # pyright: ignore
    criterion = nn.CrossEntropyLoss().cuda()
    optimizer = sgd(run, model)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            began.record()
            images, labels = batch.images.cuda(non_blocking=True), batch.labels.cuda(non_blocking=True)
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ended.record()
            torch.cuda.synchronize()
            run.log(loss=loss.cpu(), seconds=began.elapsed_time(ended), right=0)
    return [model]


def in_autocast(run: Any) -> list[nn.Module]:
    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return cross_entropy(model(batch.images), batch.labels)

    return _trained(run, loss_of)


def in_a_stream(run: Any) -> list[nn.Module]:
    """A stream of the loop's own, which waits for the batch, and is waited for."""
    model, stream = run.prepare(small()), torch.cuda.Stream()
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.zero_grad()
                cross_entropy(model(batch.images), batch.labels).backward()
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
    return [model]


def prefetched(run: Any) -> list[nn.Module]:
    """The usual prefetcher: images are changed in a stream, and used in another one."""
    stream = torch.cuda.Stream()

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            images = batch.images.mul(0.5).add(0.1)
        torch.cuda.current_stream().wait_stream(stream)
        images.record_stream(torch.cuda.current_stream())
        return cross_entropy(model(images), batch.labels)

    return _trained(run, loss_of)


def compiled(run: Any) -> list[nn.Module]:
    faster: Any = torch.compile(lambda model, batch: model(batch))
    return _trained(run, lambda model, batch: cross_entropy(faster(model, batch.images), batch.labels))


def compiled_to_a_graph(run: Any) -> list[nn.Module]:
    """torch.compile with CUDA graphs, whose outputs and gradients lie in memory of the graph's own."""
    faster: Any = torch.compile(lambda model, batch: model(batch), mode="reduce-overhead")

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return cross_entropy(faster(model, batch.images), batch.labels)

    return _trained(run, loss_of)


def compiled_loss(run: Any) -> list[nn.Module]:
    """A loss that is compiled with its network."""

    @torch.compile
    def loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels, label_smoothing=0.1)

    return _trained(run, lambda model, batch: loss(model, batch.images, batch.labels))


def _trained(run: Any, loss_of: Callable[[nn.Module, Any], Tensor]) -> list[nn.Module]:
    model = run.prepare(small())
    optimizer = sgd(run, model)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return [model]


def scaled_by_hand(run: Any) -> list[nn.Module]:
    """float16 with a scaler, and clipped gradients."""
    model = run.prepare(small())
    optimizer, scaler = sgd(run, model), run.prepare(torch.amp.GradScaler("cuda"))  # pyright: ignore
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            with torch.autocast("cuda", torch.float16):
                loss = cross_entropy(model(batch.images), batch.labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return [model]


_FOR_GPUS: dict[Callable[[Any], list[nn.Module]], float] = {  # and how far a weight may be from plain PyTorch's
    on_cuda: 1e-4,
    in_autocast: 1e-3,
    in_a_stream: 1e-4,
    prefetched: 1e-4,
    compiled: 1e-3,
    compiled_to_a_graph: 1e-3,
    compiled_loss: 1e-3,
    scaled_by_hand: 1e-3,
}


def for_gpus(trial: Trial) -> None:
    options = dataclasses.replace(OPTIONS, device=trial.device, precision="float32")
    for loop, limit in _FOR_GPUS.items():
        _compare(trial, loop, options, at_most=limit)


def _compare(trial: Trial, loop: Callable[[Any], list[nn.Module]], options: Any, at_most: float) -> None:
    """Note how far the weights end from plain PyTorch's; a loop that breaks doesn't end the others."""
    name = loop.__name__
    try:
        wanted = with_torch(f"{trial.folder}/torch-{name}", (loop,), options)[name]
        ours = with_a_run(f"{trial.folder}/run-{name}", (loop,), options)[name]
    except Exception as error:  # whatever a GPU does to one of them
        trial.says(f"{name}: {type(error).__name__}: {error}"[:600])
        trial.holds(name, False)
    else:
        far = max((some.double() - other.double()).abs().max().item() for some, other in zip(ours, wanted, strict=True))
        trial.check(f"{name}: largest difference of a weight", far, "", at_most=at_most)
