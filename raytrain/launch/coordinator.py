"""The coordinator of a run, which workers call: a plain class, in an actor on Ray, behind a socket on one machine."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytrain.errors import LoopFailed, OutOfMemory, RaytrainError, UsageError, some_of
from raytrain.monitor.events import Note, WorkerFailed
from raytrain.monitor.monitor import RunMonitor
from raytrain.runs.logs import PrintedLine
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import Outcome
from raytrain.runs.redact import redact
from raytrain.storage.store import Store
from raytrain.training.script_logging import LoggedRecord

_log = logging.getLogger(__name__)
_MAX_PRINTED = 10_000  # lines that wait for a driver that hangs; older ones are dropped, but are in the logs
LONG_WAIT_S = 15.0  # seconds after the first report of a wait at which people are told for whom a worker waits
SENT_WITHIN_S = 5.0  # seconds for worker 0 to send the files of its loop to the bucket after another worker has failed
_WAIT_IN_DIFFERENT_PLACES = (
    "The workers wait for each other in different places: worker {} {}, and worker {} {}; every worker must make the "
    "same calls of the run, of backward, and of networks with batch norm: decide by what all of them know, such as "
    "run.total(...), and not by the number of a worker's images."
)


@dataclass
class Ending:
    """What is known about the end of a run.

    Attributes:
        is_checked: the network, its weights and the options fit together, so that documents of the run may be written.
        loop_runs: the workers have begun to run the loop.
        outcome: the outcome that the workers reported; None if they have not, or if there is an ``error``.
        error: an error of the user's that ends the run.
        trace: the traceback of ``error``.
        failure: why the monitor ends the run although its workers could continue, such as too many bad images.
        lost: why the workers of the last failed attempt ended.
    """

    is_checked: bool = False
    loop_runs: bool = False
    outcome: Outcome | None = None
    error: RaytrainError | None = None
    trace: str = ""
    failure: str | None = None
    lost: str | None = None

    @property
    def has_come(self) -> bool:
        """True if the workers have nothing more to report."""
        return self.outcome is not None or self.error is not None

    @property
    def reason(self) -> str | None:
        """Why the run failed, as far as workers and monitor know; None if it did not fail."""
        return self.failure or (self.error and str(self.error)) or (self.outcome and self.outcome.error)

    @property
    def accumulate(self) -> int | None:
        """The number of microbatches with which a run that ran out of memory may fit; None if it did not."""
        return self.error.accumulate if isinstance(self.error, OutOfMemory) else None


class Coordinator(RunMonitor):
    """The monitor of the run in ``store``; workers also report to it how they end.

    ``monitor_arguments`` are those of :class:`RunMonitor` besides the name and the history.
    """

    def __init__(self, name: str, store: Store, **monitor_arguments: Any) -> None:
        super().__init__(name, history=History(store), **monitor_arguments)
        self._ending = Ending()
        self._end_has_come = threading.Event()
        self._worker_0_has_failed = threading.Event()
        self._is_in_bucket = store.cloud is not None
        self._first_attempt_with_error: dict[str, int] = {}  # by the sentence of the error
        self._wait_location_of_rank: dict[int, str | None] = {}
        self._first_report_at: dict[str, float] = {}  # of a wait, by its place; infinite once people were told
        self._ranks_seen_twice: set[int] = set()  # ranks that still waited after the last worker had begun to wait
        self._first_worker_failure: str | None = None  # of the present attempt
        self._printed: deque[PrintedLine | LoggedRecord] = deque(maxlen=_MAX_PRINTED)

    def add_printed(self, lines: Sequence[PrintedLine | LoggedRecord]) -> None:
        """Keep lines that a worker has printed, or logged for a file, until the driver takes them."""
        self._printed.extend(lines)

    def take_printed(self) -> list[PrintedLine | LoggedRecord]:
        """Return the lines that workers have printed or logged since the last call."""
        return [self._printed.popleft() for _ in range(len(self._printed))]

    def note_checked(self, loop_runs: bool = True) -> None:
        """Note that the network, its weights and the options fit together; by default, that the loop begins, too."""
        self._ending.is_checked, self._ending.loop_runs = True, loop_runs

    def conclude(self, outcome: Outcome) -> None:
        """Note the outcome of the run, as worker 0 reports it."""
        self._ending.outcome = outcome
        self._end_has_come.set()

    def give_up(self, error: RaytrainError, trace: str = "", rank: int = 0) -> bool:
        """Note an error of the user's that worker ``rank`` met; return True if it ends the run.

        The error ends the run if another attempt would end the same way. A loop that fails after some steps gets
        another attempt, unless an earlier attempt ended by the same error. Of several errors that end the run, the
        first one counts, with its traceback ``trace``.

        If the run's folder is in a bucket and its loop fails on another worker than worker 0, wait some seconds for
        worker 0 to meet an error, too: until then, it may still send the files of its loop to the bucket.
        """
        first_attempt = self._first_attempt_with_error.setdefault(str(error), self._attempt)
        if isinstance(error, LoopFailed) and error.restart_may_help and first_attempt == self._attempt:
            self._first_worker_failure = self._first_worker_failure or str(error)
            return False
        if rank == 0:
            self._worker_0_has_failed.set()
        elif isinstance(error, LoopFailed) and self._is_in_bucket:
            self._worker_0_has_failed.wait(SENT_WITHIN_S)
        if self._ending.error is None:
            self._ending.error, self._ending.trace = error, trace
        self._end_has_come.set()
        return True

    def note_wait(self, rank: int, num_workers: int, place: str | None) -> None:
        """Note that a worker has waited long for the others at ``place`` in the loop; None if it waits no more.

        If all workers wait, but in different places, none will ever go on, and the run ends by a UsageError. A worker
        repeats its report while it waits. That all of them wait at the same time is sure only once each has reported
        its place again after the last one began to wait. If others do not wait, such as one that is frozen, a note
        names them, once for each place.
        """
        if place is None or self._wait_location_of_rank.get(rank) != place:
            self._wait_location_of_rank[rank] = place
            self._ranks_seen_twice.clear()
        else:
            self._ranks_seen_twice.add(rank)

        # The error names two places, each with the lowest rank that waits there.
        lowest_rank_in: dict[str | None, int] = {}
        for other_rank in range(num_workers):
            lowest_rank_in.setdefault(self._wait_location_of_rank.get(other_rank), other_rank)
        all_wait = self._ranks_seen_twice.issuperset(range(num_workers))
        if all_wait and len(lowest_rank_in) > 1:
            (first_place, first_rank), (second_place, second_rank) = list(lowest_rank_in.items())[:2]
            sentence = _WAIT_IN_DIFFERENT_PLACES.format(first_rank, first_place, second_rank, second_place)
            self.give_up(UsageError(sentence))

        # Tell for whom the others wait.
        now = time.monotonic()
        busy = [f"worker {other}" for other in range(num_workers) if self._wait_location_of_rank.get(other) is None]
        if place is not None and busy and now - self._first_report_at.setdefault(place, now) >= LONG_WAIT_S:
            self._first_report_at[place] = math.inf
            self.note_event(
                Note(
                    f"worker {rank} has waited half a minute for {some_of(busy)}, {place}; one that is frozen is "
                    "waited for until you end the run"
                )
            )

    def note_worker_failure(self, rank: int, reason: str, trace: str) -> None:
        """Note why a worker cannot continue; the backend then ends the other workers, too."""
        _log.debug("worker %d failed: %s", rank, redact(trace))
        self._first_worker_failure = self._first_worker_failure or f"worker {rank} failed: {reason}"

    def note_lost_workers(self, dead: dict[int, str]) -> None:
        """Note that the attempt has failed, and why; the backend starts the next attempt unless too many have failed.

        ``dead`` says, by rank, how each worker died that could not report a reason, such as "was killed by SIGKILL".
        """
        lost = (
            " and ".join(f"worker {rank} {how}" for rank, how in dead.items())
            or self._first_worker_failure
            or "the workers exited without an error message"
        )
        self._ending.lost, self._first_worker_failure = lost, None
        self.note_event(WorkerFailed(lost))

    def wait_for_end(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds until the workers have reported how the run ends."""
        self._end_has_come.wait(timeout_s)

    def ending(self) -> Ending:
        """Return what is known about the end of the run."""
        return replace(self._ending, failure=self.failure)
