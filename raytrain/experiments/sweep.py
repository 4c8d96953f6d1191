"""``raytrain.sweep``: runs that differ in some options, each in a thread, several at once, on the same images."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.user_code import check_loop, load_optional
from raytrain.errors import RaytrainError, TrainingFailed, UsageError
from raytrain.experiments.trials import (
    EarlyStopping,
    Sweep,
    SweepResult,
    Trial,
    TrialResult,
    best_first,
    check_names_free,
    is_over,
    plan_sweep,
    stored_result,
    trials_of,
    write_sweep,
)
from raytrain.launch.placement import Hardware, Placement, gpus, place
from raytrain.launch.prepare import Loop, PreparedRun, RunGroup, Start, check_named, check_places, prepare
from raytrain.launch.train import open_machines, start_run
from raytrain.monitor.recorder import RunRecorder
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.background import Background
from raytrain.runs.checkpoint_files import Identity
from raytrain.runs.documents import CONFIG, SUMMARY, new_name, read_config, write_json
from raytrain.runs.logs import STARTUP
from raytrain.runs.outcome import StopReason

if TYPE_CHECKING:
    from raytrain.training.run import Run

SweepView = Callable[[Sequence[TrialResult]], None]
"""Shows a sweep: called about twice a second with how all of its trials stand."""

_LOOK_EVERY_S = 0.5


def sweep(
    config: TrainConfig,
    *,
    vary: str | Sequence[str] = (),
    trials: int | None = None,
    early_stopping: bool = True,
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
            ``resume``.
        trials: how many points to draw at random; by default every combination of values.
        early_stopping: whether a trial stops that is not among the better half after an eighth, a quarter or half of
            the epochs.
        loop: a training loop to use instead of the built-in one or the one that ``config`` names.
        view: called about twice a second with how the trials stand.
        signals: where stop requests come from; by default Ctrl-C and SIGTERM, if this is the main thread.
        trust: with ``resume``, whether a network may run that is a function of the sweep's author, and that neither
            ``config`` nor ``vary`` names.

    Raises:
        UsageError, StorageError: a setting or an input is wrong; nothing was started.
        TrainingFailed: the images cannot be used; a trial that fails by itself does not end the sweep.
    """
    started_at = time.monotonic()
    check_named(config)
    if config.track:
        raise UsageError("--track is for single runs; `raytrain track TRIAL --track …` sends a trial that is over.")
    if loop is not None:
        check_loop(loop)
    planned = plan_sweep(config, [vary] if isinstance(vary, str) else vary, trials, trust=trust)
    for trial in trials_of(planned, config, config.name or new_name(config.recipe)):  # before anything starts
        if loop is None and config.loop is None:
            trial.config.check_learning_rate()
    config = check_places(config)
    with open_machines(config) as join, prepare(config) as prepared:
        runs = trials_of(planned, prepared.config, prepared.name)
        (check_trials if config.resume else check_names_free)(runs)
        placement = _place(prepared.config, join(), len(runs))
        if loop is None:
            load_optional("--loop", config.loop)  # raises UsageError if no trial could load it
        session = _Session(prepared, planned, runs, placement, loop, early_stopping=early_stopping)
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
    ) -> None:
        self._prepared = prepared
        self._planned = planned
        self._placement = placement
        configs = [_resolved(trial, prepared, placement.device) for trial in trials]
        plans = [prepared.data.plan(config) for config in configs]
        num_epochs = max(-(-plan.num_steps // plan.steps_per_epoch) for plan in plans)
        early = EarlyStopping(num_epochs if early_stopping else 0)  # which compares nothing in 0 epochs
        self._runs = [_TrialRun(trial, loop, early) for trial in trials]
        num_steps = sum(plan.num_steps for plan in plans)
        self._open_images = partial(_shared_images, prepared, configs[0], placement, num_steps)
        self._recorder = RunRecorder(prepared.store, num_steps)
        self._documents = Background(self._keep)  # storage may hang, and a stop must not wait for it
        self._gpus: SimpleQueue[str | None] = SimpleQueue()
        for gpu in _gpus_of_trials(prepared.config, placement):
            self._gpus.put(gpu)
        self._is_concluded = False

    def __enter__(self) -> _Session:
        """Make the sweep known, and start reading the images and as many trials as there is room for."""
        with ExitStack() as opened:
            self._images = opened.enter_context(self._open_images())
            self._prepared.data.write(self._prepared.store)
            write_sweep(self._prepared.store, self._planned)
            self._recorder.begin(self._prepared.config)
            STARTUP.info("training %d of %d trials at once …", self._placement.num_workers, len(self._runs))
            threads = ThreadPoolExecutor(self._placement.num_workers, thread_name_prefix="trial")
            self._ended = [threads.submit(self._train, run) for run in self._runs if not is_over(run.result)]
            opened.callback(threads.shutdown, cancel_futures=True)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        for run in self._runs:
            run.aborted = True
        self._opened.close()
        if not self._is_concluded:
            with suppress(RaytrainError):  # the reason why the sweep ends matters more
                self._recorder.write_status("interrupted" if kind is KeyboardInterrupt else "failed")

    def watch(self, signals: StopSignals, view: SweepView | None, started_at: float) -> SweepResult:
        """Return when all trials have ended; raises TrainingFailed if the sweep failed as a whole."""
        with closing(self._documents):
            while wait(self._ended, _LOOK_EVERY_S).not_done:
                snapshot = self._look(view)[0]
                if (request := snapshot.stop_request or self._documents(snapshot)) is not None:
                    signals.request_stop(request)
                if signals.stop_request is not None:
                    for run in self._runs:
                        run.signals.request_stop(signals.stop_request)
        return self._conclude(*self._look(view), signals.stop_request, time.monotonic() - started_at)

    def _train(self, run: _TrialRun) -> None:
        gpu = self._gpus.get()
        try:
            placement = dataclasses.replace(self._placement, num_workers=1, min_workers=1)
            run.train(gpu, RunGroup(placement=placement, data=self._prepared.data, images=self._images))
        finally:
            self._gpus.put(gpu)

    def _look(self, view: SweepView | None) -> tuple[Snapshot, str | None]:
        """Show the trials; return how the sweep stands, and why the images cannot be used, if that is so."""
        results = [run.result for run in self._runs]
        if view is not None:
            view(results)
        snapshot, failure = self._images.look()
        training = sum(result.status == "running" for result in results)
        steps = sum(result.steps for result in results)
        return dataclasses.replace(snapshot, status="running", step=steps, num_workers=training), failure

    def _keep(self, snapshot: Snapshot) -> StopReason | None:
        """Write the documents that are due, in the background; returns a stop request that lay in storage."""
        self._recorder.heartbeat(snapshot)
        return self._recorder.stop_request()

    def _conclude(
        self, snapshot: Snapshot, failure: str | None, request: StopReason | None, seconds: float
    ) -> SweepResult:
        trials = best_first(run.result for run in self._runs)
        failed = failure is not None or all(trial.status == "failed" for trial in trials)
        stopped = request is not None and not all(is_over(trial) for trial in trials)
        result = SweepResult(
            name=self._prepared.name,
            status="failed" if failed else "stopped" if stopped else "finished",
            best=next((trial.name for trial in trials if trial.accuracy is not None), None),
            trials=trials,
            run_dir=self._prepared.store.url,
            seconds=round(seconds, 2),
            stop_reason=request if stopped else None,
        )
        self._images.finish(result.status)
        write_json(self._prepared.store, SUMMARY, result.summary())
        self._recorder.write_status(result.status, snapshot)
        self._is_concluded = True
        if failure is not None:
            again = f"Resume it with --name {result.name} --storage {self._prepared.config.storage} --resume."
            raise TrainingFailed(f"Sweep {result.name!r} failed: {failure.rstrip('.')}. {again}", result.summary())
        return result


class _TrialRun:
    """One trial: an ordinary run, in a thread, watched by its view and stopped by its signals; ``aborted`` kills it."""

    def __init__(self, trial: Trial, loop: Loop | None, early: EarlyStopping) -> None:
        self.trial = trial
        self._loop = loop
        self.result = stored_result(trial)
        self.aborted = False
        self._early = early
        self.signals = StopSignals()  # a trial that waits, and is asked to stop, does not start
        self._evaluations: dict[int, tuple[int, float]] = {}  # by step: epoch and accuracy
        if is_over(self.result):
            for evaluation in self.result.evaluations:
                early.is_worse(trial.name, *evaluation)  # the others are compared with it

    def train(self, gpu: str | None, group: RunGroup) -> None:
        """Train until the trial ends. One that fails ends alone, so nothing is raised."""
        if self.aborted or self.signals.stop_request is not None:
            return
        try:
            config = _with_place(self.trial.config, gpu, group.placement)
            config = dataclasses.replace(config, resume=self.trial.store.exists(CONFIG))
            start_run(config, Start(loop=self._loop, view=self._look, signals=self.signals, group=group))
        except KeyboardInterrupt:
            self.result = dataclasses.replace(self.result, status="interrupted")
        except Exception as error:
            reason = str(error) if isinstance(error, RaytrainError) else f"{type(error).__name__}: {error}"
            self.result = dataclasses.replace(self.result, status="failed", reason=reason)

    def _look(self, snapshot: Snapshot) -> None:
        """The view of the run: note how it stands, and stop it if it is worse than the others."""
        if self.aborted:
            raise KeyboardInterrupt
        if snapshot.first_row == 0:
            self._evaluations.clear()
        for row in snapshot.rows:
            if row.kind == "evaluation" and row.accuracy is not None:
                self._evaluations[row.step] = evaluation = (row.epoch, row.accuracy)
                if self._early.is_worse(self.trial.name, *evaluation):
                    reason = StopReason("early_stopping", metric="accuracy", value=row.accuracy, count=row.epoch)
                    self.signals.request_stop(reason)
        self.result = self.result.now(snapshot, self._evaluations.values())


def check_trials(trials: Sequence[Trial]) -> None:
    """Raise UsageError if a trial that has started before was started with another model, batch size or seed."""
    for trial in trials:
        if trial.store.exists(CONFIG):
            before = Identity.of(read_config(trial.store))
            Identity.of(trial.config).check(before, f"Run {trial.name!r}")


def _place(config: TrainConfig, found: Hardware, num_trials: int) -> Placement:
    """How the machines are shared, with a worker for each trial that trains at the same time."""
    placement = place(config, found)
    if placement.num_workers <= num_trials:
        return placement
    return place(dataclasses.replace(config, workers=num_trials), found)


def _resolved(trial: Trial, sweep: PreparedRun, device: str) -> ResolvedConfig:
    """The options of a trial as its run will have them, apart from the precision."""
    run = dataclasses.replace(sweep, config=trial.config, name=trial.name)
    return run.resolve(1, device, lambda _: "float32", lambda: "pillow")


def _gpus_of_trials(config: TrainConfig, placement: Placement) -> Sequence[str | None]:
    """The GPU of this machine for each trial that trains at the same time; None if Ray decides on it, or if none."""
    if config.backend != "local" or placement.device != "cuda":
        return [None] * placement.num_workers
    chosen = config.gpus or os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(len(gpus()))))
    return chosen.split(",")[: placement.num_workers]


def _with_place(config: TrainConfig, gpu: str | None, placement: Placement) -> TrainConfig:
    """The options of a trial in this process, which is in the cluster already, and on its part of this machine."""
    if config.backend != "local":
        return dataclasses.replace(config, address=None)
    device = config.device if gpu is None else f"cuda:{gpu}"
    return dataclasses.replace(config, device=device, threads_per_worker=placement.threads)


def _shared_images(prepared: PreparedRun, config: ResolvedConfig, placement: Placement, num_steps: int) -> Any:
    if config.backend == "local":
        from raytrain.launch.cache_choice import SharedImages

        return SharedImages(prepared, config, num_steps)
    from raytrain.launch.ray.feed.data_feed import SharedImages

    return SharedImages(prepared, config, placement, num_steps)
