"""All options of a run: its own, those of all other sections, checked in one pass, and as a start decides them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any, cast

from raytrain.config.data import AugmentationOptions, DataOptions, check_augmentation, check_data
from raytrain.config.evaluation import CheckpointOptions, EvaluationOptions, check_checkpoints, check_evaluation
from raytrain.config.machines import MachineOptions, check_machines
from raytrain.config.network import (
    DEFAULT_SIZE,
    CropFraction,
    ImageSize,
    Interpolation,
    NetworkOptions,
    Precision,
    Resize,
    Resizer,
    check_network,
)
from raytrain.config.optimisation import OptimisationOptions, check_optimisation, total
from raytrain.config.values import PositiveInt, check_limits, read_values
from raytrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The run and its records."""

    name: str | None = None
    """Name of the run; by default the recipe's name and the time."""
    storage: str = "./runs"
    """Where runs are stored: a folder or a URL (s3://…, gs://…, az://…)."""
    resume: bool = False
    """Continue the run called --name from its last checkpoint, with its own options; start it if it does not exist."""
    recipe: str = "custom"
    """Name of the recipe that these options started from."""
    loop: str | None = None
    """Your own training loop: file.py:function or package.module:function, which is called with the run."""
    seed: int = 0
    """Seed of the initial weights, the sample order, the augmentation and the train/test split."""
    log_every: PositiveInt = 10
    """Steps between rows of the metrics history."""
    track: tuple[str, ...] = ()
    """Where else to send metrics: tensorboard, mlflow, wandb, prometheus, or package.module:Class of your own."""
    tag: tuple[str, ...] = ()
    """Words to find the run by, with `raytrain runs --filter tag=WORD`."""
    note: str | None = None
    """What the run is about, for whoever looks at it later."""
    trace: bool = False
    """Record which samples each worker used in each step, for `raytrain audit`."""


SECTIONS = {
    "data": DataOptions,
    "run": RunOptions,
    "optimisation": OptimisationOptions,
    "machine": MachineOptions,
    "network": NetworkOptions,
    "augmentation": AugmentationOptions,
    "evaluation": EvaluationOptions,
    "checkpoint": CheckpointOptions,
}
"""In the order of the help: first those that most people use."""

_CHECKS = (
    check_limits,
    check_machines,
    check_optimisation,
    check_network,
    check_augmentation,
    check_evaluation,
    check_checkpoints,
    check_data,
)
"""In this order; the first that fails speaks."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    CheckpointOptions,
    EvaluationOptions,
    AugmentationOptions,
    NetworkOptions,
    MachineOptions,
    OptimisationOptions,
    RunOptions,
    DataOptions,  # the fields of the last class come first
):
    """The options of a training run. The annotation of each option has its limits, the text below it is its --help."""

    def __post_init__(self) -> None:
        if str(self.image_size).isdecimal():  # the side of a square
            object.__setattr__(self, "image_size", (int(cast(str, self.image_size)),) * 2)
        read_values(self)
        for check in _CHECKS:
            check(self)

    @property
    def best_metric(self) -> str:
        """The metric that ``best`` names, or its default."""
        return self.best or ("mean_average_precision" if self.multi_label else "accuracy")

    def scaled_to(self, num_workers: int) -> TrainConfig:
        """The same options with global batch size and learning rate: those of all ``num_workers`` together."""
        rate = self.learning_rate
        return dataclasses.replace(
            self,
            batch_size=total(cast("int | str", self.batch_size), int, num_workers),
            learning_rate=None if rate is None else total(rate, float, num_workers),
        )

    def resolve(
        self,
        *,
        name: str,
        num_workers: int,
        device: str,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        fastest_precision: Precision = "float32",
        fastest_resizer: Resizer = "pillow",
    ) -> ResolvedConfig:
        """The options of a run that starts, with everything decided. Raises UsageError if loads and workers differ."""
        if self.worker_load is not None and len(self.worker_load) != num_workers:
            raise UsageError(
                f"--worker-load has {len(self.worker_load)} numbers for {num_workers} workers; give one per worker."
            )
        given = vars(self.scaled_to(num_workers))
        options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
        options |= {"name": name, "mean": self.mean or mean, "std": self.std or std}
        options.setdefault("learning_rate", 0.0)
        if self.device_type != device:
            options["device"] = device
        if self.precision == "auto":
            options["precision"] = fastest_precision
        if self.resizer == "auto":
            options["resizer"] = fastest_resizer
        options["workers"] = self.workers if self.elastic_workers else num_workers
        return ResolvedConfig(**options)

    def check_learning_rate(self) -> None:
        """Raise UsageError if there is no learning rate; only a loop of the user's own does without one."""
        if self.learning_rate is None:
            raise UsageError("--learning-rate is not given; give a number, such as 0.1 or 0.05/worker.")

    def to_json(self) -> str:
        """The options as indented JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """The options of a run as it trains, with everything decided. ``config.json`` of a run holds these.

    ``batch_size`` and ``learning_rate`` are global. The learning rate is 0 if the user's own loop does without one. The
    defaults are those of options that nothing else decides.
    """

    name: str = field()
    batch_size: int = field()
    learning_rate: float = field()
    device: str = field()
    precision: Precision = field()
    mean: tuple[float, ...] = field()
    std: tuple[float, ...] = field()
    image_size: ImageSize | str = DEFAULT_SIZE
    resize: Resize = "stretch"
    crop_fraction: CropFraction = 0.875
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"
