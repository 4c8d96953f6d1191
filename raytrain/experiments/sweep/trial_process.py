"""One trial: an ordinary run of one worker, in a process that Ray Tune starts, which leaves its documents in storage itself."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray import tune

from raytrain.backends.ray.block_cache import RemoteBlocks
from raytrain.backends.ray.ingest import ImageSet
from raytrain.config import TrainConfig
from raytrain.data.batch_plan import BatchPlan, Cursor
from raytrain.data.blocks import CachedBlocks
from raytrain.data.dataset import write_manifests
from raytrain.data.local_batch import LocalBatch, batches_from_cache
from raytrain.data.partition import Partition
from raytrain.errors import RaytrainError, StorageError
from raytrain.runs.history import Row
from raytrain.runs.monitor import Status
from raytrain.runs.recorder import RunRecorder
from raytrain.runs.trial_status import TrialStatus
from raytrain.storage.base import Store
from raytrain.training.augment import Augment
from raytrain.training.checkpoint import Checkpoints, Identity
from raytrain.training.loop import train
from raytrain.training.run import Run

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True)
class TrialSpec:
    """Everything that a trial is told; it holds no secret."""

    number: int
    config: TrainConfig
    loop: Callable[[Run], None] | None  # None: the built-in one
    classes: tuple[str, ...]
    digest: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    store: Store
    train: ImageSet
    test: ImageSet
    plan: BatchPlan
    test_plan: BatchPlan
    cache_plan: BatchPlan  # the order of the shared training images, which is no trial's own
    weights: Any  # where in the object store the initial weights are; None: what the seed or a checkpoint decides
    threads: int
    coordinator: Any

    @property
    def name(self) -> str:
        """The trial's name, as a run."""
        assert self.config.name is not None
        return self.config.name


class TrialProcess(tune.Trainable):
    """What Ray Tune starts: a step of it lasts until the next evaluation. It ends by itself, also where it is told to stop.

    Ray Tune kills a process that it has told to stop after ten seconds, and a checkpoint may take longer.
    """

    def setup(self, config: dict[str, Any], tasks: list[TrialSpec]) -> None:
        """See :class:`ray.tune.Trainable`."""
        task = next(task for task in tasks if task.number == config["trial"])
        stopped = ray.get(task.coordinator.wait_for_stop.remote(0.0)) is not None
        self._coordinator = task.coordinator
        self._training = None if stopped else Training(task)

    def step(self) -> dict[str, Any]:
        """See :class:`ray.tune.Trainable`."""
        return {"done": True} if self._training is None else self._training.next_result()


class Training:
    """The run of one trial, in a thread; it waits at each evaluation until somebody asks for the next result."""

    def __init__(self, task: TrialSpec) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)
        torch.set_num_threads(task.threads)
        self._task = task
        self._recorder = RunRecorder(task.store, task.name, task.plan, num_workers=1)
        self._monitor = self._recorder.monitor
        self._results: queue.Queue[dict[str, Any]] = queue.Queue()
        self._asked = threading.Event()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="watch")
        threading.Thread(target=self._train, daemon=True, name="trial").start()

    def next_result(self) -> dict[str, Any]:
        """Go on from the last evaluation to the next one, or to the end."""
        early: Any = ray.get(self._task.coordinator.early.remote(self._task.number))
        if early is not None:
            self._monitor.request_stop(early)
        self._asked.set()
        return self._results.get()

    # What the run reports to.

    def started(self, num_workers: int, step: int) -> None:
        """The training begins after ``step`` steps."""
        self._monitor.started(num_workers, step)

    def record(self, row: Row) -> None:
        """One row of metrics; an evaluation is judged before the run goes on."""
        self._monitor.record(row)
        if row["kind"] == "evaluation" and row.get("accuracy") is not None:
            self._asked.clear()
            self._results.put({"epoch": row["epoch"], "accuracy": row["accuracy"]})
            self._asked.wait()

    def event(self, text: str) -> None:
        """Something worth a line."""
        self._monitor.event(text)

    def flush(self) -> None:
        """Wait until all rows so far are in storage."""
        self._monitor.flush()

    def stop_requested(self) -> bool:
        """Whether this trial or the whole sweep was asked to stop."""
        return self._monitor.stop_reason is not None

    def save_requested(self) -> bool:
        """A trial makes its checkpoints as its options say."""
        return False

    # Training.

    def _train(self) -> None:
        try:
            self._write_down()
            self._watcher.start()
            run = self._make_run()
            (self._task.loop or train)(run)
            run.finish()
            self._conclude("stopped" if run.stopped else "finished", run)
        except Exception as error:  # a trial that fails ends, and the others go on
            self._conclude("failed", None, reason_of(error))
        finally:
            self._results.put({"done": True})

    def _write_down(self) -> None:
        task = self._task
        write_manifests(task.store, ray.get(task.train.manifest), ray.get(task.test.manifest))
        self._recorder.begin(task.config)

    def _make_run(self) -> Run:
        task = self._task
        config = task.config
        identity = Identity(config.model, task.classes, task.digest, config.batch_size or 1, config.seed)
        return Run(
            config=config,
            classes=task.classes,
            plan=task.plan,
            source=SharedSource(task),
            augment=Augment(config, task.mean, task.std),
            checkpoints=Checkpoints(task.store, identity, config.keep_checkpoints),
            reporter=self,
            device=torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu"),  # Ray shows it one GPU
            weights=None if task.weights is None else ray.get(task.weights),
        )

    def _conclude(self, status: Status, run: Run | None, error: str | None = None) -> None:
        """Leave the documents of a run that has ended, and tell the sweep of it."""
        self._over.set()
        if self._watcher.is_alive():
            self._watcher.join()
        with suppress(StorageError):  # the history says so
            self._monitor.skipped(ray.get(self._task.coordinator.skipped_rows.remote()))
            self._recorder.conclude(status, run and run.progress, error)
        ray.get(self._task.coordinator.tell.remote(self._task.number, self._standing(status, error)))

    # Watching.

    def _watch(self) -> None:
        """Carry stop requests to the training, and tell how it stands: to storage, and each second to the sweep."""
        while not self._over.is_set():
            self._recorder.look()
            self._task.coordinator.tell.remote(self._task.number, self._standing("running", None))
            if self._monitor.stop_reason is not None:
                self._over.wait(_LOOK_EVERY_S)
                continue
            sweep_stops: Any = ray.get(self._task.coordinator.wait_for_stop.remote(_LOOK_EVERY_S))
            if sweep_stops is not None:
                self._monitor.request_stop(sweep_stops)

    def _standing(self, status: str, error: str | None) -> TrialStatus:
        snapshot = self._monitor.snapshot()
        latest = snapshot.latest or {}
        accuracies = [row["accuracy"] for row in snapshot.rows if row["kind"] == "evaluation" and row.get("accuracy") is not None]
        return TrialStatus(
            status=status,
            step=snapshot.step,
            num_steps=snapshot.num_steps,
            epoch=snapshot.epoch,
            num_epochs=snapshot.num_epochs,
            loss=latest.get("loss"),
            accuracy=max(accuracies, default=None),
            num_evaluations=len(accuracies),
            images_per_s=latest.get("images_per_s"),
            reason=None if status == "finished" else error or snapshot.stop_reason,
        )


class SharedSource:
    """The trial's batches out of the images that all trials share."""

    def __init__(self, task: TrialSpec) -> None:
        self._train = Partition(task.plan, 0, (1.0,))
        self._test = Partition(task.test_plan, 0, (1.0,))
        self._train_blocks = _blocks(task.coordinator, "train", task.train, task.cache_plan)
        self._test_blocks = _blocks(task.coordinator, "test", task.test, task.test_plan)

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """See :class:`raytrain.training.protocols.BatchSource`."""
        return batches_from_cache(self._train, self._train_blocks, first_step)

    def test(self) -> Iterator[LocalBatch]:
        """See :class:`raytrain.training.protocols.BatchSource`."""
        return batches_from_cache(self._test, self._test_blocks, 0)


def reason_of(error: Exception) -> str:
    """One line that says what went wrong."""
    if isinstance(error, RaytrainError):
        return str(error).rstrip(".")
    said = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {said[0].strip()}" if said else type(error).__name__


def _blocks(coordinator: Any, name: str, images: ImageSet, plan: BatchPlan) -> CachedBlocks:
    return CachedBlocks(RemoteBlocks(coordinator, name, images.shape), images.rows_per_block, plan, Cursor())
