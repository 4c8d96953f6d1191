"""Ray Tune in a thread: it starts the trials, and restarts those whose process died."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from ray import tune
from ray.tune.schedulers import TrialScheduler

from raytrain.backends.placement import Placement
from raytrain.backends.ray.failures import root_cause
from raytrain.backends.ray.hardware import worker_resources
from raytrain.backends.ray.private_api import keep_aws_keys_out_of_trials
from raytrain.backends.ray.trials.sweep_coordinator import SweepCoordinatorHandle
from raytrain.backends.ray.trials.trial_process import TrialSpec, train_trial
from raytrain.runs.trial_status import TrialStatus

os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a loop or a model may read files by relative paths
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # it prints tables of failed trials even with verbose=0
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # a trial keeps its own history
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")  # a trial may end without an evaluation
os.environ.setdefault("TUNE_PRINT_ALL_TRIAL_ERRORS", "0")

_ABORTED_WITHIN_S = 20.0  # Ray Tune waits ten seconds before it kills a process


class TunerThread:
    """Runs one process per trial, as many at once as ``placement`` has workers.

    It needs a thread of its own: in the main thread, Ray Tune would answer signals with an abort. A trial whose process
    died is restarted up to ``max_failures`` times. Ray Tune keeps notes of its own in ``folder``.
    """

    def __init__(
        self,
        specs: Mapping[int, TrialSpec],
        coordinator: SweepCoordinatorHandle,
        placement: Placement,
        folder: str,
        scheduler: TrialScheduler | None,
        *,
        max_failures: int,
    ) -> None:
        self.ended: Future[None] = Future()
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        keep_aws_keys_out_of_trials()
        self._num_trials = len(specs)
        self._supervisor = _Supervisor(coordinator)
        asked = worker_resources(placement.device, placement.cpus, placement.accelerator_type)
        resources = tune.PlacementGroupFactory([asked])
        self._tuner = tune.Tuner(
            tune.with_resources(tune.with_parameters(train_trial, specs=dict(specs)), resources),
            param_space={"trial": tune.grid_search(list(specs))},
            tune_config=tune.TuneConfig(scheduler=scheduler, max_concurrent_trials=placement.num_workers),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=folder,
                stop=self._supervisor,
                callbacks=[self._supervisor],
                failure_config=tune.FailureConfig(max_failures=max_failures),
                verbose=0,
            ),
        )

    def start(self) -> None:
        """Start the trials."""
        threading.Thread(target=self._fit, daemon=True, name="tuner").start()

    def start_no_more_trials(self) -> None:
        """Leave out the trials that have not started; those that train stop by themselves."""
        self._supervisor.stopping = True

    def abort(self) -> None:
        """Have Ray Tune kill the trials that still train, and wait for it."""
        self._supervisor.aborting = True
        concurrent.futures.wait([self.ended], timeout=_ABORTED_WITHIN_S)

    def failure(self) -> str | None:
        """Why Ray Tune gave up; None if it has not ended, or ended normally."""
        raised = self.ended.exception() if self.ended.done() else None
        return root_cause(raised) if raised else None

    def _fit(self) -> None:
        try:
            if self._num_trials:
                self._tuner.fit()
            self.ended.set_result(None)
        except BaseException as error:
            self.ended.set_exception(error)


class _Supervisor(tune.Callback, tune.Stopper):
    """Reports trials whose process died for good, and decides whether Ray Tune should end.

    A trial stops by itself, with a checkpoint: Ray Tune kills a process ten seconds after it told it to stop, and a
    checkpoint may take longer. So Ray Tune may stop only when no trial trains.
    """

    def __init__(self, coordinator: SweepCoordinatorHandle) -> None:
        self.stopping = False
        self.aborting = False
        self._coordinator = coordinator
        self._running: set[str] = set()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Ray Tune."""
        self._running.add(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Ray Tune."""
        self._running.discard(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Ray Tune when it does not restart a trial any more."""
        self._running.discard(trial.trial_id)
        error = trial.get_pickled_error() or RuntimeError("its process died")  # TRIAL_ERROR in private_api.py
        status = TrialStatus(status="failed", reason=root_cause(error))
        self._coordinator.report_status.remote(trial.config["trial"], status)

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Whether Ray Tune should stop one trial: never."""
        return False

    def stop_all(self) -> bool:
        """Whether Ray Tune should end."""
        return self.aborting or (self.stopping and not self._running)
