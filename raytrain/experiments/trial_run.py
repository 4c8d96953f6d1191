"""A trial of a sweep as an ordinary run, and the judge that stops it if it is worse than the others."""

from __future__ import annotations

import dataclasses
import math
import statistics
import threading

from raytrain.errors import RaytrainError
from raytrain.experiments.best_metric import BestMetric
from raytrain.experiments.optuna_study import SweepStudy
from raytrain.experiments.trial_results import TrialResult, is_over, is_stopped_early, stored_result
from raytrain.experiments.trials import Trial
from raytrain.launch.prepare import Loop, RunGroup, TrainRequest
from raytrain.launch.train import start_run
from raytrain.monitor.events import Note
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import CONFIG
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import StopReason
from raytrain.runs.redact import redact

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

    Args:
        metric: the metric by which the sweep compares trials.
        early: early stopping; without epochs, it stops no trial.
        study: the sweep's study in Optuna, which learns what the trials measure; None if the sweep uses no Optuna.
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


class TrialRun:
    """One trial: an ordinary run in a thread, watched by its view and stopped by its signals.

    Args:
        number: the trial's number in the sweep, from 0.
        trial: its name and options.
        sweep: the name of the sweep.
        loop: the training loop, if the user gave one as a function.
        judge: decides whether the trial stops early; a trial that is over already is added to what it has noted.
        notifies: whether --notify also reports how this trial ends.

    ``result`` is the trial's state so far. Setting ``aborted`` ends the trial at once, without a checkpoint.
    """

    def __init__(self, number: int, trial: Trial, sweep: str, loop: Loop | None, judge: Judge, notifies: bool) -> None:
        self.trial = trial
        self._number = number
        self._sweep = sweep
        self._loop = loop
        self._notifies = notifies
        self.result = stored_result(trial)
        self.aborted = False
        self.machines: tuple[MachineUse, ...] = ()  # on which the trial trains now
        self.notes: frozenset[str] = frozenset()  # what its run has noted, such as options that its loop does not use
        self._judge = judge
        self.signals = StopSignals()  # a waiting trial that is asked to stop does not start
        self._evaluations: dict[int, MetricRow] = {}  # by step
        if is_over(self.result):
            for epoch, value in self.result.evaluations:
                judge.judge_value(number, trial.name, epoch, value)  # so that other trials are compared with this one
            judge.end(number, self.result)

    def train(self, gpus: str | None, group: RunGroup | None) -> None:
        """Train until the trial ends, beside the trials of its ``group``, or alone if that is None.

        ``gpus`` are the numbers of the GPUs that it trains on, such as ``0,1``; None if it takes any. A failure is not
        raised, but becomes the state of ``result``. A trial that was asked to stop before does not start.
        """
        if self.aborted or self.signals.stop_request is not None:
            return
        try:
            # The trial's options say where it trains: in the joined cluster, or on its share of this machine.
            config = dataclasses.replace(self.trial.config, resume=self.trial.store.exists(CONFIG))
            if config.backend == "ray":  # this process has joined the cluster already
                config = dataclasses.replace(config, address=None)
            elif group is not None:
                device = config.device if gpus is None else f"cuda:{gpus}"
                config = dataclasses.replace(config, device=device, threads_per_worker=group.placement.threads)

            # Train; a failure, which is caught below, ends this trial alone.
            request = TrainRequest(
                loop=self._loop,
                view=self._follow,
                signals=self.signals,
                group=group,
                sweep=self._sweep,
                notifies=self._notifies,
            )
            start_run(config, request)
            self._judge.end(self._number, self.result)
        except KeyboardInterrupt:
            self.result = dataclasses.replace(self.result, status="interrupted")
        except Exception as error:
            reason = str(error) if isinstance(error, RaytrainError) else f"{type(error).__name__}: {error}"
            self.result = dataclasses.replace(self.result, status="failed", reason=redact(reason))
        finally:
            self.machines = ()

    def _follow(self, snapshot: Snapshot) -> None:
        """Note the state of the run, as its view, and ask it to stop if it is worse than the other trials.

        Raises KeyboardInterrupt, which ends the run as Ctrl-C does, if the trial is aborted.
        """
        if self.aborted:
            raise KeyboardInterrupt
        self.machines = snapshot.machines
        self.notes |= {timed.event.text for timed in snapshot.events if isinstance(timed.event, Note)}

        # A snapshot has the rows since the one before, or, from row 0 on, those that replace them.
        if snapshot.first_row == 0:
            self._evaluations.clear()
        metric = self.trial.metric.name
        for row in snapshot.rows:
            if row.kind != "evaluation" or row.step == 0:
                continue
            self._evaluations[row.step] = row
            if metric not in row.metrics:
                continue
            stored = row.metrics[metric]
            value = math.nan if stored is None else stored  # a stored row has None for NaN
            if self._judge.judge_value(self._number, self.trial.name, row.epoch, value):
                finite = value if math.isfinite(value) else None
                pruner = self._judge.study and self._judge.study.pruner
                reason = StopReason("early_stopping", pruner, metric=metric, value=finite, count=row.epoch)
                self.signals.request_stop(reason)
        self.result = self.result.now(snapshot, self._evaluations.values())
