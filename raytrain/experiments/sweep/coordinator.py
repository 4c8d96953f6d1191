"""The actor of a sweep: what a run's actor has for all of its trials together, and how each of them stands."""

from __future__ import annotations

from raytrain.backends.ray.coordinator import Coordinator
from raytrain.runs.history import Row
from raytrain.runs.trial_status import TrialStatus


class SweepCoordinator(Coordinator):
    """Lends keys, knows where the shared images are, which of them cannot be read, who asked for a stop, and how the trials stand."""

    def __init__(self) -> None:
        super().__init__()
        self._standings: dict[int, TrialStatus] = {}
        self._early: dict[int, str] = {}

    def tell(self, trial: int, standing: TrialStatus) -> None:
        """Note how a trial stands."""
        self._standings[trial] = standing

    def standings(self) -> dict[int, TrialStatus]:
        """How the trials stand that have begun, by number."""
        return self._standings

    def end_early(self, trial: int, reason: str) -> None:
        """Note that a trial is to stop, for it is worse than the others."""
        self._early[trial] = reason

    def early(self, trial: int) -> str | None:
        """Why a trial is to stop before the others; None where it may go on."""
        return self._early.get(trial)

    def skipped_rows(self) -> list[Row]:
        """The images that could not be read so far."""
        return self._history.skipped_rows

    def unusable(self) -> str | None:
        """Why the images cannot be trained on: too many of them cannot be read; None where they can."""
        return self.failure
