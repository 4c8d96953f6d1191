"""A sweep from its first trial to its last: which trial trains when, the sweep's documents, and its result."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

from raytrain.config import ResolvedConfig
from raytrain.errors import RaytrainError, TrainingFailed, UsageError, format_count
from raytrain.experiments.best_metric import BestMetric
from raytrain.experiments.optuna_study import SweepStudy
from raytrain.experiments.scaling import Scaling, Size, default_target, scaling
from raytrain.experiments.search_space import Point, parse
from raytrain.experiments.sweep_options import SweepOptions
from raytrain.experiments.sweep_plan import PLAN, Sweep, write_sweep
from raytrain.experiments.sweep_result import SweepResult, SweepSnapshot, mean_of_folds, message_of_sweep
from raytrain.experiments.trial_machines import TrialMachines
from raytrain.experiments.trial_results import best_first, is_over
from raytrain.experiments.trial_run import TrialRun
from raytrain.experiments.trial_stopping import EarlyStopping, Judge
from raytrain.experiments.trials import Trial, as_typed, num_digits, trial_of, trials_of
from raytrain.launch.notification import Notification, notify_target
from raytrain.launch.placement import device_kind
from raytrain.launch.prepare import Loop, PreparedRun, RunGroup, TrainRequest
from raytrain.launch.resumed_options import check_budget
from raytrain.monitor.cost import CostMeter
from raytrain.monitor.document_writer import DocumentWriter
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.background_and_throttle import Background
from raytrain.runs.documents import STUDY, SUMMARY, write_json
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import read_metrics
from raytrain.runs.outcome import EndStatus, StopReason, resume_command
from raytrain.runs.redact import one_line
from raytrain.training.metrics.evaluation_metrics import measured_metrics

SweepView = Callable[[SweepSnapshot], None]
"""Shows a sweep: called about twice a second with the state of all trials, and what they have cost."""

_log = logging.getLogger("raytrain")
_POLL_EVERY_S = 0.5


class SweepSession:
    """A sweep that trains while the session is open.

    The sweep is ``prepared`` like a run. ``trials`` are those whose points are known already: all, or, with a sampler,
    those that it has chosen so far. ``examples`` are trials with the options that any trial may have, by which steps
    and epochs are counted.

    Raises UsageError if the dollars of --max-cost are spent already, or the GPUs cannot be divided among the trials.
    """

    def __init__(
        self,
        prepared: PreparedRun,
        planned: Sweep,
        options: SweepOptions,
        trials: Sequence[Trial],
        examples: Sequence[Trial],
        machines: TrialMachines,
        loop: Loop | None,
    ) -> None:
        self._prepared: PreparedRun = prepared
        self._planned: Sweep = planned
        self._machines = machines
        self._loop = loop
        self._options = options
        self._is_stopping = False  # no further trial starts
        self._is_concluded = False  # the documents say how the sweep has ended

        # The batch plans of the examples say how many steps all trials have, and how many epochs the longest one.
        configs = [_resolved_for_plan(prepared, trial, machines.placement.device) for trial in examples]
        plans = [prepared.data.plan(config) for config in configs]
        self._num_steps = sum(plan.num_steps for plan in plans) * planned.num_trials // len(plans)
        num_epochs = max(-(-plan.num_steps // plan.steps_per_epoch) for plan in plans)  # rounded up

        # Trials read the same images, so the sweep may keep them for all. Trials that train one by one read their own.
        self._config = dataclasses.replace(configs[0], cache="none") if planned.trains_alone else configs[0]

        # Trials are compared while they train. Those that train one by one are measured at their end.
        stops_by_median = options.early_stopping and planned.pruner is None and not planned.trains_alone
        metric = examples[0].metric
        study = self._open_study(metric, num_epochs, trials)
        early = EarlyStopping(num_epochs if stops_by_median else 0)  # 0 epochs: it never stops a trial
        self._judge = Judge(metric, early, study)

        # If a sweep is killed right after a point was chosen, only the study's log has the point.
        if study is not None and len(study.points) > len(trials):
            self._planned = dataclasses.replace(planned, points=tuple(study.points))
            trials = [*trials, *trials_of(self._planned, prepared.config, prepared.name)[len(trials) :]]

        # Trials that have nothing left to do count as they ended. All others wait in a queue.
        self._lock = threading.Lock()
        self._runs: list[TrialRun] = []
        self._waiting: deque[TrialRun] = deque()
        for trial in trials:
            self._add(trial)
        self._printed_notes: set[str] = set()  # of any trial: most are the same in all of them

        # The cost of the sweep is that of the machines of all trials; a machine on which two trials train counts once.
        # A budget that is spent already is refused if trials are left to train.
        before = prepared.status_before
        if self._waiting or len(self._runs) < self._planned.num_trials:
            check_budget(prepared.config, before, f"Sweep {prepared.name!r}")
        self._cost = CostMeter(prepared.config.prices, before, prepared.started_at)

        # Storage may hang, and a stop must not wait for it, so the documents are written in the background.
        self._writer = DocumentWriter(prepared.store, self._num_steps, before=before)
        self._documents = Background(self._record)
        self._notification = Notification(notify_target(prepared.config))

        # Each trial takes its GPUs out of this queue, and puts them back at its end.
        self._free_gpus: SimpleQueue[str | None] = SimpleQueue()
        for gpus_of_trial in machines.gpus_of_trials(prepared.config):
            self._free_gpus.put(gpus_of_trial)

    def _open_study(self, metric: BestMetric, num_epochs: int, trials: Sequence[Trial]) -> SweepStudy | None:
        """Return the study of a sweep that uses Optuna, with the points of all ``trials``; None for other sweeps."""
        planned, prepared = self._planned, self._prepared
        if planned.sampler is None and planned.pruner is None:
            return None
        open_study = partial(
            SweepStudy,
            prepared.store,
            parse(planned.vary),
            sampler=planned.sampler,
            pruner=planned.pruner,
            seed=prepared.config.seed,
            is_lower_better=metric.is_lower_better,
            num_epochs=num_epochs,
        )
        study = open_study(is_resumed=prepared.config.resume)

        # The log fits if one of the two lists of points, in the log and of the trials, begins with the other: a
        # process that was killed may have written fewer points into one of the two documents.
        points = [trial.values for trial in trials]
        if study.points[: len(points)] != points[: len(study.points)] or len(study.points) > planned.num_trials:
            _log.warning(
                "%s/%s does not fit the trials of sweep %r, so it is not used: the sampler and the pruner start again "
                "from the results of the trials.",
                prepared.store.url,
                STUDY,
                prepared.name,
            )
            study = open_study(is_resumed=False)
        for point in points[len(study.points) :]:
            study.give(point)
        return study

    def _add(self, trial: Trial) -> TrialRun:
        """Add a trial, have it wait for its turn unless it is over, and return its run."""
        request = TrainRequest(loop=self._loop, sweep=self._prepared.name, notifies=self._options.notify_trials)
        run = TrialRun(len(self._runs), trial, request, self._judge)
        self._runs.append(run)
        if not is_over(run.result):
            self._waiting.append(run)
        return run

    def __enter__(self) -> SweepSession:
        """Start reading the images, write the sweep's documents, and start as many trials as there is room for."""
        with ExitStack() as opened:
            self._images: Any
            if self._config.backend == "local":
                from raytrain.launch.local.local_launch import SharedImages

                self._images = opened.enter_context(SharedImages(self._prepared, self._config, self._num_steps))
            else:
                from raytrain.launch.ray.feed.data_feed import RaySharedImages

                shared = RaySharedImages(self._prepared, self._config, self._machines.placement, self._num_steps)
                self._images = opened.enter_context(shared)
            self._prepared.data.write(self._prepared.store)
            write_sweep(self._prepared.store, self._planned)
            self._writer.begin(self._prepared.config)

            # One thread for each trial that trains at once; when that trial ends, the thread takes the next one.
            PLAN.info("%s", self._plan_text())
            at_once = self._machines.at_once
            threads = ThreadPoolExecutor(at_once, thread_name_prefix="trial")
            self._futures = [threads.submit(self._train_in_turn) for _ in range(at_once)]
            opened.callback(threads.shutdown, cancel_futures=True)
            self._opened = opened.pop_all()  # nothing failed, so __exit__ closes it
        return self

    def _plan_text(self) -> str:
        """Return the line that is printed at the start: the number of trials, on what, and how they are compared."""
        planned, placement = self._planned, self._machines.of_one_trial
        workers, kind = placement.num_workers, device_kind(placement.accelerator_type, placement.device)
        devices = "each on its own workers" if planned.varies_workers else f"each on {format_count(workers, kind)}"
        chosen = "" if planned.sampler is None else f", chosen by {planned.sampler}"
        pruned = "" if planned.pruner is None else f", stopped early by {planned.pruner}"
        better = "smaller" if self._judge.metric.is_lower_better else "larger"
        metric = f"{self._judge.metric.name.replace('_', ' ')}, the {better} the better"
        trials = f"{format_count(planned.num_trials, 'trial')}{chosen}{pruned}"
        return f"{trials}, {self._machines.at_once} at once, {devices}; compared by {metric}"

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Abort the trials that still train, and close the images.

        If :meth:`watch` has not concluded the sweep, write and notify that it failed or, by Ctrl-C, was interrupted.
        """
        self._is_stopping = True
        for run in self._runs:
            run.aborted = True
        self._opened.close()
        if not self._is_concluded:
            status = "interrupted" if kind is KeyboardInterrupt else "failed"
            with suppress(RaytrainError):  # the reason why the sweep ends matters more
                self._writer.write_status(status)
            name = self._prepared.name
            self._notification.send({"text": f"Sweep {name} was {status}", "name": name, "status": status})
        self._notification.wait()

    def watch(self, signals: StopSignals, view: SweepView | None) -> SweepResult:
        """Wait until all trials have ended, show them by ``view``, pass on requests to stop, and return the result.

        The result is written into the sweep's documents, and --notify reports it. Raises TrainingFailed if the images
        could not be used, and StorageError if the documents cannot be written.
        """
        with closing(self._documents):
            while wait(self._futures, _POLL_EVERY_S).not_done:
                snapshot, _ = self._poll(view, signals)
                self._pass_on_stop(snapshot, signals)
        for future in self._futures:
            future.result()  # raises the exception that has ended a thread, if any
        if self._judge.study is not None:
            self._judge.study.write(now=True)
        snapshot, failure = self._poll(view, signals)
        result = self._result(snapshot, failure, signals.stop_request)

        # Write the documents, and notify. A session that ends before its documents are written has failed.
        self._images.finish(result.status)
        write_json(self._prepared.store, SUMMARY, result.summary())
        self._writer.write_status(result.status, snapshot)
        self._is_concluded = True
        self._notification.send(message_of_sweep(result, failure))
        if failure is not None:
            command = resume_command(dataclasses.replace(self._prepared.config, name=result.name), "sweep")
            call = f"raytrain.sweep, the same loop, name={result.name!r} and resume=True"
            how_to_resume = f"Resume it with {command if self._loop is None else call}"
            raise TrainingFailed(
                f"Sweep {result.name!r} failed: {failure.rstrip('.')}. {how_to_resume}", result.summary()
            )
        return result

    def _pass_on_stop(self, snapshot: Snapshot, signals: StopSignals) -> None:
        """Pass a request to stop on to each trial: one of a viewer, of storage, of a signal or of --max-cost."""
        max_dollars = self._prepared.config.max_cost
        request = snapshot.stop_request or self._documents(snapshot)
        if max_dollars is not None and (snapshot.dollars or 0.0) >= max_dollars:
            request = request or StopReason("cost", f"{max_dollars:g}", value=snapshot.dollars)
        if request is not None:
            signals.request_stop(request)
        if signals.stop_request is not None:
            self._is_stopping = True
            for run in self._runs:
                run.signals.request_stop(signals.stop_request)

    def _result(self, snapshot: Snapshot, failure: str | None, stop_request: StopReason | None) -> SweepResult:
        """Return the result of the sweep, whose last state is ``snapshot``, once all trials have ended.

        ``failure`` says why the images could not be used, if so. The sweep then failed, and also if all trials failed.
        With a ``stop_request``, it was stopped, unless nothing was left to do: then it finished all the same.
        """
        trials = best_first(run.result for run in self._runs)
        is_complete = len(trials) == self._planned.num_trials and all(is_over(trial) for trial in trials)
        stop_reason = None if is_complete else stop_request
        status: EndStatus = "finished" if stop_reason is None else "stopped"
        if failure is not None or (trials and all(trial.status == "failed" for trial in trials)):
            status = "failed"
        histories = {
            run.trial.name: read_metrics(run.trial.store)
            for run in self._runs
            if self._planned.varies_workers and run.result.status == "finished"
        }
        return SweepResult(
            name=self._prepared.name,
            status=status,
            best=next((trial.name for trial in trials if trial.value is not None), None),
            trials=trials,
            run_dir=self._prepared.store.url,
            seconds=round(time.monotonic() - self._prepared.started_at, 2),
            dollars=snapshot.dollars,
            stop_reason=stop_reason,
            scaling=self._scalings(histories) if self._planned.varies_workers else (),
            folds=mean_of_folds(trials) if any("validation_fold" in trial.values for trial in trials) else (),
            histories=histories,
        )

    def _train_in_turn(self) -> None:
        """Train one trial after the other until none is left; the work of one thread."""
        while (run := self._next_run()) is not None:
            if self._planned.trains_alone:
                run.train(gpus=None, group=None)
                continue
            gpus_of_trial, placement = self._free_gpus.get(), self._machines.of_one_trial
            try:
                run.train(gpus_of_trial, RunGroup(placement=placement, data=self._prepared.data, images=self._images))
            finally:
                self._free_gpus.put(gpus_of_trial)

    def _next_run(self) -> TrialRun | None:
        """Return the trial that trains next; None if none is left, or the sweep stops.

        If no trial waits and a sampler chooses the points, it chooses the next one now, by the results so far, and the
        sweep's document is written with it. Raises StorageError if that fails.
        """
        with self._lock:
            if self._is_stopping:
                return None
            if self._waiting:
                return self._waiting.popleft()
            planned, config, name = self._planned, self._prepared.config, self._prepared.name
            number = len(self._runs)
            if planned.sampler is None or number == planned.num_trials:
                return None

            # Only the examples were checked before the start. So a point may have options that exclude each other, or
            # that name a metric which the built-in loop does not measure.
            def is_allowed(point: Point) -> bool:
                with suppress(UsageError):
                    trial = trial_of(planned, config, name, number, point)
                    if self._loop is None and config.loop is None:
                        trial.config.check_metrics(measured_metrics(trial.config))
                    return True
                return False

            assert self._judge.study is not None
            point = self._judge.study.choose(is_allowed)
            if point is None:  # the space has fewer points than --trials; the trials that exist keep their names
                self._planned = dataclasses.replace(planned, trials=number, digits=num_digits(planned))
                write_sweep(self._prepared.store, self._planned)
                return None
            self._planned = dataclasses.replace(planned, points=(*planned.points, point))
            write_sweep(self._prepared.store, self._planned)
            run = self._add(trial_of(planned, config, name, number, point))
            if self._is_stopping:  # a stop came while the sampler chose: the trial, in the document, waits for a resume
                return None
            self._waiting.remove(run)
            return run

    def _poll(self, view: SweepView | None, signals: StopSignals) -> tuple[Snapshot, str | None]:
        """Show the trials; return the state of the sweep, and why the images cannot be used, or None if they can.

        The state is a snapshot as of one run, with the steps of all trials; ``num_workers`` is the number of trials
        that train now. Notes of the trials are logged as warnings, each once.
        """
        results = tuple(run.result for run in self._runs)
        for run in self._runs:
            for note in run.notes - self._printed_notes:
                self._printed_notes.add(note)
                _log.warning("%s: %s", run.trial.name, one_line(note))

        # The images that the trials share say which of them cannot be used, and whether a stop was asked for. Steps,
        # workers and costs are summed over the trials.
        snapshot, failure = self._images.poll()
        num_running = sum(result.status == "running" for result in results)
        steps = sum(result.steps for result in results)
        snapshot = dataclasses.replace(
            snapshot, status="running", step=steps, steps_per_epoch=0, num_workers=num_running
        )
        machines = tuple(use for run in self._runs for use in run.machines)
        dollars = self._cost.update(dataclasses.replace(snapshot, machines=machines)).dollars
        if view is not None:
            with signals.outlive_terminal():
                view(SweepSnapshot(trials=results, dollars=dollars))
        return dataclasses.replace(snapshot, dollars=dollars), failure

    def _record(self, snapshot: Snapshot) -> StopReason | None:
        """Write the documents that are due; return the request to stop in storage, if there is one."""
        if self._judge.study is not None:
            self._judge.study.write()
        self._writer.heartbeat(snapshot)
        return self._writer.stop_request()

    def _scalings(self, histories: Mapping[str, Sequence[MetricRow]]) -> tuple[Scaling, ...]:
        """Return what more workers gain, for each combination of the other options. All are timed to the same value."""
        sizes: dict[str, list[Size]] = {}  # by the other options, as a user types them
        points: dict[str, Point] = {}
        for run in self._runs:
            config = run.trial.config
            point = {name: value for name, value in run.trial.values.items() if name != "workers"}
            size = Size(
                run=run.trial.name,
                workers=int(config.workers),
                status=run.result.status,
                batch_size=cast(int, config.batch_size),  # scaled to the workers
                learning_rate=cast("float | None", config.learning_rate),
            )
            points.setdefault(as_typed(point), point)
            sizes.setdefault(as_typed(point), []).append(size)
        metric = self._judge.metric
        target = default_target(histories.values(), metric) if self._options.target is None else self._options.target
        return tuple(scaling(sizes[typed], histories, target, point, metric) for typed, point in points.items())


def _resolved_for_plan(prepared: PreparedRun, trial: Trial, device: str) -> ResolvedConfig:
    """Return the options of a trial, resolved as far as its batch plan and its images depend on them.

    Neither depends on precision and memory format, which may therefore be any. The resizer is that of all groups.
    """
    run = dataclasses.replace(prepared, config=trial.config, name=trial.name)
    return run.resolve(
        int(trial.config.workers),
        device,
        fastest_precision=lambda _: "float32",
        fastest_resizer=lambda: "pillow",
        suits_channels_last=lambda: False,
    )
