"""Options of the evaluation on the test images, and of what stops a run that is good enough."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from raytrain.config.limits import NonNegativeInt, PositiveInt
from raytrain.errors import UsageError

if TYPE_CHECKING:
    from raytrain.config.options import TrainConfig

TestView = Literal["flip", "shift"]


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Evaluations on the test images."""

    evaluate_every: NonNegativeInt = 1
    """Epochs between evaluations on the test images; 0: only at the end."""
    until: Annotated[str | None, "METRIC=X"] = None
    """Stop when an evaluation reaches this, such as accuracy=0.95, or loss=0.2, which is an upper limit."""
    patience: PositiveInt | None = None
    """Stop after this many evaluations, one after the other, that are not better than the best by --best."""
    best: str | None = None
    """Metric that decides on the best checkpoint, such as loss; by default accuracy, or mean_average_precision."""
    test_views: tuple[TestView, ...] = ()
    """Average the logits of test images over their mirror images (flip), over copies shifted by a pixel (shift)."""

    @property
    def target(self) -> tuple[str, float] | None:
        """The metric that ``until`` names, and its value."""
        name, _, value = (self.until or "").partition("=")
        return (name, float(value)) if self.until else None


def check_evaluation(config: TrainConfig) -> None:
    """Raise UsageError if evaluations cannot stop the run as they should."""
    if config.until is not None and not re.fullmatch(r"\w+=\d*\.?\d+", config.until):
        raise UsageError(f"--until is {config.until!r}; give a metric and a number, such as accuracy=0.95.")
    if (config.until or config.patience) and not config.evaluate_every:
        raise UsageError("--until and --patience look at evaluations, of which --evaluate-every 0 makes none.")
