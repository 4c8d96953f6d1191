"""Every option of a training run, each standing once: field, default and help."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from raytrain.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What a run trains on, what it trains, how, and where it leaves its results."""

    data: str = ""
    """Training images: s3://bucket/prefix or a folder, with one folder a class."""
    test_data: str | None = None
    """Test images, laid out likewise; without it --test-fraction of --data is held out."""
    test_fraction: float = 0.1
    """Fraction of each class held out for testing where --test-data is not given."""
    storage: str = "./runs"
    """Where runs are kept: a folder or s3://bucket/prefix."""
    name: str | None = None
    """Name of the run; by default the recipe's name and the time."""
    resume: bool = False
    """Go on from the last checkpoint of the run called --name."""
    address: str | None = None
    """Ray cluster to use; by default RAY_ADDRESS, else a cluster on this machine, else a new local one."""

    recipe: str = "custom"
    """Name of the recipe that these options started from."""
    model: str = "resnet18"
    """A torchvision model's name, or package.module:function, called with num_classes and channels."""
    loop: str | None = None
    """A training loop of your own: file.py:function or package.module:function, called with the run."""
    weights: str | None = None
    """What the network begins with: DEFAULT (torchvision's weights), or a file or s3:// object of weights or of a run's checkpoint."""
    freeze: tuple[str, ...] = ()
    """Layers that stay as they are, batch norm statistics included, by name: features.0, or layer1 with all that is in it."""
    image_size: tuple[int, int] = (224, 224)
    """Height and width of the images that the network sees, in pixels."""
    channels: Literal[1, 3] = 3
    """1 reads the images as grey, 3 as RGB."""

    epochs: int = 10
    """Passes over the training images."""
    max_steps: int | None = None
    """End after this many steps, even in the middle of an epoch."""
    batch_size: int | None = None
    """Global batch: images a step over all workers; where given, it stands above --batch-size-per-worker."""
    batch_size_per_worker: int | None = None
    """Images a step for each worker; the global batch is this times the workers."""
    accumulate: int = 1
    """Parts in which each global batch is computed, one after the other, where it is too large for the memory at once."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    learning_rate: float | None = None
    """Peak learning rate; where given, it stands above --learning-rate-per-worker."""
    learning_rate_per_worker: float | None = None
    """Learning rate that is multiplied by the number of workers."""
    head_learning_rate_factor: float = 1.0
    """The head (the layer that gives a number for each class) learns at this many times the learning rate."""
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """L2 penalty for SGD, decoupled decay for AdamW."""
    schedule: Literal["constant", "piecewise", "cosine"] = "constant"
    """How the learning rate goes over the epochs, after the warm-up."""
    drop_factor: float = 0.1
    """piecewise: the learning rate is multiplied by this at each drop."""
    drop_period: int = 10
    """piecewise: epochs between drops."""
    warmup_epochs: float = 0.0
    """Epochs over which the learning rate rises linearly from near 0."""
    label_smoothing: float = 0.0
    """Probability mass spread evenly over all classes."""
    batch_norm: Literal["sync", "aggregate"] = "sync"
    """sync normalises with the whole global batch; aggregate with each worker's share, then joins the running statistics."""
    precision: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """bfloat16 and float16 are mixed precision: the weights stay float32. float16 is for GPUs; CPUs are slow in it."""
    channels_last: bool = False
    """Keep images and weights in channels-last memory order (faster on most hardware)."""
    compile: bool = False
    """Compile the network with torch.compile."""
    seed: int = 0
    """Decides the initial weights, the order of samples, the augmentation and the split."""

    horizontal_flip: bool = False
    """Mirror half of the training images."""
    translate: int = 0
    """Shift training images by up to this many pixels each way, filling with 0 after normalisation."""
    random_resized_crop: bool = False
    """Train on random crops (8 % to 100 % of the area) resized to --image-size."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel in 0..1 to subtract; by default measured on the training images."""
    std: tuple[float, ...] | None = None
    """Standard deviation of each channel in 0..1 to divide by; by default measured on the training images."""

    workers: int | str = "auto"
    """Training workers; auto: one a GPU, else CPU workers that leave room for reading data; 1..4: as many of these as there is room
    for, more and fewer as machines come and go."""
    worker_load: tuple[float, ...] | None = None
    """Relative share of each worker in a batch, such as 1 1 0 2; 0 leaves a worker idle."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes GPUs where the cluster has any."""
    gpus: str | None = None
    """GPUs of this machine to train on, such as 0,2, by the numbers that `raytrain devices` shows; by default all."""
    threads_per_worker: int | None = None
    """CPU threads of each worker's arithmetic; by default the node's cores shared out."""
    cache: Literal["auto", "memory", "none"] = "auto"
    """memory keeps the decoded images in Ray's object store; none streams them each epoch; auto by size, where there is a next epoch."""
    prefetch: int = 2
    """Batches that are made ready ahead of the loop on each worker."""
    max_failures: int = 3
    """Failures of the worker group after which the run gives up; each goes on from the last checkpoint."""
    on_bad_image: Literal["skip", "fail"] = "skip"
    """skip leaves out images that cannot be read and lists them; fail ends the run at the first one."""
    max_bad_fraction: float = 0.01
    """skip: the run ends once more than this fraction of its images, test images included, could not be read."""

    log_every: int = 10
    """Steps between rows of the metrics history."""
    evaluate_every: int = 1
    """Epochs between evaluations on the test images; 0: only at the end."""
    checkpoint_every_epochs: int = 1
    """Epochs between checkpoints; 0: not by epochs."""
    checkpoint_every_steps: int = 0
    """Steps between checkpoints; 0: not by steps."""
    checkpoint_every_s: float = 600.0
    """Seconds between checkpoints; 0: not by time."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep, besides the best."""
    trace: bool = False
    """Keep which samples each worker used in each step; `raytrain audit` reads it."""

    def __post_init__(self) -> None:
        for name, field_minimum in _MINIMA.items():
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value < field_minimum:
                raise UsageError(f"{_flag(name)} is {value}; it must be at least {field_minimum}.")
        _check_given(self, "batch_size", "batch_size_per_worker")
        if not 0 < self.test_fraction < 1:
            raise UsageError(f"--test-fraction is {self.test_fraction}; it must lie between 0 and 1.")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UsageError(f"--max-bad-fraction is {self.max_bad_fraction}; it must lie between 0 and 1.")
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"--label-smoothing is {self.label_smoothing}; it must be at least 0 and below 1.")
        if min(self.image_size) < 1:
            raise UsageError(f"--image-size is {self.image_size}; both numbers must be at least 1.")
        _check_workers(self)
        _check_loads(self)
        _check_gpus(self)
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None and len(value) != self.channels:
                raise UsageError(f"{_flag(name)} has {len(value)} numbers for {self.channels} channels; give one a channel.")
        if self.std is not None and min(self.std) <= 0:
            raise UsageError(f"--std is {self.std}; each number must be above 0.")

    @property
    def elastic_workers(self) -> tuple[int, int] | None:
        """The fewest and the most workers, where ``workers`` is a range such as 1..4."""
        fewest, dots, most = str(self.workers).partition("..")
        return (int(fewest), int(most)) if dots else None

    def scaled_to(self, num_workers: int) -> TrainConfig:
        """The same options with the batch size and the learning rate made global: those of all ``num_workers`` together."""
        per_worker, rate = self.batch_size_per_worker, self.learning_rate_per_worker
        return dataclasses.replace(
            self,
            batch_size=self.batch_size or (per_worker or 0) * num_workers,
            batch_size_per_worker=None,
            learning_rate=(rate or 0) * num_workers if self.learning_rate is None else self.learning_rate,
            learning_rate_per_worker=None,
        )

    def resolve(
        self, *, name: str, num_workers: int, device: str, mean: tuple[float, ...], std: tuple[float, ...]
    ) -> ResolvedConfig:
        """The options of a run that starts: nothing is left to decide. Raises UsageError if the loads don't fit the workers."""
        if self.worker_load is not None and len(self.worker_load) != num_workers:
            raise UsageError(f"--worker-load has {len(self.worker_load)} numbers for {num_workers} workers; give one per worker.")
        options: dict[str, Any] = dict(vars(self.scaled_to(num_workers)))
        options |= {"name": name, "device": device, "mean": self.mean or mean, "std": self.std or std}
        options["workers"] = self.workers if self.elastic_workers else num_workers
        return ResolvedConfig(**options)

    def check_learning_rate(self) -> None:
        """Raise UsageError without one; only a loop of one's own can do so."""
        _check_given(self, "learning_rate", "learning_rate_per_worker")

    def to_json(self) -> str:
        """The options as indented JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of :meth:`to_json`."""
        values: dict[str, Any] = json.loads(text)
        restored: dict[str, Any] = {
            name: tuple(cast(list[Any], value)) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**restored)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """The options of a run as it trains, with everything decided. ``config.json`` of a run holds these.

    ``batch_size`` and ``learning_rate`` are global. A loop of the user's own may do without a learning rate; then it is 0.
    """

    name: str = field()
    batch_size: int = field()
    learning_rate: float = field()
    device: Literal["cpu", "cuda"] = field()
    mean: tuple[float, ...] = field()
    std: tuple[float, ...] = field()


_MINIMA: dict[str, float] = {
    "workers": 1,
    "epochs": 1,
    "max_steps": 1,
    "batch_size": 1,
    "batch_size_per_worker": 1,
    "accumulate": 1,
    "learning_rate": 0,
    "learning_rate_per_worker": 0,
    "head_learning_rate_factor": 0,
    "weight_decay": 0,
    "momentum": 0,
    "drop_period": 1,
    "warmup_epochs": 0,
    "translate": 0,
    "threads_per_worker": 1,
    "prefetch": 1,
    "max_failures": 0,
    "log_every": 1,
    "evaluate_every": 0,
    "checkpoint_every_epochs": 0,
    "checkpoint_every_steps": 0,
    "checkpoint_every_s": 0,
    "keep_checkpoints": 1,
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_given(config: TrainConfig, total: str, per_worker: str) -> None:
    if getattr(config, total) is None and getattr(config, per_worker) is None:
        raise UsageError(f"Give either {_flag(total)} or {_flag(per_worker)}; neither is given.")


def _check_workers(config: TrainConfig) -> None:
    if isinstance(config.workers, str) and config.workers != "auto" and not re.fullmatch(r"\d+\.\.\d+", config.workers):
        raise UsageError(f"--workers is {config.workers!r}; give a number, auto, or a range such as 1..4.")
    if config.elastic_workers is None:
        return
    fewest, most = config.elastic_workers
    if not 1 <= fewest <= most:
        raise UsageError(f"--workers is {config.workers}; a range goes from at least 1 to no less than that.")
    if config.worker_load is not None:
        raise UsageError(f"--worker-load needs a number of --workers, which is {config.workers}; leave it out.")


def _check_loads(config: TrainConfig) -> None:
    loads = config.worker_load
    if loads is not None and (min(loads) < 0 or sum(loads) <= 0):
        raise UsageError(f"--worker-load is {loads}; each must be at least 0 and one above 0.")


def _check_gpus(config: TrainConfig) -> None:
    numbers = [] if config.gpus is None else config.gpus.split(",")
    if not all(number.isdecimal() for number in numbers) or len(set(numbers)) < len(numbers):
        raise UsageError(f"--gpus is {config.gpus!r}; give the numbers of GPUs with commas between them, each once, such as 0,2.")
