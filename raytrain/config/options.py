"""Every option of a training run, defined once: its type, limits, default and help."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Interval

from raytrain.config.checks import check_combinations, check_given
from raytrain.config.image_size import DEFAULT, first_and_full_size
from raytrain.config.limits import check_limits
from raytrain.errors import UsageError

N = TypeVar("N", int, float)

PositiveInt = Annotated[int, Interval(ge=1)]
NonNegativeInt = Annotated[int, Interval(ge=0)]
NonNegativeFloat = Annotated[float, Interval(ge=0)]
Precision = Literal["float32", "tf32", "bfloat16", "float16", "float64"]
ImageSize = tuple[PositiveInt, PositiveInt]
Resize = Literal["stretch", "crop", "pad"]
CropFraction = Annotated[float, Interval(gt=0, le=1)]
Interpolation = Literal["bilinear", "bicubic"]


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The options of a training run. The annotation of each option has its limits, the text below it is its --help."""

    data: str = ""
    """Training images: a folder or a URL (s3://…, gs://…, az://…), with one folder per class, or any with --labels."""
    test_data: str | None = None
    """Test images, in the same layout. Without it, --test-fraction of --data is held out."""
    test_fraction: Annotated[float, Interval(gt=0, lt=1)] = 0.1
    """Fraction of each class that is held out for testing if --test-data is not given."""
    labels: str | None = None
    """Label file: a .csv or .parquet file, also in a bucket, with a row per image; its column split, if any, splits."""
    key_column: str | None = None
    """Column of --labels with the path of the image below --data; by default key, path, file_name, file or image."""
    label_column: tuple[str, ...] = ()
    """Column of --labels with the class; by default label, class, target or category. Several: classes, each 0 or 1."""
    label_separator: str | None = None
    """Separates the classes in the column of --labels if an image may have several, or none, such as |."""
    group_by: str | None = None
    """Column of --labels, such as patient: images that share a value are not divided over training and test images."""
    storage: str = "./runs"
    """Where runs are stored: a folder or a URL (s3://…, gs://…, az://…)."""
    name: str | None = None
    """Name of the run; by default the recipe's name and the time."""
    resume: bool = False
    """Continue the run called --name from its last checkpoint, with its own options; start it if it does not exist."""
    backend: Literal["ray", "local"] = "ray"
    """ray trains on a cluster, or on a Ray of its own on this machine; local on this machine without Ray."""
    address: str | None = None
    """Ray cluster to use; by default RAY_ADDRESS, then a cluster that runs on this machine, then a new local one."""

    scope_keys: bool = False
    """Lend the cluster AWS keys that are good for the images and this run only, if AWS STS issues such keys."""

    recipe: str = "custom"
    """Name of the recipe that these options started from."""
    model: str = "resnet18"
    """Name of a torchvision model, timm:NAME, or package.module:function, called with num_classes and channels."""
    loop: str | None = None
    """Your own training loop: file.py:function or package.module:function, which is called with the run."""
    weights: str | None = None
    """Initial weights: DEFAULT (the library's), a file, s3:// object or hf://owner/name, or a checkpoint of a run."""
    freeze: tuple[str, ...] = ()
    """Layers to freeze, batch norm statistics included, by name, such as layer1; all: all but the head."""
    image_size: ImageSize | str | None = None
    """Height and width in pixels; by default as timm's weights want it, or 224 224. 128..224: grows over the epochs."""
    resize: Resize | None = None
    """stretch (mostly the default) distorts an image to --image-size; crop shows its centre; pad puts it on black."""
    crop_fraction: CropFraction | None = None
    """crop: fraction of the shorter side of an image that is seen; by default as timm's weights want it, or 0.875."""
    interpolation: Interpolation | None = None
    """How pixels are computed if an image is resized; by default as timm's weights want it, or bilinear."""
    channels: Literal[1, 3] = 3
    """1 reads the images as grey, 3 as RGB."""

    epochs: PositiveInt = 10
    """Passes over the training images."""
    max_steps: PositiveInt | None = None
    """Finish after this many steps, even in the middle of an epoch."""
    until: str | None = None
    """Stop when an evaluation reaches this, such as accuracy=0.95, or loss=0.2, which is an upper limit."""
    patience: PositiveInt | None = None
    """Stop after this many evaluations, one after the other, that are not better than the best by --best."""
    best: str | None = None
    """Metric that decides on the best checkpoint, such as loss; by default accuracy, or mean_average_precision."""
    max_time: str | None = None
    """Stop after this time, such as 90s, 30m or 2h, counted from each start of the training."""
    batch_size: PositiveInt | None = None
    """Global batch: images per step over all workers. Overrides --batch-size-per-worker."""
    batch_size_per_worker: PositiveInt | None = None
    """Images per step and worker."""
    accumulate: PositiveInt | Literal["auto"] = 1
    """Compute each global batch in this many parts, one after the other, to need less memory; auto: as few as fit."""
    gradient_checkpointing: bool = False
    """Compute parts of the network twice, to need less memory."""
    optimizer: Literal["sgd", "adamw", "lamb", "lion"] = "sgd"
    """SGD with momentum, or AdamW; LAMB for large batches, or Lion, both from timm."""
    learning_rate: NonNegativeFloat | None = None
    """Peak learning rate. Overrides --learning-rate-per-worker."""
    learning_rate_per_worker: NonNegativeFloat | None = None
    """Peak learning rate, multiplied by the number of workers."""
    head_learning_rate_factor: NonNegativeFloat = 1.0
    """Multiplies the learning rate of the head, the layer that outputs one number per class."""
    layer_decay: Annotated[float, Interval(gt=0, le=1)] = 1.0
    """Multiplies the learning rate once more for each layer nearer to the images, such as 0.75; for timm's networks."""
    momentum: NonNegativeFloat = 0.9
    """Momentum of SGD."""
    nesterov: bool = False
    """SGD looks ahead along its momentum, as Nesterov's does."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty for SGD, decoupled weight decay for the others."""
    decay_norms_and_biases: bool = True
    """Apply --weight-decay to norms and biases, too."""
    clip_norm: Annotated[float, Interval(gt=0)] | None = None
    """Scale the gradients of each step down to this Euclidean norm, if theirs is larger."""
    ema_decay: Annotated[float, Interval(ge=0, lt=1)] | None = None
    """Evaluate and export a moving average of the weights with this decay per step, such as 0.999."""
    schedule: Literal["constant", "piecewise", "cosine", "linear"] = "constant"
    """Learning rate schedule after the warm-up."""
    drop_factor: float = 0.1
    """piecewise: multiplies the learning rate at each drop."""
    drop_period: PositiveInt = 10
    """piecewise: epochs between drops."""
    warmup_epochs: NonNegativeFloat = 0.0
    """Epochs of warm-up, in which the learning rate rises linearly from near 0."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    """balanced draws every class equally often: images of rare classes several times an epoch, others not in each."""
    class_weights: str | None = None
    """Weights of the classes in the loss: balanced (inverse to their sizes), or a JSON file such as {"cat": 2, …}."""
    focal_gamma: NonNegativeFloat = 0.0
    """Focal loss: multiplies an image's loss by (1 - p)^gamma, p being the probability of its class; 2 is usual."""
    label_smoothing: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """Probability that is spread evenly over all classes."""
    batch_norm: Literal["sync", "aggregate"] = "sync"
    """sync normalises with the global batch; aggregate with each local batch, and combines the running statistics."""
    precision: Literal["auto", Precision] = "auto"
    """auto: bfloat16 if all devices compute it natively, else float32. 16 bits are mixed: the weights stay float32.
    tf32: float32, with products that NVIDIA's GPUs since Ampere compute faster, from rounded factors."""
    channels_last: bool = False
    """Store images and weights in channels-last memory format, which is faster on most hardware."""
    compile: bool = False
    """Compile the network with torch.compile."""
    flip_test: bool = False
    """Evaluate and predict with the mean of the logits for an image and for its mirror image."""
    shift_test: bool = False
    """Evaluate and predict with the mean of the logits for an image, with weight 2, and for it shifted by a pixel."""
    seed: int = 0
    """Seed of the initial weights, the sample order, the augmentation and the train/test split."""

    horizontal_flip: bool = False
    """Mirror half of the training images."""
    alternating_flip: bool = False
    """Mirror half of the training images in the first epoch, the other half in the second, and so on in turn."""
    translate: NonNegativeInt = 0
    """Shift training images by up to this many pixels in each direction; the gap is 0 after normalisation."""
    random_resized_crop: bool = False
    """Train on random crops (8 % to 100 % of the area) of the original images, resized to --image-size."""
    cache_side: Annotated[float, Interval(ge=1)] | None = None
    """Cut random crops from images kept at this many times --image-size, such as 1.15, not from the originals."""
    auto_augment: Literal["randaugment", "trivialaugment"] | None = None
    """Train on images changed by two random operations of RandAugment, or by one of TrivialAugment."""
    color_jitter: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Change brightness, contrast and saturation of training images by up to this fraction."""
    rotation: Annotated[float, Interval(ge=0, le=180)] = 0.0
    """Rotate training images by up to this many degrees in either direction."""
    blur: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Fraction of the training images that are blurred, by a Gaussian of 0.1 to 2 pixels."""
    random_erasing: Annotated[float, Interval(ge=0, le=1)] = 0.0
    """Fraction of the training images of which a random box is replaced by the mean colour."""
    transforms: str | None = None
    """Your own torchvision.transforms.v2: file.py:function or package.module:function, which returns them."""
    mixup: NonNegativeFloat = 0.0
    """Mix pairs of training images, with weights from Beta(a, a) for this a, such as 0.2; 0: don't."""
    cutmix: NonNegativeFloat = 0.0
    """Paste boxes of other training images, with areas from Beta(a, a) for this a, such as 1; 0: don't."""
    mean: tuple[float, ...] | None = None
    """Mean of each channel to subtract, in 0..1; by default as timm's weights want it, or of the training images."""
    std: tuple[Annotated[float, Interval(gt=0)], ...] | None = None
    """Standard deviation of each channel to divide by, in 0..1; by default as --mean."""

    workers: PositiveInt | str = "auto"
    """Training workers. auto: one per GPU, else as many CPU workers as fit beside the readers; 1..4: elastic."""
    wait_for_machines_s: NonNegativeFloat = 0.0
    """Wait for so many seconds if the cluster has too few machines for the workers, and an autoscaler starts more."""
    worker_load: tuple[NonNegativeFloat, ...] | None = None
    """Relative size of each worker's local batch, such as 1 1 0 2; 0 leaves a worker idle."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses GPUs if the cluster has any."""
    gpus: str | None = None
    """GPUs of this machine to train on, such as 0,2, as numbered by `raytrain devices`; by default all."""
    accelerator_type: str | None = None
    """The type of GPU to train on if a cluster has several, as Ray names it, such as A100 or L4; by default any."""
    threads_per_worker: PositiveInt | None = None
    """CPU threads that each worker computes with; by default the node's cores, divided among its workers."""
    cache: Literal["auto", "memory", "disk", "none"] = "auto"
    """memory keeps decoded images; disk keeps a bucket's files on each machine; auto: what fits; none: neither."""
    cache_folder: str | None = None
    """Where --cache disk keeps files on each machine; by default raytrain-cache-UID in the temporary folder."""
    cache_limit_gb: Annotated[float, Interval(gt=0)] | None = None
    """Most of the disk that --cache disk takes on each machine; by default half of what is free there."""
    prefetch: PositiveInt = 2
    """Batches that each worker prepares ahead of the loop."""
    max_failures: NonNegativeInt = 3
    """Failures of the worker group to recover from; each time the run continues from its last checkpoint."""
    on_bad_image: Literal["skip", "fail"] = "skip"
    """skip leaves out images that cannot be read, and lists them; fail ends the run at the first one."""
    max_bad_fraction: Annotated[float, Interval(ge=0, le=1)] = 0.01
    """skip: the run fails if more than this fraction of its training and test images cannot be read."""

    log_every: PositiveInt = 10
    """Steps between rows of the metrics history."""
    evaluate_every: NonNegativeInt = 1
    """Epochs between evaluations on the test images; 0: only at the end."""
    checkpoint_every_epochs: NonNegativeInt = 1
    """Epochs between checkpoints; 0: not by epochs."""
    checkpoint_every_steps: NonNegativeInt = 0
    """Steps between checkpoints; 0: not by steps."""
    checkpoint_every_s: NonNegativeFloat = 600.0
    """Seconds between checkpoints; 0: not by time."""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints to keep, besides the best."""
    trace: bool = False
    """Record which samples each worker used in each step, for `raytrain audit`."""
    tag: tuple[str, ...] = ()
    """Words to find the run by, with `raytrain runs --filter tag=WORD`."""
    note: str | None = None
    """What the run is about, for whoever looks at it later."""
    track: tuple[str, ...] = ()
    """Where else to send metrics: tensorboard, mlflow, wandb, prometheus, or package.module:Class of your own."""

    def __post_init__(self) -> None:
        check_limits(self, TrainConfig)
        check_combinations(self)

    @property
    def elastic_workers(self) -> tuple[int, int] | None:
        """The minimum and maximum number of workers if ``workers`` is a range such as 1..4, else None."""
        fewest, dots, most = str(self.workers).partition("..")
        return (int(fewest), int(most)) if dots else None

    @property
    def full_image_size(self) -> ImageSize:
        """The height and width for which the network is trained, also if training starts with smaller images."""
        return first_and_full_size(self.image_size or DEFAULT)[1]

    @property
    def target(self) -> tuple[str, float] | None:
        """The metric that ``until`` names, and its value."""
        name, _, value = (self.until or "").partition("=")
        return (name, float(value)) if self.until else None

    @property
    def best_metric(self) -> str:
        """The metric that ``best`` names, or its default."""
        return self.best or ("mean_average_precision" if self.multi_label else "accuracy")

    @property
    def multi_label(self) -> bool:
        """Whether an image may have several classes, or none."""
        return self.label_separator is not None or len(self.label_column) > 1

    @property
    def max_time_s(self) -> float | None:
        """``max_time`` in seconds."""
        return float(self.max_time[:-1]) * _SECONDS[self.max_time[-1]] if self.max_time else None

    @property
    def crops_originals(self) -> bool:
        """Whether each epoch decodes other parts of the original images, so that decoded images cannot be kept."""
        return self.random_resized_crop and self.cache_side is None

    def scaled_to(self, num_workers: int) -> TrainConfig:
        """The same options with global batch size and learning rate: those of all ``num_workers`` together."""
        return dataclasses.replace(
            self,
            batch_size=_total(self.batch_size, self.batch_size_per_worker, num_workers),
            batch_size_per_worker=None,
            learning_rate=_total(self.learning_rate, self.learning_rate_per_worker, num_workers),
            learning_rate_per_worker=None,
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
    ) -> ResolvedConfig:
        """The options of a run that starts, with everything decided. Raises UsageError if loads and workers differ."""
        if self.worker_load is not None and len(self.worker_load) != num_workers:
            raise UsageError(
                f"--worker-load has {len(self.worker_load)} numbers for {num_workers} workers; give one per worker."
            )
        given = vars(self.scaled_to(num_workers))
        options: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
        options |= {"name": name, "device": device, "mean": self.mean or mean, "std": self.std or std}
        options.setdefault("learning_rate", 0.0)
        if options["precision"] == "auto":
            options["precision"] = fastest_precision
        options["workers"] = self.workers if self.elastic_workers else num_workers
        return ResolvedConfig(**options)

    def check_learning_rate(self) -> None:
        """Raise UsageError if there is no learning rate; only a loop of the user's own does without one."""
        check_given(self, "learning_rate", "learning_rate_per_worker")

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
    device: Literal["cpu", "cuda"] = field()
    precision: Precision = field()
    mean: tuple[float, ...] = field()
    std: tuple[float, ...] = field()
    image_size: ImageSize | str = DEFAULT
    resize: Resize = "stretch"
    crop_fraction: CropFraction = 0.875
    interpolation: Interpolation = "bilinear"


def _total(total: N | None, per_worker: N | None, num_workers: int) -> N | None:
    """An option of all workers together; None if it is given in neither way."""
    return total if total is not None or per_worker is None else per_worker * num_workers
