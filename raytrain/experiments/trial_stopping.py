"""Decides which trials of a sweep stop early, because they are worse than others."""

from __future__ import annotations

import math
import statistics
import threading

from raytrain.experiments.best_metric import BestMetric
from raytrain.experiments.optuna_study import SweepStudy
from raytrain.experiments.trial_results import TrialResult, is_over, is_stopped_early

_FIRST_RUNG_FRACTION = 1 / 8  # of the epochs; each further rung is at twice as many


class EarlyStopping:
    """Successive halving without waiting: after 1/8, 1/4 and 1/2 of ``num_epochs``, only the better trials continue.

    Each of these epochs is a rung. A trial continues if its score is at least the median of the trials that have
    reached the same rung before it. With ``num_epochs`` of 0 or 1 there is no rung, so all trials continue.
    """

    def __init__(self, num_epochs: int) -> None:
        self._lock = threading.Lock()
        self._rungs: list[tuple[int, dict[str, float]]] = []  # epoch, and the scores there by trial; highest first
        epoch = max(1, int(num_epochs * _FIRST_RUNG_FRACTION))
        while 2 * epoch <= num_epochs:
            self._rungs.insert(0, (epoch, {}))
            epoch *= 2

    def judge_score(self, trial: str, epoch: int, score: float) -> bool:
        """Note a ``trial``'s score after ``epoch``; return True if the trial is to stop.

        The score belongs to the highest rung up to ``epoch``. A trial stops if it is below the median of the trials
        that were there before; it is judged once on each rung. Larger scores are better. -inf is the score of a trial
        that has diverged: it does not count for the median.
        """
        with self._lock:
            rung = next((scores for first, scores in self._rungs if first <= epoch), None)
            if rung is None or trial in rung:
                return False
            earlier_scores = [earlier for earlier in rung.values() if math.isfinite(earlier)]
            rung[trial] = score
            return bool(earlier_scores) and score < statistics.median(earlier_scores)


class Judge:
    """Decides which trials stop, because they are worse than others: by early stopping, or by Optuna's pruner.

    The sweep compares its trials by ``metric``. Its ``study`` in Optuna, if it uses that, learns what they measure.
    """

    def __init__(self, metric: BestMetric, early: EarlyStopping, study: SweepStudy | None) -> None:
        self.metric = metric
        self.study = study
        self._early = early

    def judge_value(self, number: int, name: str, epoch: int, value: float) -> bool:
        """Note what a trial's evaluation after ``epoch`` measured; return True if the trial is to stop early.

        The trial is number ``number`` of the sweep, and its run is called ``name``.
        """
        # Both note the value, so both are asked.
        stops_early = self._early.judge_score(name, epoch, self.metric.score(value))
        is_pruned = self.study is not None and self.study.judge_value(number, epoch, value)
        return stops_early or is_pruned

    def end(self, number: int, result: TrialResult) -> None:
        """Record in the study how a trial ended; do nothing without a study, or if the trial would train further."""
        if self.study is not None and is_over(result):
            self.study.end(number, result.value, is_pruned=is_stopped_early(result))
