"""How many images of a run may be unreadable before the run ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raytrain.config import TrainConfig
from raytrain.runs.history import Row


@dataclass(frozen=True, kw_only=True)
class BadImageLimit:
    """How many of the ``num_images`` images of a run, training and test together, may be unusable."""

    num_images: int
    on_bad_image: Literal["skip", "fail"] = "skip"
    max_bad_fraction: float = 0.01

    @classmethod
    def of(cls, config: TrainConfig, num_images: int) -> BadImageLimit:
        """What ``config`` allows."""
        return cls(num_images=num_images, on_bad_image=config.on_bad_image, max_bad_fraction=config.max_bad_fraction)

    def passed(self, skipped: Sequence[Row]) -> str | None:
        """The sentence (no full stop) that ends a run which skipped these, ``key`` and ``reason`` each; None where it may go on."""
        if not skipped:
            return None
        first = f"{skipped[0]['key']} ({skipped[0]['reason']})"
        if self.on_bad_image == "fail":
            return f"{first} cannot be used, and --on-bad-image is fail; mend or remove it and start a new run, or give --on-bad-image skip"
        fraction = len(skipped) / self.num_images
        if fraction <= self.max_bad_fraction:
            return None
        return (
            f"{len(skipped):,} of {self.num_images:,} images ({100 * fraction:.2g} %) cannot be used, such as {first}, and "
            f"--max-bad-fraction is {self.max_bad_fraction:g}; skipped.jsonl lists them: mend or remove them and start a new run, or "
            f"allow more"
        )
