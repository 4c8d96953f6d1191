"""Tells which precisions a device computes natively, and warns of others. Imports torch only within functions."""

from __future__ import annotations

import timeit
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NATIVE_FLAGS = {"bfloat16": {"amx_bf16", "avx512_bf16"}, "float16": {"amx_fp16", "avx512_fp16"}}
"""Flags of x86 CPUs that multiply numbers of this type natively; one of the flags is enough."""
AMPERE = (8, 0)  # the compute capability since which NVIDIA's GPUs multiply in bfloat16 and TF32
_SINCE_AMPERE = {
    "tf32": "only NVIDIA GPUs since Ampere have tf32: this run trains in float32",
    "bfloat16": "only NVIDIA GPUs since Ampere have bfloat16: this one emulates it, which is slower than float32; "
    "--precision auto avoids that",
}

CPU_INFO = Path("/proc/cpuinfo")
_IMAGES_SHAPE, _WEIGHT_SHAPE = (32, 64, 16, 16), (64, 64, 3, 3)  # of a typical convolution
_NUM_TIMES = 5  # for which each precision is timed
_WORTH_A_WARNING = 1.1  # the slowdown from which on users are warned


def cpu_flags() -> frozenset[str]:
    """Return the CPU flags that Linux lists for this machine; none on other systems and processors."""
    if not CPU_INFO.exists():
        return frozenset()
    # The first processor has those of all, in a line such as "flags : fpu vme avx512_bf16".
    lines = (line.partition(":") for line in CPU_INFO.read_text().splitlines())
    return next((frozenset(flags.split()) for name, _, flags in lines if name.strip() == "flags"), frozenset())


def set_gpu_products(precision: str) -> None:
    """Let this process's GPUs round the factors of float32 products to TF32, unless ``precision`` is float32."""
    import torch

    may_round = precision != "float32"
    torch.backends.cudnn.allow_tf32 = may_round
    torch.backends.cuda.matmul.allow_tf32 = may_round


def precision_warning(precision: str, device: torch.device) -> str | None:
    """Return a sentence if ``device`` lacks ``precision``: it trains in float32, or emulates it at a measured cost.

    Return None if it has the precision, or emulates it without a slowdown. Measuring takes a moment.
    """
    import torch

    if device.type == "cuda":
        lacks = precision in _SINCE_AMPERE and torch.cuda.get_device_capability(device) < AMPERE
        return _SINCE_AMPERE[precision] if lacks else None
    if precision == "tf32":
        return _SINCE_AMPERE[precision]
    # CPUs without these flags of x86, such as ARM's, may still be fast; the measurement shows it.
    if precision not in NATIVE_FLAGS or NATIVE_FLAGS[precision] & cpu_flags():
        return None
    ratio = measure_slowdown(precision)
    if ratio < _WORTH_A_WARNING:
        return None
    return (
        f"this CPU emulates {precision}: a convolution takes {ratio:.1f} times as long as in float32; "
        "--precision auto avoids that"
    )


def measure_slowdown(precision: str) -> float:
    """Return how many times as long a convolution takes on this CPU in mixed ``precision`` as in float32.

    It is a forward and a backward, which are timed several times; the fastest time counts. Torch's random generators
    are not used.
    """
    import torch
    from torch.nn.functional import conv2d

    # The time does not depend on the numbers, so ones are enough.
    images, weight = torch.ones(_IMAGES_SHAPE), torch.ones(_WEIGHT_SHAPE, requires_grad=True)

    def step(mixed: bool) -> None:
        with torch.autocast("cpu", getattr(torch, precision), enabled=mixed):
            conv2d(images, weight).float().sum().backward()

    fastest_s: list[float] = []
    for mixed in (True, False):
        step(mixed)  # warm-up: the first call sets things up
        fastest_s.append(min(timeit.repeat(partial(step, mixed), number=1, repeat=_NUM_TIMES)))
    return fastest_s[0] / fastest_s[1]
