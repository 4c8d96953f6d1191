"""What each switch of a training step gives: the time of a step with it and without it, for two networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from raytrain.training.run import Run
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side
from tests.benchmarks.step import BATCH, NUM_WORKERS, WARM_UP, keep_images, rate, train_in_memory
from tests.helpers.gloo_processes import run_in_processes

_NETWORKS = {"cifar10's network": "raytrain.models:cifar10", "ResNet-18": "resnet18"}
_SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the options with a switch, and without it
    "channels last": ({}, {"channels_last": False}),
    "fused SGD": ({}, {"fused": False}),
    "fused AdamW": ({"optimizer": "adamw"}, {"optimizer": "adamw", "fused": False}),
    "bfloat16": ({"precision": "bfloat16"}, {}),
    "torch.compile": ({"compile": True}, {}),
}
_ON_BY_DEFAULT = ("channels last", "fused SGD", "fused AdamW")


def measure(bench: Bench) -> Report:
    steps = WARM_UP + bench.scaled(20, least=4)
    file = str(bench.scratch / "images.npz")
    bench.alone(Side(keep_images, {"url": bench.url, "num_images": steps * BATCH, "file": file}))
    figures: list[Figure] = []
    checks: list[Check] = []
    for network, model in _NETWORKS.items():
        for switch, states in _SWITCHES.items():
            name = f"{network}, {switch}"
            on, off = _measure_switch(bench, name, [{"model": model, **options} for options in states], file)
            figures += [on, off]
            if switch in _ON_BY_DEFAULT:
                checks.append(Check(f"{name}: off : on", off.median / on.median, at_least=0.95))
    return Report(f"switches: a step of {BATCH} images in {NUM_WORKERS} processes of 1 thread", figures, checks)


def _measure_switch(bench: Bench, name: str, states: Sequence[dict[str, Any]], file: str) -> list[Figure]:
    sides = {
        f"{name}: {state}": Side(step_times, {"file": file, "options": options})
        for state, options in zip(("on", "off"), states, strict=True)
    }
    results = bench.alternate(sides, bench.scaled(3), lambda times: f"{_step_ms(times):,.1f} ms")
    return [Figure(side, "ms", [_step_ms(times) for times in rounds]) for side, rounds in results.items()]


def step_times(file: str, options: dict[str, Any], folder: str) -> list[float]:
    """When the first of the workers finished each of its steps."""
    chosen = {"precision": "float32", **options}
    loop = None if chosen.pop("fused", True) else train_unfused
    return run_in_processes(NUM_WORKERS, train_in_memory, file, chosen, folder, loop)[0]


def train_unfused(run: Run) -> None:
    """The built-in loop with the optimizer as torch makes it by default."""
    from raytrain.training.loop import train

    fused = run.build_optimizer

    def unfused(model: torch.nn.Module) -> Optimizer:
        optimizer = fused(model)
        for group in optimizer.param_groups:
            group["fused"] = None
        return optimizer

    run.build_optimizer = unfused  # pyright: ignore[reportAttributeAccessIssue] ; for this run only
    train(run)


def _step_ms(times: list[float]) -> float:
    return 1000 * BATCH / rate(times)
