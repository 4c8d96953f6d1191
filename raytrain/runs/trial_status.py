"""How a trial of a sweep stands at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain.runs.outcome import StopReason

WAITING = "waiting"


@dataclass(frozen=True, kw_only=True)
class TrialStatus:
    """How a trial stands. What is not known yet is None; ``accuracy`` is the best on the test images so far."""

    status: str = WAITING
    step: int = 0
    num_steps: int = 0
    epoch: int = 0
    num_epochs: int = 0
    loss: float | None = None
    accuracy: float | None = None
    num_evaluations: int = 0
    images_per_s: float | None = None
    reason: str | StopReason | None = None
