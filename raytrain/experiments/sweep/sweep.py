"""A sweep from beginning to end, as the process that a user starts sees it. Imports neither Ray nor torch before it must."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raytrain.backends.ray.cluster import connection
from raytrain.backends.stop_signals import StopSignals
from raytrain.backends.train import check_named, import_beside, prepare
from raytrain.config import TrainConfig
from raytrain.experiments.sweep.results import SweepResult
from raytrain.experiments.sweep.trials import Sweep, Trial, check_names_free, plan_sweep, trials_of
from raytrain.runs.records import new_name
from raytrain.training.user_function import load_function

if TYPE_CHECKING:
    from raytrain.runs.trial_status import TrialStatus
    from raytrain.training.run import Run

SweepView = Callable[[Sequence[Trial], Mapping[str, "TrialStatus"]], None]
"""Called about twice a second with all trials, and with how those stand that have begun, by name."""


def sweep(
    config: TrainConfig,
    *,
    vary: Sequence[str] = (),
    trials: int | None = None,
    early_stopping: bool = True,
    loop: Callable[[Run], None] | None = None,
    view: SweepView | None = None,
    signals: StopSignals | None = None,
) -> SweepResult:
    """Train several runs that differ in the options of ``vary``, as many at once as there is room for, on the same images in memory.

    Args:
        config: the options that all trials share. ``name`` is the sweep's: its trials are the runs NAME-00, NAME-01, …; ``workers``
            is how many train at once, by default one a GPU, else as many as leave room for reading data; with ``resume``, what was
            stopped or failed goes on.
        vary: ``option=VALUE,VALUE``, and for numbers ``option=LOW..HIGH`` or ``option=log:LOW..HIGH``; not needed with ``resume``.
        trials: how many points to draw at random; by default every combination of values.
        early_stopping: whether a trial stops that is not among the better half after an eighth, a quarter or half of the epochs.
        loop: a training loop to use instead of the built-in one or the one that ``config`` names.
        view: sees how the trials stand.
        signals: hears of stop requests; by default Ctrl-C and SIGTERM, where this is the main thread.

    Raises:
        UsageError, StorageError: a setting or an input is wrong; nothing was started.
        TrainingFailed: the images cannot be used; a trial that fails by itself does not end the sweep.
    """
    begun = time.monotonic()
    check_named(config)
    planned = plan_sweep(config, vary, trials)
    trials_of(planned, config, config.name or new_name(config.recipe))  # what is wrong is said before anything starts
    if loop is None and config.loop is None:
        _check_learning_rates(planned, config)
    with connection(config.address, config.gpus) as cluster:
        importing = import_beside("raytrain.experiments.sweep.session")
        prepared = prepare(config)
        if not config.resume:
            check_names_free(trials_of(planned, prepared.config, prepared.name))
        importing.join()
        if config.loop and loop is None:
            loop = load_function("--loop", config.loop)
        cluster.connect()
        from raytrain.experiments.sweep.session import SweepSession

        with signals or StopSignals() as heard, SweepSession(prepared, planned, loop, early_stopping, begun) as session:
            return session.watch(heard, view)


def _check_learning_rates(planned: Sweep, config: TrainConfig) -> None:
    for point in planned.points:
        values: dict[str, Any] = {**point}
        dataclasses.replace(config, **values).check_learning_rate()
