"""Precisions that a device computes natively. Imports no torch before it is used with a device."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NATIVE_FLAGS = {"bfloat16": {"amx_bf16", "avx512_bf16"}, "float16": {"amx_fp16", "avx512_fp16"}}
"""The flags of x86 CPUs that multiply such numbers themselves; one of them is enough."""
AMPERE = (8, 0)  # the compute capability since which NVIDIA's GPUs multiply in bfloat16 and TF32

_CPU_INFO = Path("/proc/cpuinfo")
_SHAPE, _WEIGHT = (32, 64, 16, 16), (64, 64, 3, 3)  # of a typical convolution
_NUM_TIMES = 5
_WORTH_A_WARNING = 1.1


def cpu_flags() -> frozenset[str]:
    """What this machine's CPU can do, as Linux tells it; nothing on other systems and processors."""
    if not _CPU_INFO.exists():
        return frozenset()
    lines = (line.partition(":") for line in _CPU_INFO.read_text().splitlines())
    return next((frozenset(flags.split()) for name, _, flags in lines if name.strip() == "flags"), frozenset())


def set_gpu_products(precision: str) -> None:
    """Let GPUs round factors of all float32 products to TF32, unless all 23 bits are asked for."""
    import torch

    rounded = precision != "float32"
    torch.backends.cudnn.allow_tf32 = rounded
    torch.backends.cuda.matmul.allow_tf32 = rounded


def precision_warning(precision: str, device: torch.device) -> str | None:
    """A sentence if this device lacks ``precision``: it trains in float32, or emulates it at a cost measured here."""
    if precision == "tf32":
        return None if _has_tf32(device) else "only NVIDIA GPUs since Ampere have tf32: this run trains in float32"
    if device.type != "cpu" or precision not in NATIVE_FLAGS or NATIVE_FLAGS[precision] & cpu_flags():
        return None
    ratio = _slowdown(precision)
    if ratio < _WORTH_A_WARNING:
        return None
    return (
        f"this CPU emulates {precision}: a convolution takes {ratio:.1f} times as long as in float32; "
        "--precision auto avoids that"
    )


def _has_tf32(device: torch.device) -> bool:
    import torch

    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= AMPERE


def _slowdown(precision: str) -> float:
    """How many times as long a convolution takes in mixed precision as in float32, the fastest of several tries."""
    import torch
    from torch.nn.functional import conv2d

    images, weight = torch.ones(_SHAPE), torch.ones(_WEIGHT, requires_grad=True)

    def step(mixed: bool) -> None:
        with torch.autocast("cpu", getattr(torch, precision), enabled=mixed):
            conv2d(images, weight).float().sum().backward()

    return _fastest_s(lambda: step(True)) / _fastest_s(lambda: step(False))


def _fastest_s(action: Callable[[], None]) -> float:
    action()  # the first time, more is set up
    return min(timeit.repeat(action, number=1, repeat=_NUM_TIMES))
