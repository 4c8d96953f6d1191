"""The coordinator of a sweep: that of a run, for all trials together, which also keeps how each trial stands."""

from __future__ import annotations

from dataclasses import dataclass

from ray.actor import ActorProxy

from raytrain.backends.ray.coordinator import Coordinator, RunInStorage
from raytrain.runs.outcome import StopReason
from raytrain.runs.trial_status import TrialStatus


@dataclass(frozen=True)
class SweepState:
    """How a sweep stands at one moment.

    ``statuses`` are those of the trials that have started, by number; ``stop_request`` asks all trials to stop;
    ``failure`` is why the images cannot be used.
    """

    statuses: dict[int, TrialStatus]
    stop_request: StopReason | None
    failure: str | None


class SweepCoordinator(Coordinator):
    """A coordinator that also keeps the status of each trial, and the requests to stop one trial early.

    Its monitor is the sweep's: it keeps the images that were skipped and the request to stop all trials. The metrics of
    a trial are kept by the trial's own monitor.
    """

    def __init__(self, run: RunInStorage) -> None:
        super().__init__(run)
        self._statuses: dict[int, TrialStatus] = {}
        self._early_stops: dict[int, StopReason] = {}

    def report_status(self, trial: int, status: TrialStatus) -> None:
        """Keep how a trial stands."""
        self._statuses[trial] = status

    def request_early_stop(self, trial: int, request: StopReason) -> None:
        """Ask one trial to stop with a checkpoint."""
        self._early_stops[trial] = request

    def trial_stop_request(self, trial: int) -> StopReason | None:
        """The request that this trial, or the whole sweep, should stop; None as long as there is none."""
        return self._early_stops.get(trial) or self._monitor.stop_request

    def state(self) -> SweepState:
        """How the sweep stands."""
        return SweepState(self._statuses, self._monitor.stop_request, self._monitor.failure)


SweepCoordinatorHandle = ActorProxy[SweepCoordinator]
