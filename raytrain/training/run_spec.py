"""Description of a run for its workers, each of which puts its part together from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.errors import RaytrainError
from raytrain.monitor.events import Note
from raytrain.runs.checkpoint_files import Identity
from raytrain.runs.outcome import Outcome
from raytrain.storage.store import Store
from raytrain.training import auto_accumulate as memory
from raytrain.training import loop
from raytrain.training.augment import Augment, Transforms, build_transforms
from raytrain.training.checkpoint import Checkpoints, CheckpointState
from raytrain.training.evaluation import evaluate, evaluate_labels
from raytrain.training.gallery import Gallery
from raytrain.training.loop_error import LoopFailed, describe, may_pass
from raytrain.training.machine_meter import keep_freed_memory
from raytrain.training.optimisation import Loss
from raytrain.training.precision import precision_warning, set_gpu_products
from raytrain.training.prepared_models import PreparedModels
from raytrain.training.protocols import BatchSource, Reporter, Worker
from raytrain.training.run import Run
from raytrain.training.steps import Steps


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What a run trains, the same on every worker. It travels to the workers, and holds no secret."""

    config: ResolvedConfig
    loop: Callable[[Run], None] | None  # None: the built-in loop
    transforms: Callable[[], Transforms] | None = None  # makes the user's own
    classes: tuple[str, ...]
    manifest_digest: str
    plan: BatchPlan
    test_plan: BatchPlan
    store: Store  # of the run
    class_weights: tuple[float, ...] | None = None  # in the loss
    label_sets: npt.NDArray[np.bool_] | None = None  # (K, C), see Manifest.label_sets

    @property
    def identity(self) -> Identity:
        """What the run's checkpoints belong to."""
        return Identity.of(self.config, self.classes, self.manifest_digest)

    def make_run(
        self,
        source: BatchSource,
        reporter: Reporter,
        device: torch.device,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Run:
        """This worker's part of the run, restored from its newest checkpoint, in the default process group, if any.

        ``weights`` are the initial weights, None if the seed decides them. Raises UsageError if the checkpoint is
        another run's.
        """
        config, worker = self.config, Worker.here(device)
        _set_up_device(config, worker, reporter)
        checkpoints = Checkpoints(self.store, self.identity, config.keep_checkpoints, on_saved=reporter.event)
        restored = checkpoints.load_newest(reporter.event, device)
        state = CheckpointState(restored.state if restored else {})
        models = PreparedModels(config, worker, state)
        return Run(
            config=config,
            classes=self.classes,
            plan=self.plan,
            source=source,
            reporter=reporter,
            worker=worker,
            weights=weights,
            label_sets=None if self.label_sets is None else torch.from_numpy(self.label_sets).to(device),
            augment=Augment(config, build_transforms(config, self.transforms)),
            loss=Loss(config, self.class_weights, device),
            models=models,
            state=state,
            steps=Steps(config, self.plan, models, state, checkpoints, reporter, worker, restored),
            gallery=Gallery(config, self.classes, self.store, reporter.event),
            evaluation=evaluate if self.label_sets is None else evaluate_labels,
        )

    def train(self, run: Run) -> Outcome:
        """Train ``run`` to its end, or until somebody asks it to stop. The outcome is the same on every worker.

        Raises OutOfMemory if the run should be started again with more ``--accumulate``, and LoopFailed if the user's
        own loop raised anything in the first step of this start.
        """
        first_step = run.progress.step
        try:
            if self.config.accumulate == "auto" and self.loop is None:  # another loop may train another network
                memory.check_memory(run)
            (self.loop or loop.train)(run)
        except torch.OutOfMemoryError as error:
            raise memory.out_of_memory(run) from error
        except RaytrainError:
            raise
        except Exception as error:
            if self.loop is None or run.progress.step > first_step or may_pass(error):
                raise
            raise LoopFailed(f"its loop failed in its first step: {describe(error)}") from error
        return run.finish()


def _set_up_device(config: ResolvedConfig, worker: Worker, reporter: Reporter) -> None:
    """Settings of this process with which the device is fast; worker 0 says if it lacks the precision."""
    if worker.device.type == "cpu":
        keep_freed_memory()
    else:
        set_gpu_products(config.precision)
        torch.backends.cudnn.benchmark = True  # worth its trials: nearly all batches have one size
    if worker.rank == 0 and (warning := precision_warning(config.precision, worker.device)):
        reporter.event(Note(warning))  # before the first step, which may take minutes then
