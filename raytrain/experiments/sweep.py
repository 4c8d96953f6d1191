"""``raytrain.sweep``: runs that differ in some options, each in a thread, several at once, on the same images.

If the number of workers is among these options, one run trains after the other and reads its images itself, as
``raytrain.train`` would have it: their images/s are compared, and the time until they are accurate.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.user_code import check_loop, load_optional
from raytrain.errors import RaytrainError, TrainingFailed, UsageError
from raytrain.experiments.scaling import Scaling, Size, default_target, scaling
from raytrain.experiments.search_space import Point
from raytrain.experiments.trials import (
    EarlyStopping,
    Sweep,
    SweepResult,
    Trial,
    TrialResult,
    as_typed,
    best_first,
    check_names_free,
    is_over,
    mean_of_folds,
    plan_sweep,
    stored_result,
    trials_of,
    write_sweep,
)
from raytrain.launch.placement import Placement, check_room, gpus, place
from raytrain.launch.prepare import Loop, PreparedRun, RunGroup, TrainRequest, check_named, prepare, settle_options
from raytrain.launch.train import open_machines, start_run
from raytrain.monitor.recorder import RunRecorder
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.background import Background
from raytrain.runs.checkpoint_files import Identity
from raytrain.runs.documents import CONFIG, SUMMARY, new_name, read_config, write_json
from raytrain.runs.history import read_metrics
from raytrain.runs.logs import STARTUP
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import StopReason
from raytrain.training.evaluation_metrics import measured_metrics

if TYPE_CHECKING:
    from raytrain.training.run import Run

SweepView = Callable[[Sequence[TrialResult]], None]
"""Shows a sweep: called about twice a second with how all of its trials stand."""

_POLL_EVERY_S = 0.5


def sweep(
    config: TrainConfig,
    *,
    vary: str | Sequence[str] = (),
    trials: int | None = None,
    folds: int | None = None,
    early_stopping: bool = True,
    target_accuracy: float | None = None,
    loop: Callable[[Run], None] | None = None,
    view: SweepView | None = None,
    signals: StopSignals | None = None,
    trust: bool = False,
) -> SweepResult:
    """Train several runs that differ in the options of ``vary``, several at once, on the same images in memory.

    Args:
        config: the options that all trials share. ``name`` is the sweep's: its trials are the runs NAME-00, NAME-01, …
            ``workers`` is how many train at once: by default one per GPU, or without GPUs as many as leave room for
            reading data. With ``resume``, trials that were stopped or failed are resumed.
        vary: ``option=VALUE,VALUE``, and for numbers ``option=LOW..HIGH`` or ``option=log:LOW..HIGH``; not needed with
            ``resume``. With ``workers=1,2,4``, one trial trains after the other, each on so many workers, none is
            stopped early, and the result has their ``scaling``.
        trials: how many points to draw at random; by default every combination of values.
        folds: cross-validation: train each point ``folds`` times, each with another part of the training images for
            validation (in equal shares of each class, and whole groups with ``group_by``), one after the other on
            ``workers`` workers (1 if it is auto); the result has mean and deviation.
        early_stopping: stop a trial that is not among the better half after an eighth, a quarter or half of the epochs.
        target_accuracy: the accuracy on the validation images to which trials on different numbers of workers are
            timed; by default 95 % of the best final one.
        loop: a training loop to use instead of the built-in one or the one that ``config`` names.
        view: called about twice a second with how the trials stand.
        signals: where stop requests come from; by default Ctrl-C, SIGTERM and SIGHUP, if this is the main thread.
        trust: with ``resume``, run also a network that is a function of the sweep's author, and that neither ``config``
            nor ``vary`` names.

    Raises:
        UsageError, StorageError: a setting or an input is wrong; nothing was started.
        TrainingFailed: the images cannot be used; a trial that fails by itself does not end the sweep.

    Example:
        raytrain.sweep(recipes.cifar10(data="s3://bucket/train"), vary="learning-rate=0.01,0.1,1").best
        raytrain.sweep(recipes.cifar10(data="s3://bucket/train"), vary="workers=1,2,4").scaling
    """
    started_at = time.monotonic()
    check_named(config)
    if config.track:
        raise UsageError("--track is for single runs; `raytrain track TRIAL --track …` sends a trial that is over.")
    if loop is not None:
        check_loop(loop)
    vary = [vary] if isinstance(vary, str) else [*vary]
    if folds is not None:
        if folds < 2:
            raise UsageError(f"--folds is {folds}; a cross-validation has at least 2.")
        vary.append("validation-fold=" + ",".join(f"{number + 1}/{folds}" for number in range(folds)))
    planned = plan_sweep(config, vary, trials, trust=trust)
    if target_accuracy is not None and not (planned.varies_workers and 0 < target_accuracy <= 1):
        raise UsageError(
            f"--target-accuracy is {target_accuracy:g}; it must lie above 0 and be at most 1, and is for a sweep that "
            "varies workers, such as --vary workers=1,2,4."
        )
    # Whatever is wrong with a trial is refused before anything starts.
    for trial in trials_of(planned, config, config.name or new_name(config.recipe)):
        if loop is None and config.loop is None:
            trial.config.check_learning_rate()
            trial.config.check_metrics(measured_metrics(trial.config))
    config = settle_options(config)
    with open_machines(config) as join, prepare(config) as prepared:
        runs = trials_of(planned, prepared.config, prepared.name)
        (check_trials if config.resume else check_names_free)(runs)
        # One worker trains a trial, so more workers than trials would take cores from reading.
        hardware = join()
        at_once = 1 if planned.trains_alone else prepared.config.workers
        placement = place(dataclasses.replace(prepared.config, workers=at_once), hardware)
        if placement.num_workers > len(runs):
            placement = place(dataclasses.replace(prepared.config, workers=len(runs)), hardware)
        for trial in runs:
            if planned.trains_alone and not is_over(stored_result(trial)):
                check_room(trial.config, hardware)
        if loop is None:
            load_optional("--loop", config.loop)  # raises UsageError if no trial could load it
        session = _Session(
            prepared, planned, runs, placement, loop, early_stopping=early_stopping, target_accuracy=target_accuracy
        )
        with signals or StopSignals() as signals, session:
            return session.watch(signals, view, started_at)


class _Session:
    """A sweep that trains while the session is open. Raises UsageError if the machines have too little."""

    def __init__(
        self,
        prepared: PreparedRun,
        planned: Sweep,
        trials: Sequence[Trial],
        placement: Placement,
        loop: Loop | None,
        *,
        early_stopping: bool,
        target_accuracy: float | None,
    ) -> None:
        self._prepared = prepared
        self._planned = planned
        self._placement = placement
        self._target_accuracy = target_accuracy
        # The plan of each trial, by its options as its run will have them, apart from the precision.
        configs: list[ResolvedConfig] = []
        for trial in trials:
            run = dataclasses.replace(prepared, config=trial.config, name=trial.name)
            num_workers = int(trial.config.workers)
            configs.append(run.resolve(num_workers, placement.device, lambda _: "float32", lambda: "pillow"))
        plans = [prepared.data.plan(config) for config in configs]
        self._num_steps = sum(plan.num_steps for plan in plans)

        # All trials read the same images, and are compared as they go; but for those whose speed is compared, each of
        # which reads its own, and trains to its end.
        self._config = dataclasses.replace(configs[0], cache="none") if planned.trains_alone else configs[0]
        num_epochs = max(-(-plan.num_steps // plan.steps_per_epoch) for plan in plans)
        compares = early_stopping and not planned.trains_alone
        early = EarlyStopping(num_epochs if compares else 0)  # which compares nothing in 0 epochs
        self._runs = [_TrialRun(trial, loop, early) for trial in trials]
        self._recorder = RunRecorder(prepared.store, self._num_steps)
        self._documents = Background(self._record)  # storage may hang, and a stop must not wait for it
        self._is_concluded = False

        # The GPUs of this machine, one for each trial that trains at the same time. Ray decides on its own ones, and a
        # trial on several workers takes as many as it needs.
        self._gpus: SimpleQueue[str | None] = SimpleQueue()
        config = prepared.config
        if config.backend == "local" and placement.device == "cuda" and not planned.trains_alone:
            numbers = config.gpus or os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(gpus()))))
            for gpu in numbers.split(",")[: placement.num_workers]:
                self._gpus.put(gpu)
        else:
            for _ in range(placement.num_workers):
                self._gpus.put(None)

    def __enter__(self) -> _Session:
        """Make the sweep known, and start reading the images and as many trials as there is room for."""
        with ExitStack() as opened:
            self._images: Any
            if self._config.backend == "local":
                from raytrain.launch.shared_images import SharedImages

                self._images = opened.enter_context(SharedImages(self._prepared, self._config, self._num_steps))
            else:
                from raytrain.launch.ray.feed.data_feed import RaySharedImages

                shared = RaySharedImages(self._prepared, self._config, self._placement, self._num_steps)
                self._images = opened.enter_context(shared)
            self._prepared.data.write(self._prepared.store)
            write_sweep(self._prepared.store, self._planned)
            self._recorder.begin(self._prepared.config)

            # A thread for each trial that trains at once; the others wait in the pool's queue.
            STARTUP.info("training %d of %d trials at once …", self._placement.num_workers, len(self._runs))
            threads = ThreadPoolExecutor(self._placement.num_workers, thread_name_prefix="trial")
            self._ended = [threads.submit(self._train, run) for run in self._runs if not is_over(run.result)]
            opened.callback(threads.shutdown, cancel_futures=True)
            self._opened = opened.pop_all()  # nothing failed, so __exit__ closes it
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        for run in self._runs:
            run.aborted = True
        self._opened.close()
        if not self._is_concluded:
            with suppress(RaytrainError):  # the reason why the sweep ends matters more
                self._recorder.write_status("interrupted" if kind is KeyboardInterrupt else "failed")

    def watch(self, signals: StopSignals, view: SweepView | None, started_at: float) -> SweepResult:
        """Return when all trials have ended; raise TrainingFailed if the sweep failed as a whole."""
        with closing(self._documents):
            while wait(self._ended, _POLL_EVERY_S).not_done:
                snapshot = self._poll(view, signals)[0]
                # A request to stop comes from a viewer, from storage or from a signal. Each trial gets it.
                if (request := snapshot.stop_request or self._documents(snapshot)) is not None:
                    signals.request_stop(request)
                if signals.stop_request is not None:
                    for run in self._runs:
                        run.signals.request_stop(signals.stop_request)

        # The sweep failed if nothing could be trained; a stop counts only if it left something to do.
        snapshot, failure = self._poll(view, signals)
        trials = best_first(run.result for run in self._runs)
        failed = failure is not None or all(trial.status == "failed" for trial in trials)
        histories = {
            run.trial.name: read_metrics(run.trial.store)
            for run in self._runs
            if self._planned.varies_workers and run.result.status == "finished"
        }
        stopped = signals.stop_request is not None and not all(is_over(trial) for trial in trials)
        result = SweepResult(
            name=self._prepared.name,
            status="failed" if failed else "stopped" if stopped else "finished",
            best=next((trial.name for trial in trials if trial.value is not None), None),
            trials=trials,
            run_dir=self._prepared.store.url,
            seconds=round(time.monotonic() - started_at, 2),
            stop_reason=signals.stop_request if stopped else None,
            scaling=self._scalings(histories) if self._planned.varies_workers else (),
            folds=mean_of_folds(trials) if any("validation_fold" in trial.values for trial in trials) else (),
            histories=histories,
        )
        self._images.finish(result.status)
        write_json(self._prepared.store, SUMMARY, result.summary())
        self._recorder.write_status(result.status, snapshot)
        self._is_concluded = True
        if failure is not None:
            again = f"Resume it with --name {result.name} --storage {self._prepared.config.storage} --resume."
            raise TrainingFailed(f"Sweep {result.name!r} failed: {failure.rstrip('.')}. {again}", result.summary())
        return result

    def _train(self, run: _TrialRun) -> None:
        if self._planned.trains_alone:
            run.train(None, None)
            return
        gpu = self._gpus.get()
        try:
            placement = dataclasses.replace(self._placement, num_workers=1, min_workers=1)
            run.train(gpu, RunGroup(placement=placement, data=self._prepared.data, images=self._images))
        finally:
            self._gpus.put(gpu)

    def _poll(self, view: SweepView | None, signals: StopSignals) -> tuple[Snapshot, str | None]:
        """Show the trials; return how the sweep stands, and why the images cannot be used, if that is so."""
        results = [run.result for run in self._runs]
        if view is not None:
            with signals.outlive_terminal():
                view(results)
        snapshot, failure = self._images.poll()
        training = sum(result.status == "running" for result in results)
        steps = sum(result.steps for result in results)
        return dataclasses.replace(snapshot, status="running", step=steps, num_workers=training), failure

    def _record(self, snapshot: Snapshot) -> StopReason | None:
        """Write the documents that are due, in the background; return a stop request that lay in storage."""
        self._recorder.heartbeat(snapshot)
        return self._recorder.stop_request()

    def _scalings(self, histories: Mapping[str, Sequence[MetricRow]]) -> tuple[Scaling, ...]:
        """Return what more workers gain, for each choice of the other options. All are timed to the same accuracy."""
        sizes: dict[str, list[Size]] = {}
        choices: dict[str, Point] = {}
        for run in self._runs:
            config = run.trial.config
            others = {name: value for name, value in run.trial.values.items() if name != "workers"}
            size = Size(
                run=run.trial.name,
                workers=int(config.workers),
                status=run.result.status,
                batch_size=cast(int, config.batch_size),  # scaled to the workers
                learning_rate=cast("float | None", config.learning_rate),
            )
            choices.setdefault(as_typed(others), others)
            sizes.setdefault(as_typed(others), []).append(size)
        target = default_target(histories.values()) if self._target_accuracy is None else self._target_accuracy
        return tuple(scaling(sizes[choice], histories, target, others) for choice, others in choices.items())


class _TrialRun:
    """One trial: an ordinary run, in a thread, watched by its view and stopped by its signals; ``aborted`` kills it."""

    def __init__(self, trial: Trial, loop: Loop | None, early: EarlyStopping) -> None:
        self.trial = trial
        self._loop = loop
        self.result = stored_result(trial)
        self.aborted = False
        self._early = early
        self.signals = StopSignals()  # a trial that waits, and is asked to stop, does not start
        self._evaluations: dict[int, MetricRow] = {}  # by step
        if is_over(self.result):
            for epoch, value in self.result.evaluations:
                early.is_worse(trial.name, epoch, self._score(value))  # the others are compared with it

    def train(self, gpu: str | None, group: RunGroup | None) -> None:
        """Train until the trial ends, beside those of its ``group``, or alone. One that fails raises nothing."""
        if self.aborted or self.signals.stop_request is not None:
            return
        try:
            config = dataclasses.replace(self.trial.config, resume=self.trial.store.exists(CONFIG))
            if config.backend == "ray":  # this process is in the cluster already
                config = dataclasses.replace(config, address=None)
            elif group is not None:  # its part of this machine
                device = config.device if gpu is None else f"cuda:{gpu}"
                config = dataclasses.replace(config, device=device, threads_per_worker=group.placement.threads)
            start_run(config, TrainRequest(loop=self._loop, view=self._follow, signals=self.signals, group=group))
        except KeyboardInterrupt:
            self.result = dataclasses.replace(self.result, status="interrupted")
        except Exception as error:
            reason = str(error) if isinstance(error, RaytrainError) else f"{type(error).__name__}: {error}"
            self.result = dataclasses.replace(self.result, status="failed", reason=reason)

    def _follow(self, snapshot: Snapshot) -> None:
        """Note how the run stands, as its view, and stop it if it is worse than the others."""
        if self.aborted:
            raise KeyboardInterrupt
        if snapshot.first_row == 0:
            self._evaluations.clear()
        for row in snapshot.rows:
            if row.kind == "evaluation":
                self._evaluations[row.step] = row
                value = row.metrics.get(self.trial.metric)
                if value is not None and self._early.is_worse(self.trial.name, row.epoch, self._score(value)):
                    reason = StopReason("early_stopping", metric=self.trial.metric, value=value, count=row.epoch)
                    self.signals.request_stop(reason)
        self.result = self.result.now(snapshot, self._evaluations.values())

    def _score(self, value: float) -> float:
        """Return a number that is larger for a better ``value``; of one that is NaN, the worst."""
        return -math.inf if math.isnan(value) else -value if self.trial.is_lower_better else value


def check_trials(trials: Sequence[Trial]) -> None:
    """Raise UsageError if a trial that has started before was started with another model, batch size or seed."""
    for trial in trials:
        if trial.store.exists(CONFIG):
            before = Identity.of(read_config(trial.store))
            Identity.of(trial.config).check(before, f"Run {trial.name!r}")
