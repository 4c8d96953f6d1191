"""Stops trials early that are worse than the others, by Ray Tune's asynchronous successive halving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import ASHAScheduler

from raytrain.runs.outcome import StopReason

_FIRST_RUNG_FRACTION = 1 / 8  # of the epochs; each further rung is at twice as many
_REDUCTION_FACTOR = 2  # half of the trials pass a rung


class EarlyStopping(ASHAScheduler):
    """Asynchronous successive halving (Li et al., 2018) that asks a trial to stop, where Ray Tune would kill it.

    Args:
        num_epochs: the epochs of the longest trial.
        request_stop: called with the number of a trial that should stop. It must return once the request is available
            to the trial, which continues afterwards. Ray Tune pickles it.
    """

    def __init__(self, num_epochs: int, request_stop: Callable[[int, StopReason], None]) -> None:
        super().__init__(
            time_attr="epoch",
            metric="accuracy",
            mode="max",
            max_t=num_epochs,
            grace_period=max(1, int(num_epochs * _FIRST_RUNG_FRACTION)),
            reduction_factor=_REDUCTION_FACTOR,
            stop_last_trials=False,
        )
        self._request_stop = request_stop

    def add_finished(self, name: str, evaluations: Sequence[tuple[int, float]]) -> None:
        """Compare the others also with a trial that is over already: its epochs and accuracies."""
        trial: Any = SimpleNamespace(trial_id=name)  # ASHA_RESULT in private_api.py
        controller: Any = None
        self.on_trial_add(controller, trial)
        for epoch, accuracy in evaluations:
            super().on_trial_result(controller, trial, {"epoch": epoch, "accuracy": accuracy})

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Called by Ray Tune with each evaluation of a trial, which waits until this returns."""
        if super().on_trial_result(tune_controller, trial, result) == self.STOP:
            reason = StopReason("early_stopping", metric="accuracy", value=result["accuracy"], count=result["epoch"])
            self._request_stop(trial.config["trial"], reason)
        return self.CONTINUE
