"""The coordinator of a run: a plain class, which Ray hosts in an actor and the local backend at a socket."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import Any

from raytrain.errors import LoopFailed, OutOfMemory, RaytrainError, UsageError
from raytrain.monitor.events import WorkerFailed
from raytrain.monitor.monitor import RunMonitor
from raytrain.runs.history import History
from raytrain.runs.outcome import Outcome
from raytrain.runs.redact import redact
from raytrain.storage.store import Store

_logger = logging.getLogger(__name__)
_DIFFERENT_PLACES = (
    "The workers wait for each other in different places: worker {} {}, and worker {} {}; every worker must make the "
    "same calls of the run, and of networks with batch norm: decide by what all of them know, such as run.total(...)."
)


@dataclass
class Ending:
    """What is known of a run's end: ``outcome`` and ``error`` are the workers' last words, at most one of them.

    ``trace`` is the error's traceback. ``failure`` is why the run has to end although its workers could continue, and
    ``lost`` why they failed last.
    ``is_checked``: the network, its weights and the options fit together, so that the run may be written down.
    """

    is_checked: bool = False
    outcome: Outcome | None = None
    error: RaytrainError | None = None
    trace: str = ""
    failure: str | None = None
    lost: str | None = None

    @property
    def has_come(self) -> bool:
        """Whether the workers have nothing more to say."""
        return self.outcome is not None or self.error is not None

    @property
    def reason(self) -> str | None:
        """Why the run failed, as far as the workers or the monitor know; None if it did not."""
        return self.failure or (self.error and str(self.error)) or (self.outcome and self.outcome.error)

    @property
    def accumulate(self) -> int | None:
        """In how many parts a global batch may fit into memory, if it did not."""
        return self.error.accumulate if isinstance(self.error, OutOfMemory) else None


class Coordinator(RunMonitor):
    """The monitor of the run in ``store``, with what it has ``known`` from the start, and what its workers say."""

    def __init__(self, name: str, store: Store, **known: Any) -> None:
        super().__init__(name, history=History(store), **known)
        self._ending = Ending()
        self._end_has_come = threading.Event()
        self._first_told: dict[str, int] = {}  # the start in which a failure of the loop was told first
        self._places: dict[int, str | None] = {}  # where each worker waits for the others
        self._still: set[int] = set()  # the workers that still did after the last of them had begun
        self._told: str | None = None  # by the first worker that failed, since the workers were started last

    def checked(self) -> None:
        """The network, its weights and the options fit together."""
        self._ending.is_checked = True

    def conclude(self, outcome: Outcome) -> None:
        """The run is over for its workers."""
        self._ending.outcome = outcome
        self._end_has_come.set()

    def give_up(self, error: RaytrainError, trace: str = "") -> bool:
        """A worker met an error of the user's; returns whether the run ends by it, for a start would end the same way.

        A loop that fails after some steps is started again, unless an earlier start ended by the same failure.
        """
        told_in = self._first_told.setdefault(str(error), self._attempt)
        if isinstance(error, LoopFailed) and error.may_pass and told_in == self._attempt:
            self._told = self._told or str(error)
            return False
        if self._ending.error is None:
            self._ending.error, self._ending.trace = error, trace
        self._end_has_come.set()
        return True

    def waits(self, rank: int, num_workers: int, place: str | None) -> None:
        """A worker waits long for the others in a ``place`` of the loop. If all do, in different places, give up."""
        if place is None or self._places.get(rank) != place:
            self._places[rank] = place
            self._still.clear()
        else:
            self._still.add(rank)
        first_in = {self._places.get(each): each for each in reversed(range(num_workers))}
        if self._still.issuperset(range(num_workers)) and len(first_in) > 1:
            found = sorted((rank, place) for place, rank in first_in.items())
            self.give_up(UsageError(_DIFFERENT_PLACES.format(*found[0], *found[1])))

    def worker_failed(self, rank: int, reason: str, trace: str) -> None:
        """A worker cannot continue; its neighbours end, too."""
        _logger.debug("worker %d failed: %s", rank, redact(trace))
        self._told = self._told or f"worker {rank} failed: {reason}"

    def workers_lost(self, dead: dict[int, str]) -> None:
        """All workers have ended, and start again unless they have failed too often; ``dead`` says how, by rank."""
        lost = (
            " and ".join(f"worker {rank} {how}" for rank, how in dead.items())
            or self._told
            or "the workers exited without an error message"
        )
        self._ending.lost, self._told = lost, None
        self.event(WorkerFailed(lost))

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds until the workers have said how the run ends."""
        self._end_has_come.wait(timeout_s)

    def ending(self) -> Ending:
        """How the run ends, as far as this is known."""
        return replace(self._ending, failure=self.failure)
