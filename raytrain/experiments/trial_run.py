"""A trial of a sweep as an ordinary run in a thread, watched by its view and stopped by its signals."""

from __future__ import annotations

import dataclasses
import math
import time

from raytrain.errors import RaytrainError
from raytrain.experiments.trial_results import is_over, stored_result
from raytrain.experiments.trial_stopping import Judge
from raytrain.experiments.trials import Trial
from raytrain.launch.prepare import RunGroup, TrainRequest
from raytrain.launch.train import start_run
from raytrain.monitor.events import Note
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import CONFIG
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import StopReason
from raytrain.runs.redact import redact


class TrialRun:
    """One trial: an ordinary run in a thread, watched by its view and stopped by its signals.

    ``number`` is the trial's in the sweep, from 0. ``request`` has the loop, the name of the sweep, and whether
    --notify reports how this trial ends. A trial that is over already is added to what ``judge`` has noted.

    ``result`` is the trial's state so far. Setting ``aborted`` ends the trial at once, without a checkpoint.
    """

    def __init__(self, number: int, trial: Trial, request: TrainRequest, judge: Judge) -> None:
        self.trial = trial
        self._number = number
        self._request = request
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
            request = dataclasses.replace(
                self._request, view=self._follow, signals=self.signals, group=group, started_at=time.monotonic()
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
