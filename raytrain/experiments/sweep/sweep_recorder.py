"""Writes the documents of a sweep while it trains: what it tries, its status as a heartbeat, and its summary."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from raytrain.backends.prepare import PreparedRun
from raytrain.errors import RaytrainError, StorageError, UsageError
from raytrain.experiments.sweep.results import SweepResult
from raytrain.experiments.sweep.trials import Sweep, Trial, write_sweep
from raytrain.runs.checkpoint_files import newest_step
from raytrain.runs.claim import claim_run
from raytrain.runs.documents import write_config, write_json
from raytrain.runs.layout import SUMMARY
from raytrain.runs.outcome import StopReason
from raytrain.runs.status import HEARTBEAT_EVERY_S, RunStatus, read_status, write_status
from raytrain.runs.stop_request import clear_stop_request, read_stop_request
from raytrain.runs.throttle import Throttle
from raytrain.runs.trial_status import TrialStatus
from raytrain.storage.base import Store

_LOOK_EVERY_S = 1.0
_ENDED = ("finished", "stopped", "failed")


class SweepRecorder:
    """Keeps a sweep's documents up to date while it is open. ``num_steps`` are the steps of all trials together.

    A sweep whose recorder closes before :meth:`conclude` is marked as failed, or as interrupted if the user aborted it.
    """

    def __init__(self, prepared: PreparedRun, sweep: Sweep, num_steps: int) -> None:
        self._prepared = prepared
        self._store = prepared.store
        self._sweep = sweep
        self._num_steps = num_steps
        self._throttle = Throttle()
        self._concluded = False

    def __enter__(self) -> SweepRecorder:
        """Make the sweep known."""
        self._prepared.data.write(self._store)
        write_sweep(self._store, self._sweep)
        clear_stop_request(self._store)
        self._write_status("starting", [])
        write_config(self._store, self._prepared.config)  # comes last: others know by it that the sweep exists
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._concluded:
            with suppress(RaytrainError):  # the reason why the sweep ends matters more
                self._write_status("interrupted" if exception[0] is KeyboardInterrupt else "failed", [])

    def heartbeat(self, statuses: Iterable[TrialStatus]) -> None:
        """Write the status every few seconds; storage that is out of reach may be back the next time."""
        with suppress(StorageError):
            if self._throttle.due("heartbeat", HEARTBEAT_EVERY_S):
                self._write_status("running", statuses, fail_fast=True)

    def stop_request(self) -> StopReason | None:
        """A stop request in storage, looked for about once a second; storage that is out of reach may be back then."""
        with suppress(StorageError):
            if self._throttle.due("stop request", _LOOK_EVERY_S):
                return read_stop_request(self._store.fail_fast())
        return None

    def conclude(self, result: SweepResult, statuses: Iterable[TrialStatus]) -> None:
        """Write the summary and the last status; raises StorageError if storage is out of reach."""
        write_json(self._store, SUMMARY, result.summary())
        self._write_status(result.status, statuses)
        self._concluded = True

    def _write_status(self, status: str, trials: Iterable[TrialStatus], *, fail_fast: bool = False) -> None:
        trials = list(trials)
        known = RunStatus(
            status=status,
            step=sum(trial.step for trial in trials),
            num_steps=self._num_steps,
            num_workers=sum(trial.status == "running" for trial in trials),
        )
        write_status(self._store.fail_fast() if fail_fast else self._store, known)


def write_summaries_of_dead_trials(trials: Sequence[Trial], statuses: Mapping[str, TrialStatus]) -> None:
    """Write a summary for each trial that could not write its own, because its process died for good."""
    for trial in trials:
        known = statuses.get(trial.name)
        if known is not None and known.status == "failed" and read_status(trial.store).status not in _ENDED:
            with suppress(UsageError), claim_run(trial.store, trial.name) as claim:  # unless somebody else trains it
                _write_summary(claim.owned_store, trial.name, known)


def _write_summary(store: Store, name: str, known: TrialStatus) -> None:
    summary = {"name": name, "status": "failed", "steps": newest_step(store), "error": known.reason}
    write_json(store, SUMMARY, summary)
    write_status(store, dataclasses.replace(read_status(store), status="failed"))
