"""Cost of a run so far: dollars by ``--price``, and the energy of its GPUs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from raytrain.config.machines import Prices
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.status import RunStatus

_JOULES_PER_KWH = 3.6e6
_SECONDS_PER_HOUR = 3600


class CostMeter:
    """Adds up the dollars for the machines of a run since ``started_at``, and the energy of its GPUs.

    The machines are those from which workers report. The time before the first report costs as much as the time after
    it, and the time of a restart as much as before: the machines are paid for all the same. The cost of the run's last
    attempt, whose status is ``before``, is included. ``started_at`` is by ``clock``.

    Example::

        meter = CostMeter(config.prices, read_status(store), started_at=time.monotonic())
        meter.update(snapshot).dollars
    """

    def __init__(
        self, prices: Prices | None, before: RunStatus, started_at: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._prices = prices
        self._clock = clock
        # Dollars that are counted for good, up to the time ``_counted_until``; the rate since then; and the dollars of
        # the latest snapshot, to which an estimate is added as long as the rate is not known.
        self._counted_dollars = before.dollars or 0.0
        self._counted_until = started_at
        self._dollars_per_hour = 0.0
        self._shown_dollars = self._counted_dollars
        self._kwh_before = before.gpu_kwh
        self._joules: dict[tuple[int, int], float] = {}  # since the start of a worker, by attempt and rank
        self.gpus_without_price: set[str] = set()
        """Types of GPUs that workers use and that have no price, so that they count as nothing."""

    def update(self, snapshot: Snapshot) -> Snapshot:
        """Return ``snapshot`` with the dollars and the energy of the run so far; each is None if it is not known.

        After the end of the run, the dollars remain as they were.
        """
        # The energy: the latest reading of each worker in each attempt.
        for use in snapshot.machines:
            if use.gpu_joules is not None:
                self._joules[snapshot.attempt, use.rank] = use.gpu_joules
        kwh = self._kwh_before
        if self._joules:
            kwh = (kwh or 0.0) + sum(self._joules.values()) / _JOULES_PER_KWH
        kwh = None if kwh is None else round(kwh, 6)
        if self._prices is None:
            return dataclasses.replace(snapshot, gpu_kwh=kwh)

        # The dollars. Until workers report, it is not known how many machines there are: show the cost of one without
        # counting it, since the first report counts the whole time before it, at the rate of all machines. If workers
        # stop reporting, the rate of their last reports goes on.
        self._dollars_per_hour = self._dollars_per_hour_of(self._prices, snapshot.machines) or self._dollars_per_hour
        if not snapshot.over:
            now = self._clock()
            rate = self._dollars_per_hour or self._prices.per_machine or 0.0
            self._shown_dollars = self._counted_dollars + (now - self._counted_until) / _SECONDS_PER_HOUR * rate
            if self._dollars_per_hour:
                self._counted_dollars, self._counted_until = self._shown_dollars, now
        return dataclasses.replace(snapshot, gpu_kwh=kwh, dollars=round(self._shown_dollars, 6))

    def _dollars_per_hour_of(self, prices: Prices, machines: Sequence[MachineUse]) -> float:
        """Return the dollars per hour of the machines, or of those GPUs whose price is known."""
        if prices.per_machine is not None:
            return prices.per_machine * len({use.node for use in machines})
        rate = 0.0
        for use in machines:
            price = prices.of_gpu(use.gpu or "")
            if price is None:
                self.gpus_without_price.add(use.gpu or "a worker without a GPU")
            rate += price or 0.0
        return rate
