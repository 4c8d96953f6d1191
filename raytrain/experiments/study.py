"""A study: one recipe on several numbers of workers, one after the other. Each size is a run of its own: NAME-1, NAME-2 …"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain.backends import train
from raytrain.backends.ray.cluster import connection, hardware, place
from raytrain.config import TrainConfig
from raytrain.errors import UsageError, flag
from raytrain.experiments.compare import differing
from raytrain.experiments.scaling import FIGURES, scaling
from raytrain.runs import records
from raytrain.runs.history import METRICS, Row, read_lines
from raytrain.runs.layout import CONFIG

if TYPE_CHECKING:
    from raytrain.storage.base import Store

Trainer = Callable[[Sequence[TrainConfig]], None]

_NOT_BEGUN = records.RunStatus(status="not begun")
_SETTLED = {"device", "mean", "std"}  # by the run, where it was not told


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """How far a study is: the runs by their number of workers, the status of each, and the histories of those that are finished."""

    name: str
    storage: str
    target_accuracy: float | None
    configs: dict[int, TrainConfig]
    statuses: dict[int, str]
    histories: dict[int, list[Row]]

    def summary(self) -> dict[str, Any]:
        """What :func:`raytrain.experiments.scaling.scaling` says of the sizes that are finished, and which the others are."""
        compared = scaling(self.histories, self.target_accuracy)
        figures = {size["workers"]: size for size in compared["sizes"]}
        sizes = [{**self._size(workers), **figures.get(workers, dict.fromkeys(FIGURES))} for workers in self.configs]
        status = "finished" if len(self.histories) == len(self.configs) else "stopped"
        return {"name": self.name, "storage": self.storage, "status": status, **compared, "sizes": sizes}

    def _size(self, workers: int) -> dict[str, Any]:
        config = self.configs[workers].resolved(workers)
        known = {"batch_size": config.batch_size, "learning_rate": config.learning_rate}
        return {"workers": workers, "run": config.name, "status": self.statuses[workers], **known}


def named(config: TrainConfig) -> TrainConfig:
    """The options with a name for the study, which is the same the next time: by it, a study finds what is finished."""
    return dataclasses.replace(config, name=config.name or f"{config.recipe}-study")


def study(
    config: TrainConfig, workers: Sequence[int], *, target_accuracy: float | None = None, train: Trainer | None = None
) -> StudyResult:
    """Train those of the sizes that are not finished, the smallest first, until all are or one was stopped; then compare those that are.

    Args:
        config: the options that all sizes share; its ``name`` is the study's, by default as the command has it.
        workers: the sizes; each is a run of its own, called after the study and its number of workers.
        target_accuracy: see :func:`raytrain.experiments.scaling.scaling`.
        train: trains these runs in turn; by default in one Ray cluster. It is not called where all are finished.

    Raises:
        UsageError, StorageError: before anything starts, where a size cannot be trained, or its run was begun with other options.
        TrainingFailed: a run ended before its time; the same study goes on with it.
    """
    if target_accuracy is not None and not 0 < target_accuracy <= 1:
        raise UsageError(f"--target-accuracy is {target_accuracy:g}; it must lie above 0 and be at most 1.")
    config = named(config)
    configs = _sizes(config, workers)
    remaining = [left for each in configs.values() if (left := _left_to_train(each))]
    if remaining:
        (train or _train_in_turn)(remaining)
    statuses = {size: _status(each).status for size, each in configs.items()}
    histories = {size: read_lines(_store(configs[size]), METRICS) for size, status in statuses.items() if status == "finished"}
    return StudyResult(
        name=config.name or "",
        storage=config.storage,
        target_accuracy=target_accuracy,
        configs=configs,
        statuses=statuses,
        histories=histories,
    )


def _sizes(config: TrainConfig, workers: Sequence[int]) -> dict[int, TrainConfig]:
    """The run of each size, in ascending order."""
    if not workers:
        raise UsageError("--workers has no number; give those to try, such as 1 2 4 8.")
    configs = {size: dataclasses.replace(config, name=f"{config.name}-{size}", workers=size) for size in sorted(set(workers))}
    for each in configs.values():
        train.check(each)
    return configs


def _left_to_train(config: TrainConfig) -> TrainConfig | None:
    """The run as it is to be trained now; None where it is finished."""
    status = _status(config)
    if status == _NOT_BEGUN:
        return config
    _check_same(config, records.read_config(_store(config)))
    if status.active:
        raise UsageError(f"Run {config.name!r} is training at this moment; wait for it, or `raytrain stop {config.name}`.")
    return None if status.status == "finished" else dataclasses.replace(config, resume=True)


def _check_same(config: TrainConfig, begun: TrainConfig) -> None:
    """Raise UsageError where a run that is there was begun with other options: then it compares with no other size."""
    wanted = config.resolved(int(config.workers))
    settled = {name for name in _SETTLED if getattr(wanted, name) in (None, "auto")}
    for name in differing([wanted, dataclasses.replace(begun, gpus=wanted.gpus)]):
        if name not in settled:
            raise UsageError(
                f"Run {config.name!r} was begun with {flag(name)} {getattr(begun, name)}, and this study says "
                f"{getattr(wanted, name)}; give it the same options, or another --name."
            )


def _train_in_turn(configs: Sequence[TrainConfig]) -> None:
    """Train in one cluster, until all runs are finished or one was stopped; UsageError where one has not enough room, before any starts."""
    from raytrain.display.terminal import TerminalView

    with connection(configs[0].address, configs[0].gpus) as cluster:
        cluster.connect()
        found = hardware()
        for config in configs:
            place(config, found)
        for number, config in enumerate(configs, start=1):
            print(f"Run {number} of {len(configs)}: {config.name}", flush=True)
            with TerminalView() as view:
                here = dataclasses.replace(config, address=None, gpus=None)  # in the cluster that this process is in by now
                if train.train(here, view=view.update).status != "finished":
                    return


def _store(config: TrainConfig) -> Store:
    return records.run_store(config.storage, config.name or "")


def _status(config: TrainConfig) -> records.RunStatus:
    store = _store(config)
    return records.read_status(store) if store.exists(CONFIG) else _NOT_BEGUN
