"""Rows of the metrics history, images that could not be used, and labels that look wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

from raytrain.config.option_values import fits_64_bits
from raytrain.runs.documents import known_fields, plain

Kind = Literal["step", "evaluation", "test"]
"""A row of training steps, of the validation images, or, at the end, of the test images."""


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One row of the history. A value that is unknown, or was not finite when it was written, is None.

    ``elapsed_s`` are the seconds on the clock of the run, over all attempts. ``samples_seen`` counts the training
    images so far. ``data_wait_fraction`` is the part of the time in which the loop has waited for images. ``metrics``
    are ``loss``, ``accuracy`` and whatever else a training loop logs, by name.
    """

    kind: Kind
    step: int  # completed steps
    epoch: int  # counted from 1
    elapsed_s: float = 0.0
    samples_seen: int | None = None
    learning_rate: float | None = None
    images_per_s: float | None = None
    data_wait_fraction: float | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict[str, float | None])

    @property
    def loss(self) -> float | None:
        """The mean loss over the images of the row."""
        return self.metrics.get("loss")

    @property
    def accuracy(self) -> float | None:
        """The fraction of the row's images that were classified correctly, 0 to 1."""
        return self.metrics.get("accuracy")

    def value(self, name: str) -> float | None:
        """Return the field or the metric called ``name``; None if the row has none."""
        return getattr(self, name) if name in OWN_COLUMNS else self.metrics.get(name)

    def to_json(self) -> dict[str, Any]:
        """Return the row as a flat dictionary of fields and metrics.

        Fields that are None are left out, and a number that is not finite becomes None.
        """
        columns = {name: getattr(self, name) for name in OWN_COLUMNS if getattr(self, name) is not None}
        return plain({**columns, **self.metrics})

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> MetricRow:
        """Return the row in a document of :meth:`to_json`; raise KeyError or ValueError for another document.

        Entries that are no fields of a row are its metrics.
        """
        kind, step, epoch = document["kind"], document["step"], document["epoch"]
        if kind not in get_args(Kind) or type(step) is not int or type(epoch) is not int:
            raise ValueError(f"a row of the kind {kind!r} of step {step!r} in epoch {epoch!r}")
        # Accept only numbers that Arrow can hold, so that both ways to read a history accept the same rows.
        are_numbers = all(
            value is None or type(value) is float or (type(value) is int and fits_64_bits(value))
            for name, value in document.items()
            if name != "kind"
        )
        if step < 0 or epoch < 1 or not are_numbers:
            raise ValueError("a number is out of range, or something else")
        columns = {name: value for name in OWN_COLUMNS if (value := document.get(name)) is not None}
        metrics = {name: value for name, value in document.items() if name not in OWN_COLUMNS}
        return cls(**columns, metrics=metrics)


OWN_COLUMNS = tuple(column.name for column in fields(MetricRow) if column.name != "metrics")
"""The fields of a row besides its metrics, which therefore cannot have these names."""
_METRICS_OF_EVERY_RUN = ("loss", "accuracy", "balanced_accuracy", "macro_f1")


def own_metrics(train: MetricRow | None, validation: MetricRow | None) -> dict[str, float | None]:
    """Return the last values, by name, of the metrics that this run's loop adds to those of every run.

    ``train`` and ``validation`` are the last rows of steps and of an evaluation. The names are words for people.

    Example:
        >>> own_metrics(MetricRow(kind="step", step=1, epoch=1, metrics={"loss": 2.3, "gradient_norm": 0.1}), None)
        {'gradient norm': 0.1}
    """
    rows = {"": train, "validation ": validation}
    return {
        f"{prefix}{name}".replace("_", " "): value
        for prefix, row in rows.items()
        for name, value in (row.metrics.items() if row else ())
        if name not in _METRICS_OF_EVERY_RUN
    }


def steps_per_epoch(rows: Iterable[MetricRow]) -> int:
    """Return the smallest number of steps, at least 1, that puts every row into the epoch that it names.

    The result is exact once there is a row at the end of an epoch.
    """
    return max([1, *(math.ceil(row.step / row.epoch) for row in rows)])  # an evaluation may come before the first step


@dataclass(frozen=True)
class SkippedImage:
    """An image that could not be used, by its ``key`` in the manifest, and why."""

    key: str
    reason: str

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SkippedImage:
        """Return the image of a line of skipped.jsonl; raise TypeError if the line is something else."""
        return cls(**known_fields(cls, document))


@dataclass(frozen=True, kw_only=True)
class SkipLimit:
    """Limit on skipped images, as a fraction of all ``num_images`` images of a run."""

    num_images: int
    max_bad_fraction: float = 0.01

    def exceeded(self, skipped: Sequence[SkippedImage]) -> str | None:
        """Return a sentence, without its full stop, if these skipped images are too many; None if the run may go on."""
        if not skipped:
            return None
        fraction = len(skipped) / self.num_images
        if fraction <= self.max_bad_fraction:
            return None
        first = f"{skipped[0].key} ({skipped[0].reason})"
        return (
            f"{len(skipped):,} of {self.num_images:,} images ({100 * fraction:.3g} %) cannot be used, such as {first}, "
            f"and --max-bad-fraction is {self.max_bad_fraction:g}; skipped.jsonl lists them: repair or remove them and "
            "start a new run, or allow more"
        )


NUM_SUSPICIOUS_SHOWN = 16  # images whose labels look wrong, while a run trains


class SuspiciousLabel(NamedTuple):
    """A training image whose label looks wrong, by its number; margin and loss are means over its draws.

    :mod:`raytrain.training.metrics.sample_margins` computes them.
    """

    sample: int  # index into the manifest
    draws: int
    margin: float  # logit of the label, minus the largest one of another class
    loss: float  # cross entropy
    suggested: int  # the likeliest other class in its latest draw
