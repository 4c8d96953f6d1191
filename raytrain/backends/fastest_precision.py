"""The fastest precision that trains well: what ``--precision auto`` stands for."""

from __future__ import annotations

from collections.abc import Iterable

from raytrain.backends.gpus import gpus
from raytrain.config.network import Precision
from raytrain.training.precision import AMPERE, NATIVE_FLAGS, cpu_flags


def fastest_precision(device: str) -> Precision:
    """bfloat16 if this machine's CPU, or all of its GPUs, compute it natively; else float32. Never an emulated one.

    bfloat16 has the range of float32, so that training needs no loss scaling; float16 has not.
    """
    if device == "cpu":
        native = bool(NATIVE_FLAGS["bfloat16"] & cpu_flags())
    else:
        native = all(_capability(gpu.capability) >= AMPERE for gpu in gpus())
    return "bfloat16" if native else "float32"


def common_precision(found: Iterable[str | None]) -> Precision:
    """What all workers train with if their machines ``found`` these; None stands for one that did not say."""
    return "bfloat16" if set(found) == {"bfloat16"} else "float32"


def _capability(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
