"""Asynchronous successive halving (Li et al., 2018): which trials of a sweep are worse than the others."""

from __future__ import annotations

import statistics
import threading

_FIRST_RUNG_FRACTION = 1 / 8  # of the epochs; each further rung is at twice as many


class EarlyStopping:
    """Compares trials after an eighth of ``num_epochs``, a quarter and a half: the upper half may continue.

    No trial waits for another: each is compared with those that came so far before it. Safe to use from several
    threads.
    """

    def __init__(self, num_epochs: int) -> None:
        self._lock = threading.Lock()
        self._rungs: list[tuple[int, dict[str, float]]] = []  # epoch, and the accuracies there by trial; highest first
        epoch = max(1, int(num_epochs * _FIRST_RUNG_FRACTION))
        while epoch < num_epochs:
            self._rungs.insert(0, (epoch, {}))
            epoch *= 2

    def is_worse(self, trial: str, epoch: int, accuracy: float) -> bool:
        """Note what ``trial`` measured after ``epoch``; whether that is below the median of the trials before it."""
        with self._lock:
            rung = next((measured for first, measured in self._rungs if first <= epoch), None)
            if rung is None or trial in rung:
                return False
            others = list(rung.values())
            rung[trial] = accuracy
            return bool(others) and accuracy < statistics.median(others)
