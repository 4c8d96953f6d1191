"""Options of the evaluation on the validation images, and of what stops a run that is good enough."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from raytrain.config.option_marks import KnownAs, Mark
from raytrain.config.option_values import TEXTS, Accepts, NonNegativeInt, PositiveInt, option_field, section
from raytrain.errors import UsageError, did_you_mean

TestView = Literal["flip", "shift"]

NAMED_METRICS = ("top5", "auroc", "average_precision", "calibration_error")
"""Metrics that evaluations measure if an option names them; ``top5`` may have another number."""
_FRACTIONS = ("accuracy", "balanced_accuracy", "macro_f1", "mean_average_precision", *NAMED_METRICS)
_NAMED = re.compile(r"top[1-9]\d*|auroc|average_precision|calibration_error")


@section
class EvaluationOptions:
    """Evaluations on the validation images."""

    evaluate_every: Annotated[NonNegativeInt, Mark.CHOSEN_BY_AUTO, Mark.SET_BY_FIND_RATE] = 1
    """Epochs between evaluations on the validation images; 0: only at the end."""
    until: Annotated[str | None, "METRIC=X", Mark.COMMON, Mark.SWEEPABLE, Mark.SET_BY_FIND_RATE] = option_field(
        default=None, converter=Accepts[str | Mapping[str, float] | Sequence[str | float] | None, str | None]()
    )
    """Stop when an evaluation reaches this, such as accuracy=0.95, or loss=0.2, which is an upper limit."""
    patience: Annotated[
        PositiveInt | None, Mark.SWEEPABLE, Mark.SET_BY_FIND_RATE, KnownAs("early-stopping-patience")
    ] = None
    """Stop after this many evaluations, one after the other, that are not better than the best by --best."""
    best: Annotated[str | None, Mark.SWEEPABLE, Mark.SHAPES_STATE, Mark.SET_BY_FIND_RATE] = None
    """Metric that decides on the best checkpoint, such as loss; by default accuracy, or mean_average_precision if an
    image may have several classes."""
    metrics: Annotated[tuple[str, ...], Mark.SET_BY_FIND_RATE] = option_field(default=(), converter=TEXTS)
    """Further metrics of each evaluation: top5, auroc, average_precision, calibration_error, torchmetrics:CLASS."""
    test_views: Annotated[tuple[TestView, ...], Mark.CHOSEN_BY_AUTO, Mark.SET_BY_FIND_RATE] = option_field(
        default=(), converter=Accepts[TestView | Sequence[TestView] | None, tuple[TestView, ...]]()
    )
    """Average the logits of images that are measured with those of mirror images (flip) or shifted copies (shift)."""

    @property
    def target(self) -> tuple[str, float] | None:
        """The metric that ``until`` names, and its value: ``("accuracy", 0.95)``; None without ``until``."""
        name, _, value = (self.until or "").partition("=")
        return (name, float(value)) if self.until else None

    @property
    def named_metrics(self) -> tuple[str, ...]:
        """Further metrics of each evaluation: ``metrics``, and those that ``best`` and ``until`` name."""
        # Each evaluation measures accuracy and the like anyway; one such as top5 only if an option names it.
        needed = self.best, self.target and self.target[0]
        named = [*self.metrics, *(name for name in needed if name is not None and _NAMED.fullmatch(name))]
        return tuple(dict.fromkeys(named))


def is_fraction(metric: str) -> bool:
    """Return True if ``metric``, one of the built-in evaluation, is a fraction, so that no value of it lies above 1.

    Example: ``is_fraction("accuracy") and is_fraction("top3") and not is_fraction("loss")``
    """
    return metric in _FRACTIONS or re.fullmatch(r"top\d+", metric) is not None


def check_evaluation(options: EvaluationOptions) -> None:
    """Raise UsageError if ``until`` or a metric is malformed, or evaluations are needed that never happen."""
    form = r"\w+=([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
    target = None if options.until is None else re.fullmatch(form, options.until)
    if options.until is not None and (target is None or not math.isfinite(float(target[1]))):
        raise UsageError(f"--until is {options.until!r}; give a metric and a number, such as accuracy=0.95.")
    for name in options.metrics:
        if not (_NAMED.fullmatch(name) or re.fullmatch(r"torchmetrics:[A-Za-z]\w*(\(.*\))?", name)):
            raise UsageError(
                f"--metrics has {name!r}{did_you_mean(name, NAMED_METRICS)}; give {', '.join(NAMED_METRICS)}, or "
                "torchmetrics: and one of its classes, such as torchmetrics:MulticlassCohenKappa."
            )
    if (options.until or options.patience) and not options.evaluate_every:
        raise UsageError("--until and --patience look at evaluations, of which --evaluate-every 0 makes none.")
