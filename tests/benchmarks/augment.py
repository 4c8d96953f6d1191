"""RandAugment and the other random changes of a batch, beside torchvision's transforms image by image, on two threads.

Both take turns in one process, so that whatever else the machine does meets both. torchvision's side is what a loop has
to do for random numbers of each image's own: it seeds torch for each image and calls the transforms.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms import v2

import raytrain
from raytrain.data.images.malloc import keep_freed_memory
from tests.benchmarks.report import Check, Figure, Report
from tests.benchmarks.runner import Bench, Side

_BATCH = {64: 256, 224: 64}  # images, by their side
_FILL: Any = [124, 116, 104]  # torchvision says float, and takes one for each channel
_LEAST = {64: 5.0, 224: 3.0}  # by their side: how many times torchvision's images/s
_BILINEAR = v2.InterpolationMode.BILINEAR
_KINDS: dict[str, tuple[dict[str, Any], Callable[[int], Any]]] = {
    "RandAugment": (
        {"auto_augment": "randaugment"},
        lambda side: v2.RandAugment(interpolation=_BILINEAR, fill=_FILL),
    ),
    "TrivialAugment": (
        {"auto_augment": "trivialaugment"},
        lambda side: v2.TrivialAugmentWide(interpolation=_BILINEAR, fill=_FILL),
    ),
    "rotation": ({"rotation": 15}, lambda side: v2.RandomRotation([-15, 15], interpolation=_BILINEAR, fill=_FILL)),
    "colour jitter": ({"color_jitter": 0.4}, lambda side: v2.ColorJitter(0.4, 0.4, 0.4)),
    "blur": ({"blur": 0.5}, lambda side: v2.RandomApply([v2.GaussianBlur(side // 10 * 2 + 1, (0.1, 2.0))], 0.5)),
    "erasing": ({"random_erasing": 0.5}, lambda side: v2.RandomErasing(0.5, value=_FILL)),
}


def measure(bench: Bench) -> Report:
    figures: list[Figure] = []
    checks: list[Check] = []
    for side, least in _LEAST.items():
        rounds = bench.scaled(12, least=3)
        speeds: dict[str, dict[str, list[float]]] = bench.alone(Side(images_per_s, {"side": side, "rounds": rounds}))
        for kind, of_kind in speeds.items():
            figures += [Figure(f"{side}x{side}, {kind}: {way}", "images/s", each) for way, each in of_kind.items()]
            ratio = median(of_kind["raytrain"]) / median(of_kind["torchvision"])
            required = least if kind == "RandAugment" else 1.0
            checks.append(Check(f"{side}x{side}, {kind}: raytrain : torchvision", ratio, at_least=required))
    return Report("augment: batches of 256 small and 64 large images, on 2 threads", figures, checks)


def images_per_s(side: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the images/s of each kind, both ways, in each round; the first one warms up and is left out."""
    batch = _BATCH[side]
    torch.set_num_threads(2)
    keep_freed_memory()  # as each run on a CPU does; otherwise pages that the system gives anew decide the figures
    coarse = torch.rand(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 255
    images = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 255).to(torch.uint8)
    speeds: dict[str, dict[str, list[float]]] = {}
    for kind, (options, make) in _KINDS.items():
        augmentation, transform = raytrain.Augmentation(**options, fill=_FILL), make(side)

        def by_torchvision(number: int, transform: Any = transform) -> Tensor:
            changed: list[Tensor] = []
            for row, image in enumerate(images):
                torch.default_generator.manual_seed(number * batch + row)
                changed.append(transform(image))
            return torch.stack(changed)

        def by_raytrain(number: int, augmentation: raytrain.Augmentation = augmentation) -> Tensor:
            return augmentation(images, range(number * batch, (number + 1) * batch))

        ways = {"torchvision": by_torchvision, "raytrain": by_raytrain}
        speeds[kind] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, change in ways.items():
                started = time.perf_counter()
                change(number)
                speeds[kind][way].append(batch / (time.perf_counter() - started))
        speeds[kind] = {way: each[1:] for way, each in speeds[kind].items()}
    return speeds
