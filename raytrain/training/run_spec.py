"""Spec of a run: the record that is sent to its workers, the same to all of them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from raytrain.config import ResolvedConfig
from raytrain.config.named_functions import load_optional
from raytrain.data.dataset import Dataset, class_weights, evaluation_plan
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.runs.stored_checkpoints import Identity
from raytrain.storage.store import Store
from raytrain.training.loop_checks.reached_code import SourceLines, source_lines
from raytrain.training.script_logging import LoggerSettings, logging_here

if TYPE_CHECKING:
    from raytrain.training.batches.user_transforms import Transforms
    from raytrain.training.run import Run


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Spec of a run, the same on every worker. It is sent to the workers, and holds no secret."""

    config: ResolvedConfig
    loop: Callable[[Run], None] | None  # None: with_functions loads the one of --loop, or the built-in one
    transforms: Callable[[], Transforms] | None = None  # makes the user's own transforms
    classes: tuple[str, ...]
    manifest_digest: str
    plan: BatchPlan
    held_out_plans: Mapping[Part, BatchPlan]  # the batches in which validation images, and test images, are measured
    store: Store  # of the run
    class_weights: tuple[float, ...] | None = None  # in the loss
    label_sets: npt.NDArray[np.bool_] | None = None  # (K, C), see Manifest.label_sets
    # By file: the lines of the user's functions, which errors on workers quote.
    sources: Mapping[str, SourceLines] = field(default_factory=dict)
    # By name: the settings of the loggers that the user's script has set up.
    loggers: Mapping[str, LoggerSettings] = field(default_factory=dict)

    @classmethod
    def of(
        cls, config: ResolvedConfig, data: Dataset, store: Store, loop: Callable[[Run], None] | None, num_workers: int
    ) -> RunSpec:
        """Return the spec of a run of ``config`` on ``data``, with the loggers of this process.

        ``loop`` is the caller's function, if any. ``num_workers`` only sizes the batches of evaluations.
        """
        return cls(
            config=config,
            loop=loop,
            classes=data.train.classes,
            manifest_digest=data.train.digest,
            plan=data.plan(config),
            held_out_plans={
                part: evaluation_plan(images, num_workers)
                for part, (_, images, _) in data.parts.items()
                if part != "train"
            },
            store=store,
            class_weights=class_weights(config.class_weights, data.train),
            label_sets=data.train.label_sets,
            sources=source_lines(loop) if loop else {},
            loggers=logging_here(),
        )

    @property
    def identity(self) -> Identity:
        """Identity of the run, to which its checkpoints belong."""
        return Identity.of(self.config, self.classes, self.manifest_digest)

    def with_functions(self) -> RunSpec:
        """Return the spec with the loop and the transforms that the options name, for this process.

        Their files are imported, which may run anything. Raises UsageError if there are no such functions.
        """
        loop = self.loop or load_optional("--loop", self.config.loop)
        transforms = load_optional("--transforms", self.config.transforms)
        # Add their lines, as in the files of this worker, and loggers that these files may have set up.
        sources = {**source_lines(loop), **source_lines(transforms)}
        loggers = logging_here()
        return replace(
            self,
            loop=loop,
            transforms=transforms,
            sources={**self.sources, **sources},
            loggers={**self.loggers, **loggers},
        )
