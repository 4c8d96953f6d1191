"""Ray Tune as a sweep uses it: it starts the trials, tries those again whose process died, and finds the bad ones. It stays quiet."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ray
from ray import tune
from ray.tune.execution import class_cache
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from raytrain.backends.ray.cluster import Placement
from raytrain.backends.ray.failures import root_cause
from raytrain.experiments.sweep.trial_process import TrialProcess, TrialSpec
from raytrain.experiments.sweep.trials import EARLY
from raytrain.runs.trial_status import TrialStatus

os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")  # a loop or a model may read files by relative paths
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # which prints tables of what failed also where it is told to print nothing
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # a trial's history is in its run
os.environ.setdefault("TUNE_DISABLE_STRICT_METRIC_CHECKING", "1")  # the end of a trial comes without an accuracy
os.environ.setdefault("TUNE_PRINT_ALL_TRIAL_ERRORS", "0")

# It would put the driver's keys into the description of each trial's process, which the cluster shows to whoever asks.
class_cache.ENV_VARS_TO_PROPAGATE -= {name for name in class_cache.ENV_VARS_TO_PROPAGATE if name.startswith("AWS_")}

_FIRST_JUDGED = 8  # part of the epochs after which a trial is judged first, and again after twice as many


class EarlyStopping(ASHAScheduler):
    """Asynchronous successive halving (Li et al., 2018), where a trial that is to stop does so by itself, with a checkpoint."""

    def __init__(self, coordinator: Any, num_epochs: int) -> None:
        super().__init__(
            time_attr="epoch",
            metric="accuracy",
            mode="max",
            max_t=num_epochs,
            grace_period=max(1, num_epochs // _FIRST_JUDGED),
            reduction_factor=2,
            stop_last_trials=False,
        )
        self._coordinator = coordinator

    def remember(self, name: str, evaluations: Sequence[tuple[int, float]]) -> None:
        """Judge the others by a trial too that was over before: its epochs and accuracies."""
        trial = SimpleNamespace(trial_id=name)
        self.on_trial_add(None, trial)  # pyright: ignore
        for epoch, accuracy in evaluations:
            super().on_trial_result(None, trial, {"epoch": epoch, "accuracy": accuracy})  # pyright: ignore

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """See :class:`ray.tune.schedulers.TrialScheduler`."""
        if super().on_trial_result(tune_controller, trial, result) == self.STOP:
            epochs = "1 epoch" if result["epoch"] == 1 else f"{result['epoch']} epochs"
            reason = f"{EARLY}: test accuracy {result['accuracy']:.4f} after {epochs}, below the better half of the trials"
            ray.get(self._coordinator.end_early.remote(trial.config["trial"], reason))
        return self.CONTINUE


class _Follower(tune.Callback, tune.Stopper):
    """Tells the sweep's actor of trials whose process died for good, and starts no more trials once a stop was asked for."""

    def __init__(self, coordinator: Any) -> None:
        self.stopping = False
        self._coordinator = coordinator
        self._running: set[str] = set()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """See :class:`ray.tune.Callback`."""
        self._running.add(trial.trial_id)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """See :class:`ray.tune.Callback`."""
        self._running.discard(trial.trial_id)

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """See :class:`ray.tune.Callback`."""
        self._running.discard(trial.trial_id)
        reason = root_cause(trial.get_pickled_error() or RuntimeError("its process died"))
        self._coordinator.tell.remote(trial.config["trial"], TrialStatus(status="failed", reason=reason))

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """See :class:`ray.tune.Stopper`: a trial stops by itself."""
        return False

    def stop_all(self) -> bool:
        """See :class:`ray.tune.Stopper`: not before the last trial has stopped by itself, for it would be killed."""
        return self.stopping and not self._running


class Tuning:
    """Ray Tune with one process a trial, as many at once as ``placement`` has workers; its notes go into the folder ``scratch``."""

    def __init__(self, coordinator: Any, placement: Placement, scratch: str, max_failures: int, scheduler: TrialScheduler) -> None:
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        self._coordinator = coordinator
        self._placement = placement
        self._scratch = scratch
        self._max_failures = max_failures
        self._scheduler = scheduler
        self._follower = _Follower(coordinator)

    def run(self, tasks: Sequence[TrialSpec]) -> None:
        """See all trials to their ends, in a thread: where Ray Tune can take no signals, which it would answer with an abort."""
        gpu = {"GPU": 1.0} if self._placement.device == "cuda" else {}
        resources = tune.PlacementGroupFactory([{"CPU": self._placement.cpus, **gpu}])
        tune.Tuner(
            tune.with_resources(tune.with_parameters(TrialProcess, tasks=list(tasks)), resources),
            param_space={"trial": tune.grid_search([task.number for task in tasks])},
            tune_config=tune.TuneConfig(scheduler=self._scheduler, max_concurrent_trials=self._placement.num_workers),
            run_config=tune.RunConfig(
                name="sweep",
                storage_path=self._scratch,
                stop=self._follower,
                callbacks=[self._follower],
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a trial writes its own
                failure_config=tune.FailureConfig(max_failures=self._max_failures),
                verbose=0,
            ),
        ).fit()

    def start_no_more(self) -> None:
        """Leave out the trials that have not begun."""
        self._follower.stopping = True
