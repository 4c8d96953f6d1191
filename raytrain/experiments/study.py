"""A scaling study: one recipe on several numbers of workers, one after the other. Its runs are NAME-1, NAME-2, …"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raytrain.config import TrainConfig
from raytrain.config.marks import Mark
from raytrain.config.options import options_with
from raytrain.errors import UsageError, flag
from raytrain.experiments.compare import differing_options
from raytrain.launch.placement import place
from raytrain.launch.prepare import check_options
from raytrain.launch.train import open_machines, train
from raytrain.monitor.snapshot import View
from raytrain.runs.documents import CONFIG, read_config, run_store
from raytrain.runs.history import read_metrics
from raytrain.runs.metric_row import Kind, MetricRow
from raytrain.runs.status import RunStatus, read_status
from raytrain.storage.store import Store

_NOT_STARTED = RunStatus(status="not started")


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """How far a study is: the options and the status of each run by its workers, and the metrics of finished runs."""

    name: str
    storage: str
    target_accuracy: float | None
    configs: dict[int, TrainConfig]
    statuses: dict[int, str]
    histories: dict[int, list[MetricRow]]

    def summary(self) -> dict[str, Any]:
        """:func:`raytrain.experiments.study.scaling` of the finished sizes as a dictionary, which lists all sizes."""
        compared = scaling(self.histories, self.target_accuracy)
        finished = {size.workers: size for size in compared.sizes}
        sizes: list[dict[str, Any]] = []
        for workers, asked in self.configs.items():
            config = asked.scaled_to(workers)
            about = {"workers": workers, "run": config.name, "status": self.statuses[workers]}
            options = {"batch_size": config.batch_size, "learning_rate": config.learning_rate}
            results = dataclasses.asdict(finished.get(workers, SizeScaling(workers=workers)))
            sizes.append({**about, **options, **results})
        status = "finished" if len(self.histories) == len(self.configs) else "stopped"
        about = {"name": self.name, "storage": self.storage, "status": status}
        return {**about, **dataclasses.asdict(compared), "sizes": sizes}


def named(config: TrainConfig) -> TrainConfig:
    """Return the options with a name for the study, the same each time, so that a study finds its finished runs."""
    return dataclasses.replace(config, name=config.name or f"{config.recipe}-study")


def study(
    config: TrainConfig, workers: Sequence[int], *, target_accuracy: float | None = None, view: View | None = None
) -> StudyResult:
    """Train the sizes that are not finished, the smallest first, until one is stopped; then compare the finished ones.

    Args:
        config: the options that all sizes share; its ``name`` is the study's, by default the recipe's name and -study.
        workers: the sizes; each is a run of its own, named after the study and its number of workers.
        target_accuracy: see :func:`raytrain.experiments.study.scaling`.
        view: called about twice a second with the :class:`Snapshot` of the run that trains.

    Raises:
        UsageError, StorageError: a size cannot be trained, or its run was started with other options; nothing was
            started.
        TrainingFailed: a run ended early; the same study resumes it.

    Example:
        raytrain.study(recipes.cifar10(data="s3://bucket/train"), workers=[1, 2, 4]).summary()
    """
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        raise UsageError(f"--target-accuracy is {target_accuracy:g}; it must lie above 0 and be at most 1.")
    config = named(config)
    # Whatever is wrong with any of the runs is refused before the first starts.
    configs = runs_of(config, workers)
    remaining = [left for of_size in configs.values() if (left := _left_to_train(of_size))]
    if remaining:
        _train(remaining, view)
    statuses = {size: _status(of_size).status for size, of_size in configs.items()}
    return StudyResult(
        name=config.name or "",
        storage=config.storage,
        target_accuracy=target_accuracy,
        configs=configs,
        statuses=statuses,
        histories={size: read_metrics(_store(configs[size])) for size in configs if statuses[size] == "finished"},
    )


def runs_of(config: TrainConfig, workers: Sequence[int]) -> dict[int, TrainConfig]:
    """Return the options of each run of a study by its number of workers, ascending.

    Raises UsageError if there is no number, or a run may not have these options.
    """
    if not workers:
        raise UsageError("--workers has no number; give those to try, such as 1 2 4 8.")
    sizes = sorted(set(workers))
    configs = {size: dataclasses.replace(config, name=f"{config.name}-{size}", workers=size) for size in sizes}
    for of_size in configs.values():
        check_options(of_size)
    return configs


def _left_to_train(config: TrainConfig) -> TrainConfig | None:
    """Return the options with which a run starts or resumes now; None if it is finished.

    Raises UsageError if it was started with other options, or trains at this moment.
    """
    status = _status(config)
    if status == _NOT_STARTED:
        return config

    # A run that was started with other options could not be compared with the others. What the options leave open may
    # differ, as may the GPUs of the same kind.
    wanted, stored = config.scaled_to(int(config.workers)), read_config(_store(config))
    undecided = {name for name in options_with(Mark.DECIDED_AT_START) if getattr(wanted, name) in (None, "auto")}
    device = wanted.device if wanted.gpus else stored.device
    for name in differing_options([wanted, dataclasses.replace(stored, device=device, backend=wanted.backend)]):
        if name not in undecided:
            raise UsageError(
                f"Run {config.name!r} was started with {flag(name)} {getattr(stored, name)}, and this study has "
                f"{getattr(wanted, name)}; use the same options, or another --name."
            )
    if status.active:
        raise UsageError(
            f"Run {config.name!r} is training at this moment; wait for it, or `raytrain stop {config.name}`."
        )
    return None if status.status == "finished" else dataclasses.replace(config, resume=True)


def _train(configs: Sequence[TrainConfig], view: View | None) -> None:
    """Train one after the other on the same machines; raise UsageError before any starts if they have too little."""
    with open_machines(dataclasses.replace(configs[0], name=None)) as join:
        hardware = join()
        for config in configs:
            place(config, hardware)
        for config in configs:
            joined = dataclasses.replace(config, address=None)  # this process is in the cluster already
            if train(joined, view=view).status != "finished":
                return


def _store(config: TrainConfig) -> Store:
    return run_store(config.storage, config.name or "")


def _status(config: TrainConfig) -> RunStatus:
    store = _store(config)
    return read_status(store) if store.exists(CONFIG) else _NOT_STARTED


_TARGET_FRACTION = 0.95  # of the best final accuracy
_WARM_UP_FRACTION = 0.1  # of the steps, whose speed does not count


@dataclass(frozen=True, kw_only=True)
class SizeScaling:
    """The results of one number of workers. What is not known is None.

    ``images_per_s`` is the median after the first tenth of the steps, ``seconds`` are those of training, and
    ``test_accuracy`` is the last one. The gains are fractions per doubling of the workers since the next smaller size:
    0.7 is 70 % more.
    """

    workers: int
    images_per_s: float | None = None
    images_per_s_gain: float | None = None
    seconds: float | None = None
    seconds_to_target: float | None = None
    time_gain: float | None = None
    test_accuracy: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The results of all numbers of workers, ascending; the gains are fractions per doubling, over all sizes."""

    target_accuracy: float | None
    images_per_s_gain: float | None
    time_gain: float | None
    accuracy_spread: float | None
    sizes: tuple[SizeScaling, ...]


class Curve(NamedTuple):
    """Accuracies, and the seconds of training before each of them was measured."""

    seconds: Sequence[float]
    accuracies: Sequence[float]


def scaling(histories: Mapping[int, Sequence[MetricRow]], target_accuracy: float | None = None) -> Scaling:
    """Compare runs by their rows; they differ in their number of workers, and in what depends on it.

    ``target_accuracy`` is that on the test images, by default 95 % of the best final one.

    Example: ``scaling({1: read_metrics(store_of_1), 2: read_metrics(store_of_2)}).images_per_s_gain``
    """
    # The target is the same for all sizes: what the best of them nearly reaches.
    workers = sorted(histories)
    tests = [curve(histories[size], "evaluation") for size in workers]
    final = [test.accuracies[-1] for test in tests if test.accuracies]
    target = _TARGET_FRACTION * max(final) if target_accuracy is None and final else target_accuracy

    # Two figures of each size, images/s and the seconds to the target, and how they change from size to size.
    speeds = [images_per_s(histories[size]) for size in workers]
    times = [None if target is None else seconds_to(target, test) for test in tests]
    speed_gains, time_gains = _gains_since_previous(workers, speeds), _gains_since_previous(workers, times)
    sizes = [
        SizeScaling(
            workers=size,
            images_per_s=speeds[number],
            images_per_s_gain=speed_gains[number],
            seconds=_seconds_of_steps(histories[size])[1][-1],
            seconds_to_target=times[number],
            time_gain=time_gains[number],
            test_accuracy=next(reversed(tests[number].accuracies), None),
        )
        for number, size in enumerate(workers)
    ]
    return Scaling(
        target_accuracy=target,
        images_per_s_gain=per_doubling(workers, speeds),
        time_gain=per_doubling(workers, times),
        accuracy_spread=max(final) - min(final) if final else None,
        sizes=tuple(sizes),
    )


def curve(rows: Sequence[MetricRow], kind: Kind) -> Curve:
    """Return the accuracies in the rows of one kind over the seconds of training.

    The seconds are those of the steps, including the time that they wait for data and for the first batch after a
    start. They do not include evaluations, nor the time between an interruption and the next start.
    """
    measured = [(row.step, row.accuracy) for row in rows if row.kind == kind and row.accuracy is not None]
    seconds = np.interp([step for step, _ in measured], *_seconds_of_steps(rows))
    return Curve(seconds.tolist(), [accuracy for _, accuracy in measured])


def images_per_s(rows: Sequence[MetricRow]) -> float | None:
    """Return the median images/s after the first tenth of the steps; None if no row has a value."""
    # The first steps compile, fill caches and grow pools of memory.
    first = _WARM_UP_FRACTION * max((row.step for row in rows), default=0)
    speeds = [row.images_per_s for row in rows if row.step > first and row.images_per_s is not None]
    return statistics.median(speeds) if speeds else None


def seconds_to(target: float, measured: Curve) -> float | None:
    """Return the seconds until ``target`` was reached first, interpolated between two measurements; None if never."""
    reached = next((number for number, accuracy in enumerate(measured.accuracies) if accuracy >= target), None)
    if reached is None:
        return None
    around = slice(max(0, reached - 1), reached + 1)
    return float(np.interp(target, measured.accuracies[around], measured.seconds[around]))


def per_doubling(workers: Sequence[int], values: Sequence[float | None]) -> float | None:
    """Return the relative change of ``values`` per doubling of the workers: 0.7 is 70 % more, -0.3 is 30 % less.

    It is the slope of the least-squares line through their logarithms, so that the numbers of workers may be any. None
    if fewer than two values are known.
    """
    known = [(math.log2(size), math.log2(value)) for size, value in zip(workers, values, strict=True) if value]
    if len(known) < 2:
        return None
    return 2 ** statistics.linear_regression(*zip(*known, strict=True)).slope - 1


def _gains_since_previous(workers: Sequence[int], values: Sequence[float | None]) -> list[float | None]:
    """Return the change per doubling since the next smaller size; None for the smallest."""
    pairs = itertools.pairwise(range(len(workers)))
    return [None, *(per_doubling([workers[a], workers[b]], [values[a], values[b]]) for a, b in pairs)]


def _seconds_of_steps(rows: Sequence[MetricRow]) -> tuple[list[int], list[float]]:
    """Return steps, and the seconds of training up to each.

    The seconds of a row are the images since the row before, divided by the row's images/s.
    """
    steps, seconds, samples = [0], [0.0], 0
    for row in rows:
        if row.images_per_s and row.samples_seen is not None:
            steps.append(row.step)
            seconds.append(seconds[-1] + (row.samples_seen - samples) / row.images_per_s)
            samples = row.samples_seen
    return steps, seconds
