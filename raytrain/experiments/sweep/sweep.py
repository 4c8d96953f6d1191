"""``raytrain.sweep``: a sweep from start to end, as the process that a user starts sees it.

Imports neither Ray nor torch before it must.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from raytrain.backends.prepare import PreparedRun, check_named, check_options, check_places, load_loop, prepare
from raytrain.backends.ray.connection import connection
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train import import_in_background
from raytrain.config import TrainConfig
from raytrain.errors import TrainingFailed, UsageError
from raytrain.experiments.sweep.results import SweepResult, TrialResult, collect, collect_one
from raytrain.experiments.sweep.sweep_recorder import SweepRecorder, write_summaries_of_dead_trials
from raytrain.experiments.sweep.trials import Sweep, Trial, check_names_free, is_over, plan_sweep, trials_of
from raytrain.runs.background import Background
from raytrain.runs.checkpoint_files import newest_step
from raytrain.runs.documents import new_name, read_config
from raytrain.runs.layout import CONFIG
from raytrain.runs.outcome import StopReason
from raytrain.runs.trial_status import TrialStatus

if TYPE_CHECKING:
    from raytrain.backends.ray.trials.sweep_coordinator import SweepState
    from raytrain.backends.ray.trials.sweep_session import SweepSession
    from raytrain.training.run import Run

SweepView = Callable[[Sequence[Trial], Mapping[str, TrialStatus]], None]
"""Shows a sweep: called about twice a second with all trials, and with the statuses of those that have started."""

_LOOK_EVERY_S = 0.5


def sweep(
    config: TrainConfig,
    *,
    vary: Sequence[str] = (),
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
    if config.backend == "local":
        raise UsageError("--backend is local, and the trials of a sweep need Ray; leave it out, or use --backend ray.")
    planned = plan_sweep(config, vary, trials, trust=trust)
    trials_of(planned, config, config.name or new_name(config.recipe))  # raises UsageError before anything starts
    if loop is None and config.loop is None:
        _check_learning_rates(planned, config)
    with connection(config.address, config.gpus, lambda: check_places(config)) as cluster:
        importing = import_in_background("raytrain.backends.ray.trials.sweep_session")
        with prepare(config) as prepared:
            runs = trials_of(planned, prepared.config, prepared.name)
            if config.resume:
                check_trials(runs)
            else:
                check_names_free(runs)
            importing.join()
            loop = load_loop(config, loop)
            cluster.connect()
            from raytrain.backends.ray.trials.sweep_session import SweepSession

            over = {number: collect_one(trial) for number, trial in enumerate(runs) if is_over(trial.store)}
            prepared_runs = [
                _prepared(trial, prepared, resumes=number not in over) for number, trial in enumerate(runs)
            ]
            evaluations = {number: result.evaluations for number, result in over.items()}
            session = SweepSession(
                prepared,
                prepared_runs,
                evaluations,
                loop,
                early_stopping=early_stopping,
                own_cluster=cluster.is_own,
            )
            recorder = SweepRecorder(prepared, planned, session.num_steps)
            with signals or StopSignals() as signals, recorder, session:
                return _Watcher(prepared, runs, over, session, recorder).watch(signals, view, started_at)


class _Watcher:
    """Sees a sweep to its end: shows it, passes on stop requests, and keeps its documents up to date."""

    def __init__(
        self,
        prepared: PreparedRun,
        trials: Sequence[Trial],
        over: Mapping[int, TrialResult],
        session: SweepSession,
        recorder: SweepRecorder,
    ) -> None:
        self._prepared = prepared
        self._trials = trials
        self._over = over
        self._session = session
        self._recorder = recorder
        self._documents = Background(self._keep_documents)  # storage may hang, and a stop must not wait for it

    def watch(self, signals: StopSignals, view: SweepView | None, started_at: float) -> SweepResult:
        """Return when all trials have ended; raises TrainingFailed if the sweep failed as a whole."""
        with closing(self._documents):
            while not self._session.wait(_LOOK_EVERY_S):
                state = self._look(view)
                stored = self._documents(state)
                request = signals.stop_request or stored
                if request is not None and state.stop_request is None:
                    self._session.request_stop(request)
        return self._conclude(self._look(view), started_at)

    def _keep_documents(self, state: SweepState) -> StopReason | None:
        """Write the sweep's status; return a stop request that lies in storage."""
        self._recorder.heartbeat(self._statuses(state).values())
        return self._recorder.stop_request()

    def _look(self, view: SweepView | None) -> SweepState:
        state = self._session.state()
        if view is not None:
            view(self._trials, self._statuses(state))
        return state

    def _statuses(self, state: SweepState) -> dict[str, TrialStatus]:
        """The statuses by name of the trials that have started, now or in an earlier start of the sweep."""
        earlier = {number: result.trial_status() for number, result in self._over.items()}
        return {self._trials[number].name: status for number, status in (earlier | state.statuses).items()}

    def _conclude(self, state: SweepState, started_at: float) -> SweepResult:
        statuses = self._statuses(state)
        write_summaries_of_dead_trials(self._trials, statuses)
        failure = state.failure or self._session.failure()
        result = self._result(state.stop_request, failure, time.monotonic() - started_at)
        self._session.finish(result.status)
        self._recorder.conclude(result, statuses.values())
        if failure is not None:
            raise TrainingFailed(self._sentence(failure), result.summary())
        return result

    def _result(self, request: StopReason | None, failure: str | None, seconds: float) -> SweepResult:
        results = collect(self._trials)
        failed = failure is not None or all(result.status == "failed" for result in results)
        stopped = request is not None and not all(is_over(trial.store) for trial in self._trials)
        return SweepResult(
            name=self._prepared.name,
            status="failed" if failed else "stopped" if stopped else "finished",
            best=next((result.name for result in results if result.accuracy is not None), None),
            trials=results,
            run_dir=self._prepared.store.url,
            seconds=round(seconds, 2),
            stop_reason=request if stopped else None,
        )

    def _sentence(self, reason: str) -> str:
        name, storage = self._prepared.name, self._prepared.config.storage
        return (
            f"Sweep {name!r} failed: {reason.rstrip('.')}. Resume it with --name {name} --storage {storage} --resume."
        )


def check_trials(trials: Sequence[Trial]) -> None:
    """Raise UsageError if a trial that has started before was started with another model, batch size or seed."""
    for trial in trials:
        if trial.store.exists(CONFIG):
            check_options(trial.config, read_config(trial.store), f"Run {trial.name!r}")


def _prepared(trial: Trial, sweep: PreparedRun, *, resumes: bool) -> PreparedRun:
    """The trial as a run that may start, on the images of the sweep."""
    first_step = newest_step(trial.store) if resumes else 0
    return PreparedRun(trial.config, trial.name, trial.store, sweep.data, first_step)


def _check_learning_rates(planned: Sweep, config: TrainConfig) -> None:
    for point in planned.points:
        values: dict[str, Any] = {**point}
        dataclasses.replace(config, **values).check_learning_rate()
