"""The description of a run that its workers get, and how each of them builds its part of the run and trains it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.batch_plan import BatchPlan
from raytrain.runs.identity import Identity
from raytrain.runs.outcome import Outcome
from raytrain.storage.base import Store
from raytrain.training import loop, memory
from raytrain.training.checkpoint import Checkpoints
from raytrain.training.evaluation import evaluate
from raytrain.training.label_evaluation import evaluate_labels
from raytrain.training.protocols import BatchSource, Reporter
from raytrain.training.run import Run
from raytrain.training.transforms import Transforms


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
        return Run(
            config=self.config,
            classes=self.classes,
            plan=self.plan,
            source=source,
            reporter=reporter,
            checkpoints=Checkpoints(
                self.store,
                self.identity,
                self.config.keep_checkpoints,
                on_saved=reporter.event,
            ),
            evaluation=evaluate if self.label_sets is None else evaluate_labels,
            device=device,
            weights=weights,
            transforms=self.transforms,
            class_weights=self.class_weights,
            label_sets=None if self.label_sets is None else torch.from_numpy(self.label_sets).to(device),
        )

    def train(self, run: Run) -> Outcome:
        """Train ``run`` to its end, or until somebody asks it to stop. The outcome is the same on every worker.

        Raises OutOfMemory if the run should be started again with more ``--accumulate``.
        """
        try:
            if self.config.accumulate == "auto" and self.loop is None:  # another loop may train another network
                memory.check_memory(run)
            (self.loop or loop.train)(run)
        except torch.OutOfMemoryError as error:
            raise memory.out_of_memory(run) from error
        return run.finish()
