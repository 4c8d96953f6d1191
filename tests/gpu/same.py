"""Whether a device computes what plain PyTorch computes on it, and what the CPU does, which other tests compare.

The runs are those of ``tests/integration/test_exact_matrix.py``, and one run for each option beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from raytrain.training.batches.augment_and_normalise import Augment
from tests.gpu.trial import Trial
from tests.helpers.memory_runs import (
    Case,
    Recorder,
    alone,
    config,
    images,
    make_run,
    on_one_worker,
    plain_batches,
    together,
    trained,
)
from tests.helpers.option_matrix import cases
from tests.helpers.reference_loop import train_alone

Weights = Mapping[str, Tensor]
_LIMITS = {"float64": 1e-9, "float32": 1e-4}
_NETWORK = "tests.gpu.same:network"
OPTIONS: dict[str, dict[str, Any]] = {
    "dropout and stochastic depth": {},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "batch norm of local batches": {"batch_norm": "aggregate", "batch_size": 7},
    "channels last": {"channels_last": True},
    "average of weights": {"ema_decay": 0.9},
    "clipped gradients": {"clip_norm": 0.1},
    "label smoothing": {"label_smoothing": 0.1},
    "focal loss": {"focal_gamma": 2.0},
    "mixup": {"mixup": 0.4, "accumulate": 3},
    "CutMix": {"cutmix": 1.0},
    "alternating flips": {"flip": "alternating", "translate": 2},
    "random crops": {"random_resized_crop": True, "cache_side": 1.5, "flip": "none", "translate": 0},
    "growing images": {"image_size": "8..16", "epochs": 4},
    "test views": {"test_views": ("flip", "shift")},
    "balanced sampling": {"sampling": "balanced"},
    "no decay of norms": {"weight_decay": 0.1, "decay_norms_and_biases": False},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.01},
    "lion": {"optimizer": "lion", "learning_rate": 0.001},
    "lamb": {"optimizer": "lamb", "learning_rate": 0.01},
}
TRANSFORMS: dict[str, dict[str, Any]] = {
    "RandAugment": {"auto_augment": "randaugment"},
    "TrivialAugment": {"auto_augment": "trivialaugment"},
    "AugMix": {"auto_augment": "augmix"},
    "3-Augment": {"auto_augment": "3-augment"},
    "colour jitter": {"color_jitter": 0.4},
    "rotation": {"rotation": 30.0},
    "blur": {"blur": 1.0},
    "random erasing": {"random_erasing": 1.0},
}


class Block(nn.Module):
    """A residual block that is left out for some images, at random."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout2d(0.2)
        )
        self.depth = StochasticDepth(0.3, "row")

    def forward(self, input: Tensor) -> Tensor:
        return input + self.depth(self.layers(input))


def network(num_classes: int, channels: int) -> nn.Module:
    """A network with layers that draw random numbers, and with no kernel that is not deterministic."""
    return _network(num_classes, channels, Block(8), nn.Dropout(0.2), Block(8))


def network_without_chance(num_classes: int, channels: int) -> nn.Module:
    return _network(num_classes, channels, nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8))


def _network(num_classes: int, channels: int, *blocks: nn.Module) -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, nn.Sequential(*blocks), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))


def as_plain_pytorch(trial: Trial) -> None:
    """The runs of the matrix, compared with a plain loop on the same device."""
    for precision, limit in _LIMITS.items():
        differences: dict[str, float] = {}
        for name, case in _on(trial, cases(1)).items():
            if case.options.precision == precision:
                result = on_one_worker({name: case}, str(trial.folder))[name]
                model, rows = alone(case)
                steps = [row for row in result["rows"] if row.kind == "step"]
                both = [(step.loss, row["loss"]) for step, row in zip(steps, rows, strict=True) if row["count"]]
                apart = max(abs(ours - theirs) for ours, theirs in both)
                differences[name] = max(_difference(result["state"], model.state_dict()), apart)
        _note_worst(trial, f"{precision}, {len(differences)} runs of 7 steps", differences, limit)


def as_on_the_cpu(trial: Trial) -> None:
    """A run in float64 for each option, and the pixels of each transform, compared with those on the CPU."""
    differences: dict[str, float] = {}
    for name, chosen in OPTIONS.items():
        options = config(model=_NETWORK, max_steps=7, **chosen)
        on_cpu, on_device = (
            on_one_worker({device: Case(dataclasses.replace(options, device=device), 40)}, f"{trial.folder}/{name}-{n}")
            for n, device in enumerate(("cpu", trial.device))
        )
        differences[name] = _difference(on_device[trial.device]["state"], on_cpu["cpu"]["state"])
    _note_worst(trial, f"float64, {len(differences)} runs of 7 steps", differences, _LIMITS["float64"])
    for name, chosen in TRANSFORMS.items():
        levels = (_transformed(trial.device, chosen) - _transformed("cpu", chosen)).abs()
        trial.check(f"{name}: mean difference of a pixel", levels.mean().item(), "of 255", at_most=0.5)
        apart = (levels > 2).double().mean().item()
        trial.check(f"{name}: pixels that differ by more than 2 of 255", apart, "of all", at_most=0.01)


def bit_for_bit(trial: Trial) -> None:
    """With deterministic kernels: a run repeated, one stopped and resumed, and a plain loop have the same weights."""
    torch.use_deterministic_algorithms(True)
    for precision in ("float32", "bfloat16"):
        chosen: dict[str, Any] = {"precision": precision, "device": trial.device, "ema_decay": 0.9, "mixup": 0.2}
        options = config(model=_NETWORK, **chosen)
        folders = [trial.folder / f"{precision}-{name}" for name in ("whole", "again", "parts")]
        whole, again, _ = (_train(options, each, stop) for each, stop in zip(folders, (None, None, 3), strict=True))
        _same_bits(trial, f"{precision}, repeated", again, whole)
        _same_bits(trial, f"{precision}, stopped and resumed", _train(options, folders[2]), whole)
    model = "tests.gpu.same:network_without_chance"
    options = config(model=model, precision="float32", device=trial.device, momentum=0.9, weight_decay=0.01)
    ours, plain = _train(options, trial.folder / "ours"), _train_plainly(options, trial.folder / "plain")
    _same_bits(trial, "float32, as a plain loop", ours, plain)


def two_workers(trial: Trial) -> None:
    """Two processes that share the device, joined by gloo: they compute what one process computes."""
    chosen = {name: case for name, case in _on(trial, cases(2)).items() if case.options.precision == "float64"}
    together_, differences = together(chosen, 2), {}
    for name, case in chosen.items():
        plain = alone(case, 2)[0].state_dict()
        differences[name] = max(_difference(results[name]["state"], plain) for results in together_)
    _note_worst(trial, f"float64, {len(chosen)} runs of 7 steps", differences, _LIMITS["float64"])


def _on(trial: Trial, chosen: Mapping[str, Case]) -> dict[str, Case]:
    """The same cases on the device of the trial."""
    moved = {name: dataclasses.replace(case.options, device=trial.device) for name, case in chosen.items()}
    return {name: dataclasses.replace(case, options=moved[name]) for name, case in chosen.items()}


def _difference(some: Weights, others: Weights) -> float:
    return max((some[name].double().cpu() - others[name].double().cpu()).abs().max().item() for name in others)


def _note_worst(trial: Trial, what: str, differences: Mapping[str, float], limit: float) -> None:
    worst = max(differences, key=lambda name: differences[name])
    trial.check(f"{what}: largest difference of a weight or loss", differences[worst], "", at_most=limit)
    for name, difference in differences.items():
        if not difference <= limit:
            trial.says(f"{name}: {difference:.3g}")


def _transformed(device: str, chosen: Mapping[str, Any]) -> Tensor:
    """Smooth images after the transforms, in levels of 0 to 255, on the CPU."""
    options = config(precision="float32", image_size=(32, 32), flip="none", translate=0, device=device, **chosen)
    coarse = torch.from_numpy(np.random.default_rng(0).uniform(0, 255, (32, 3, 6, 6)))
    smooth = nn.functional.interpolate(coarse, (32, 32), mode="bilinear").to(torch.uint8).permute(0, 2, 3, 1)
    pixels = Augment(options).train(smooth.contiguous().to(device), np.arange(32), 0)
    return pixels.cpu() * torch.tensor(options.std)[:, None, None] * 255


def _train(options: Any, folder: Path, stop_after: int | None = None) -> Weights:
    run = make_run(options, images(64), str(folder), Recorder(stop_after))
    torch.backends.cudnn.benchmark = False  # trials would choose between kernels by the time that they take
    trained(run)
    state = {name: each for kind in ("model", "average") for name, each in _named(run, kind)}
    return {name: value.cpu().clone() for name, value in state.items()}


def _named(run: Any, kind: str) -> Any:
    model = run.models.trained[0] if kind == "model" else run.models.evaluated
    return ((f"{kind}.{name}", value) for name, value in model.state_dict().items())


def _train_plainly(options: Any, folder: Path) -> Weights:
    run = make_run(options, images(64), str(folder), Recorder())
    torch.backends.cudnn.benchmark = False
    model = run.build_model().to(options.device, torch.float32)
    kept = {"momentum": options.momentum, "weight_decay": options.weight_decay}
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate, fused=True, **kept)
    train_alone(model, optimizer, plain_batches(run, images(64), (1.0,)), [options.learning_rate] * run.plan.num_steps)
    return {f"model.{name}": value.cpu() for name, value in model.state_dict().items()}


def _same_bits(trial: Trial, name: str, some: Weights, others: Weights) -> None:
    different = sum(not torch.equal(some[each], others[each]) for each in others)
    trial.check(f"{name}: tensors that differ, of {len(others)}", different, "", at_most=0)
