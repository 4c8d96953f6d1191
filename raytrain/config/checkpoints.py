"""Options of checkpoints: how often they are written, how many are kept, and how often a run recovers from one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from raytrain.config.limits import NonNegativeInt, PositiveInt, seconds
from raytrain.errors import UsageError

if TYPE_CHECKING:
    from raytrain.config.options import TrainConfig


class Intervals(NamedTuple):
    """A checkpoint is due after so many epochs, steps or seconds, whichever comes first; 0: not by these."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Intervals:
        """The intervals of texts such as ``1ep``, ``500st``, ``10m`` and ``none``; raises UsageError."""
        intervals = cls()
        for text in texts:
            if count := re.fullmatch(r"([1-9]\d*)(ep|st)", text):
                unit = "epochs" if count[2] == "ep" else "steps"
                intervals = intervals._replace(**{unit: int(count[1])})
            elif time := seconds(text):
                intervals = intervals._replace(seconds=time)
            elif text != "none":
                raise UsageError(
                    f"--checkpoint-every is {text!r}; give epochs, steps or a time, such as 1ep, 500st or 10m, or none."
                )
        return intervals


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints, and recovery from failures."""

    checkpoint_every: Annotated[tuple[str, ...], "[Nep] [Nst] [TIME]"] = ("1ep", "10m")
    """Epochs, steps or time between checkpoints, such as 1ep, 500st or 10m; none: only at the end."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep, besides the best."""
    max_failures: NonNegativeInt = 3
    """Failures of the worker group to recover from; each time the run continues from its last checkpoint."""

    @property
    def checkpoint_intervals(self) -> Intervals:
        """``checkpoint_every``, parsed."""
        return Intervals.parse(self.checkpoint_every)


def check_checkpoints(config: TrainConfig) -> None:
    """Raise UsageError if the intervals between checkpoints are malformed."""
    if isinstance(config.checkpoint_every, str):
        raise UsageError(f"checkpoint_every is the text {config.checkpoint_every!r}; give a tuple of such texts.")
    Intervals.parse(config.checkpoint_every)
