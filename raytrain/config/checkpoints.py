"""Options of checkpoints, and of the recovery from failures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, NamedTuple

from raytrain.config.option_marks import KnownAs, Mark
from raytrain.config.option_values import TEXTS, NonNegativeInt, PositiveInt, option_field, seconds, section
from raytrain.errors import UsageError


class Intervals(NamedTuple):
    """The intervals between checkpoints; the next checkpoint is due when any of them is over. 0: no such interval."""

    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Intervals:
        """Return the intervals that ``texts`` name; raise UsageError for a text that names none, or two of one unit.

        The word ``none`` adds no interval, and must be the only text.

        Example: ``Intervals.parse(["1ep", "10m"]) == Intervals(epochs=1, seconds=600)``
        """
        intervals, units = cls(), set[str]()
        texts = tuple(texts)
        for text in texts:
            if count := re.fullmatch(r"([1-9]\d*)(ep|st)", text):
                unit = "epochs" if count[2] == "ep" else "steps"
                intervals = intervals._replace(**{unit: int(count[1])})
            elif time := seconds(text):
                unit = "seconds"
                intervals = intervals._replace(seconds=time)
            elif text == "none":
                unit = text
            else:
                raise UsageError(
                    f"--checkpoint-every is {text!r}; give epochs, steps or a time, such as 1ep, 500st or 10m, or none."
                )
            # A second interval of a unit would replace the first one, and beside others, none would have no effect.
            if units and (unit in units or "none" in (unit, *units)):
                raise UsageError(
                    f"--checkpoint-every is {' '.join(texts)}; give at most one interval of epochs, one of steps and "
                    "one of time, such as 1ep 10m, or none alone."
                )
            units.add(unit)
        return intervals


@section
class CheckpointOptions:
    """Checkpoints, and recovery from failures."""

    checkpoint_every: Annotated[tuple[str, ...], "[Nep] [Nst] [TIME]", Mark.SET_BY_FIND_RATE] = option_field(
        default=("1ep", "10m"), converter=TEXTS
    )
    """Epochs, steps or time between checkpoints, such as 1ep, 500st or 10m; none: only at the end."""
    keep_checkpoints: Annotated[PositiveInt, Mark.SET_BY_FIND_RATE, KnownAs("checkpoint-hist save-top-k")] = 2
    """Number of newest checkpoints to keep, besides the best."""
    max_failures: Annotated[NonNegativeInt, Mark.OF_LAUNCHER] = 3
    """How many times a run whose workers fail starts again from its last checkpoint. A loop that fails twice in the
    same way ends it."""

    @property
    def checkpoint_intervals(self) -> Intervals:
        """``checkpoint_every``, parsed."""
        return Intervals.parse(self.checkpoint_every)
