"""Images that a run could not use, and how many of them end it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain.config import TrainConfig


@dataclass(frozen=True)
class SkippedImage:
    """An image that could not be used, by its ``key`` in the manifest, and why."""

    key: str
    reason: str

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SkippedImage:
        """The image of a line of skipped.jsonl. Raises KeyError or ValueError if the line is something else."""
        key, reason = document["key"], document["reason"]
        if not (isinstance(key, str) and isinstance(reason, str)):
            raise ValueError("key and reason must be text")
        return cls(key, reason)


@dataclass(frozen=True, kw_only=True)
class SkipLimit:
    """How many of the ``num_images`` images of a run, training and test images together, may be skipped."""

    num_images: int
    max_bad_fraction: float = 0.01

    @classmethod
    def of(cls, config: TrainConfig, num_images: int) -> SkipLimit:
        """What ``config`` allows."""
        return cls(num_images=num_images, max_bad_fraction=config.max_bad_fraction)

    def exceeded(self, skipped: Sequence[SkippedImage]) -> str | None:
        """Why a run that skipped these images must end, without a full stop; None if it may continue."""
        if not skipped:
            return None
        fraction = len(skipped) / self.num_images
        if fraction <= self.max_bad_fraction:
            return None
        first = f"{skipped[0].key} ({skipped[0].reason})"
        return (
            f"{len(skipped):,} of {self.num_images:,} images ({100 * fraction:.2g} %) cannot be used, such as {first}, "
            f"and --max-bad-fraction is {self.max_bad_fraction:g}; skipped.jsonl lists them: repair or remove them and "
            "start a new run, or allow more"
        )
