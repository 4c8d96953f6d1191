"""Start of a sweep: mistakes are refused, the trials are planned, and the machines are divided among them.

The trials differ in some options. Each trains in a thread, several at once, on the same images. If the number of
workers is among these options, they train one after the other, and each reads its images itself, as with
``raytrain.train``, because their speeds are compared: images/s, and the time to an accuracy. The trials of a
cross-validation train in the same way, because each trains on other images.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raytrain.config import TrainConfig
from raytrain.config.named_functions import load_optional
from raytrain.config.pickled_code import check_loop
from raytrain.errors import UsageError
from raytrain.experiments.optuna_study import check_optuna
from raytrain.experiments.sweep_options import SweepOptions
from raytrain.experiments.sweep_plan import plan_sweep
from raytrain.experiments.sweep_result import SweepResult
from raytrain.experiments.sweep_session import SweepSession, SweepView
from raytrain.experiments.trial_machines import divide_machines
from raytrain.experiments.trial_results import is_over, stored_result
from raytrain.experiments.trials import Trial, as_typed, check_names_free, examples_of, trials_of
from raytrain.launch.option_checks import check_named, check_options
from raytrain.launch.placement import check_room
from raytrain.launch.prepare import TrainRequest, prepare, settle_options
from raytrain.launch.train import open_machines
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import CONFIG, new_name, read_config
from raytrain.runs.stored_checkpoints import Identity
from raytrain.trackers.open_trackers import open_trackers
from raytrain.training.metrics.evaluation_metrics import measured_metrics

if TYPE_CHECKING:
    from raytrain.training.run import Run


def sweep(
    config: TrainConfig,
    vary: str | Sequence[str],
    options: SweepOptions,
    *,
    loop: Callable[[Run], None] | None = None,
    view: SweepView | None = None,
    signals: StopSignals | None = None,
    trust: bool = False,
) -> SweepResult:
    """Sweep like :func:`raytrain.sweep`, which describes the arguments; without a ``view``, show nothing.

    Raises UsageError, StorageError and TrainingFailed as that does.

    Example: ``sweep(config, "seed=0,1", SweepOptions(), view=lambda snapshot: print(snapshot.trials))``
    """
    # What is wrong with the sweep itself is refused: trackers, the loop, --vary, and options that exclude each other.
    started_at = time.monotonic()
    check_named(config)
    open_trackers(config.track)  # raises UsageError if no trial could open them
    if loop is not None:
        check_loop(loop)
    planned = plan_sweep(config, vary, options, trust=trust)
    check_optuna(planned.sampler, planned.pruner)

    # A mistake in the options of any trial is refused before anything starts. A user's loop may measure any metric.
    examples = examples_of(planned, config, config.name or new_name(config.recipe))
    for trial in examples:
        check_options(trial.config, loop)
        if loop is None and config.loop is None:
            check_compared(trial)
    config = settle_options(config)

    # The sweep is prepared as a run is: images are listed and checked once for all trials, with the most folds that a
    # trial has, so that too few images or groups are refused. Meanwhile, the machines are opened, and ``join`` waits.
    folds = [(trial.config.fold[1], trial.config.validation_fold) for trial in examples if trial.config.fold]
    listed = dataclasses.replace(config, validation_fold=max(folds)[1]) if folds else config
    with open_machines(config) as join, prepare(listed, TrainRequest(started_at=started_at)) as prepared:
        # The sweep's own options have no fold: that was for listing the images.
        own_config = dataclasses.replace(prepared.config, validation_fold=config.validation_fold)
        prepared = dataclasses.replace(prepared, config=own_config)

        # The trials get the options that were decided while the images were listed.
        runs = trials_of(planned, prepared.config, prepared.name)
        if config.resume:
            runs = resumed_trials(runs, read_config(prepared.store))
        else:
            check_names_free(planned, prepared.config.storage, prepared.name)
        examples = runs if planned.sampler is None else examples_of(planned, prepared.config, prepared.name)

        # Once the machines are known, it is clear how many trials they have room for.
        hardware = join()
        machines = divide_machines(planned, prepared.config, hardware)
        for trial in runs:
            if planned.trains_alone and not is_over(stored_result(trial)):
                check_room(trial.config, hardware)
        if loop is None:
            load_optional("--loop", config.loop)  # raises UsageError if no trial could load it
        session = SweepSession(prepared, planned, options, runs, examples, machines, loop)
        with signals or StopSignals() as signals, session:
            return session.watch(signals, view)


def check_compared(trial: Trial) -> None:
    """Raise UsageError if a trial does not measure the metric that trials are compared by.

    The trials of a sweep may have different values of --best, and so measure different metrics. A trial without the
    metric of the sweep would count as one that was never evaluated.
    """
    metric = trial.metric.name
    if metric not in measured_metrics(trial.config):
        raise UsageError(
            f"--best {metric} compares the trials, and those with {as_typed(trial.values)} do not measure it; add "
            f"--metrics {metric}, or compare them by another metric."
        )


def resumed_trials(trials: Sequence[Trial], before: TrainConfig) -> list[Trial]:
    """Return the trials of a sweep that resumes; ``before`` are the options that the sweep had.

    Somebody may have changed the tags and the note of a trial since it began, so it keeps them. It also gets the tags
    that are new in the sweep, and the sweep's note if this is new. Raises UsageError if a trial was started with
    another model, batch size or seed.
    """
    resumed: list[Trial] = []
    for trial in trials:
        config = trial.config
        if trial.store.exists(CONFIG):
            stored = read_config(trial.store)
            Identity.of(config).check(Identity.of(stored), f"Run {trial.name!r}")
            added = [tag for tag in config.tag if tag not in before.tag]
            note = stored.note if config.note == before.note else config.note
            config = dataclasses.replace(config, tag=tuple(dict.fromkeys([*stored.tag, *added])), note=note)
        resumed.append(dataclasses.replace(trial, config=config))
    return resumed
