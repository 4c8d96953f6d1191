"""All options of a run: its own, those of all sections, the rules between sections, and which have a mark."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, cast

from annotated_types import Interval

from raytrain.config.checkpoints import CheckpointOptions, Intervals
from raytrain.config.data import AugmentationOptions, DataOptions, check_augmentation, check_data
from raytrain.config.evaluation import NAMED_METRICS, EvaluationOptions, check_evaluation, is_fraction
from raytrain.config.machines import MachineOptions, check_machines
from raytrain.config.named_functions import names_own_function
from raytrain.config.network import (
    DEFAULT_SIZE,
    CropFraction,
    Decoder,
    ImageSize,
    Interpolation,
    NetworkOptions,
    Precision,
    Resize,
    Resizer,
    check_network,
    first_and_full_size,
)
from raytrain.config.optimisation import OptimisationOptions, check_optimisation, total_of_workers
from raytrain.config.option_marks import KnownAs, Mark, Synonym, TakenBy
from raytrain.config.option_values import (
    LOCATION,
    TEXTS,
    PositiveInt,
    check_limits,
    hints_of,
    option_field,
    read_values,
    section,
)
from raytrain.errors import UsageError, did_you_mean, flag, format_count

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_MAX_SEED = 2**63 - 1  # of torch's generators
_OTHER_METRICS = f"name one of these, or {', '.join(NAMED_METRICS)}"


@section
class RunOptions:
    """The run and its records."""

    name: Annotated[str | None, Mark.COMMON, Mark.DESCRIBES_RUN, KnownAs("experiment exp-name run-name project")] = None
    """Name of the run; by default the recipe's name and the time."""
    storage: Annotated[
        str,
        Mark.COMMON,
        Mark.DESCRIBES_RUN,
        Mark.SHARED_PLACE,
        KnownAs("output out output-dir save-dir log-dir logdir runs-dir run-dir results-dir checkpoint-dir"),
    ] = option_field(default="./runs", converter=LOCATION)
    """Where runs are stored: a folder or a URL (s3://…, gs://…, az://…)."""
    resume: Annotated[bool, Mark.COMMON, Mark.OF_COMMAND, Mark.SET_BY_FIND_RATE] = False
    """Continue the run called --name from its last checkpoint, with its own options; start it if it does not exist."""
    recipe: Annotated[str, Mark.SUBCOMMAND] = "custom"
    """Name of the recipe that these options started from."""
    open_options: Annotated[tuple[str, ...], Mark.SUBCOMMAND, Mark.OF_COMMAND] = ()
    """Names of the options that the images decide on: of the recipe auto, those that nobody has given."""
    loop: Annotated[str | None, Mark.COMMON, Mark.OWN_CODE, Mark.OF_LAUNCHER] = None
    """Your own training loop: file.py:function or package.module:function, which is called with the run."""
    seed: Annotated[int, Interval(ge=0, le=_MAX_SEED), Mark.SWEEPABLE] = 0
    """Seed of the initial weights, the sample order, the augmentation and the images held out for validation."""
    log_every: Annotated[PositiveInt, Mark.SET_BY_FIND_RATE, KnownAs("log-interval print-freq")] = 10
    """Steps between rows of the metrics history."""
    track: Annotated[tuple[str, ...], Mark.OF_COMMAND, Mark.OWN_CODE, KnownAs("wandb log-wandb tensorboard logger")] = (
        option_field(default=(), converter=TEXTS)
    )
    """Where else to send metrics: tensorboard, mlflow, wandb, prometheus, or package.module:Class of your own."""
    tag: Annotated[tuple[str, ...], Mark.DESCRIBES_RUN] = option_field(default=(), converter=TEXTS)
    """Words to find the run by, with `raytrain runs --filter tag=WORD`."""
    note: Annotated[str | None, Mark.DESCRIBES_RUN] = None
    """What the run is about, for whoever looks at it later."""
    notify: Annotated[str | None, "URL|COMMAND|$VARIABLE", Mark.OF_COMMAND, Mark.SECRET, Mark.SET_BY_FIND_RATE] = field(
        default=None, repr=False
    )
    """Tell a webhook, such as Slack's, or a command of yours how the run ends; $NAME: a variable that holds either."""
    trace: Annotated[bool, Mark.SET_BY_FIND_RATE] = False
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
"""The sections by name, in the order of the help: first those that most people use."""


_NEEDLESS = {
    "num-workers pin-memory persistent-workers prefetch-factor": (
        "all CPUs that are free read images ahead; --workers are processes that train"
    ),
    "num-classes nc": "folders or labels say which classes there are",
    "recipe": "a recipe stands before all options, as in `raytrain train cifar10 --data FOLDER`",
    "shuffle": "each epoch has the training images in an order of its own, which --seed decides",
    "distributed ddp sync-bn local-rank": "--workers are the processes that train, and they compute what one would",
    "aws-profile region endpoint-url": "AWS_PROFILE, AWS_REGION and AWS_ENDPOINT_URL in the environment say it",
}
"""Flags of other trainers that need no option here, with the reason."""


def _says_how_to_change(options: type[T]) -> type[T]:
    """Make ``options``, a frozen dataclass, raise UsageError in place of Python's FrozenInstanceError."""

    def refuse(config: object, name: str, *value: object) -> NoReturn:
        if name not in hints_of(TrainConfig):
            raise UsageError(f"TrainConfig has no option {name}{similar_options(name)}.")
        raise UsageError(
            f"{name} of a TrainConfig that exists cannot be changed; make another one, "
            f"config = dataclasses.replace(config, {name}=…)."
        )

    for method in ("__setattr__", "__delattr__"):
        setattr(options, method, refuse)
    return options


@_says_how_to_change
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
    """The options of a training run. The annotation of each option has its limits, the text below it is its --help.

    Example: ``TrainConfig(data="s3://bucket/photos", model="resnet50", batch_size="32/worker", epochs=20)``
    """

    def __new__(cls, *values: object, **options: object) -> Self:
        """Make the object; raise UsageError in place of Python's TypeError for an unknown or unnamed option."""
        if values:
            example = f"data={values[0]!r}" if isinstance(values[0], str) else "learning_rate=0.1"
            raise UsageError(f"TrainConfig has a value without a name, {values[0]!r}; write {example}.")
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise UsageError(
                    f"TrainConfig has no option {name}{similar_options(name)}; `raytrain train custom --help-all` "
                    "lists all, in Python with _ in place of -."
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if str(self.image_size).isdecimal():  # the side of a square
            object.__setattr__(self, "image_size", (int(cast(str, self.image_size)),) * 2)
        read_values(self)
        # Check the rules of each section, then those between sections. The first broken rule raises UsageError.
        check_limits(self)
        check_machines(self)
        check_optimisation(self)
        check_network(self)
        check_augmentation(self)
        check_evaluation(self)
        Intervals.parse(self.checkpoint_every)
        check_data(self)
        _check_sections_fit(self)

    @property
    def best_metric(self) -> str:
        """The metric that ``best`` names, or its default."""
        return self.best or ("mean_average_precision" if self.multi_label else "accuracy")

    def scaled_to(self, num_workers: int) -> TrainConfig:
        """Return these options with batch size and learning rate as plain numbers, of all ``num_workers`` together.

        Example: ``TrainConfig(batch_size="32/worker").scaled_to(4).batch_size == 128``
        """
        rate = self.learning_rate
        return dataclasses.replace(
            self,
            batch_size=total_of_workers(cast("int | str", self.batch_size), int, num_workers),
            learning_rate=None if rate is None else total_of_workers(rate, float, num_workers),
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
        fastest_decoder: Decoder = "cpu",
        channels_last: bool = False,
    ) -> ResolvedConfig:
        """Return the options of a run that starts, with everything decided and without secrets.

        The workers train on ``device``, cpu or cuda. ``mean`` and ``std``, measured on the training images, are taken
        unless options give others. Options that are auto take the last four arguments, which suit the machines and the
        network.

        Raises UsageError if ``--worker-load`` does not have one number for each worker.
        """
        if self.worker_load is not None and len(self.worker_load) != num_workers:
            raise UsageError(
                f"--worker-load has {format_count(len(self.worker_load), 'number')} for "
                f"{format_count(num_workers, 'worker')}; give one per worker."
            )
        # Keep the values that are given. If there is none, take the measured one, or the default of ResolvedConfig.
        scaled = vars(self.scaled_to(num_workers))
        secret = options_with(Mark.SECRET)  # these stay in the process that starts the run
        options: dict[str, Any] = {
            option: value for option, value in scaled.items() if value is not None and option not in secret
        }
        options |= {"name": name, "mean": self.mean or mean, "std": self.std or std}
        options.setdefault("learning_rate", 0.0)  # of a loop of the user's own that does without one

        # For options that are auto, take what was decided for the machines.
        if self.device_type != device:
            options["device"] = device
        if self.precision == "auto":
            options["precision"] = fastest_precision
        if self.resizer == "auto":
            options["resizer"] = fastest_resizer
        if self.decoder == "auto":
            options["decoder"] = fastest_decoder
        if self.channels_last == "auto":
            options["channels_last"] = channels_last

        # An elastic run keeps its range, so that it may resume with another number of workers.
        options["workers"] = self.workers if self.elastic_workers else num_workers
        return ResolvedConfig(**options)

    def check_learning_rate(self) -> None:
        """Raise UsageError if there is no learning rate; only a loop of the user's own does without one."""
        if self.learning_rate is None:
            raise UsageError("--learning-rate is not given; give a number, such as 0.1 or 0.05/worker.")

    def check_has_price(self) -> None:
        """Raise UsageError if there is a limit of the cost, and nothing says what a machine costs."""
        if self.max_cost is not None and not self.price:
            raise UsageError(f"--max-cost is {self.max_cost:g}, and no --price says what a machine or a GPU costs.")

    def check_metrics(self, measured: Collection[str], advice: str | None = None) -> None:
        """Raise UsageError if an option names a metric that is not among ``measured``, those of each evaluation.

        ``advice`` ends the sentence; callers give it if the metrics are those of a user's own loop. Without it, the
        metrics are the built-in ones, and ``--until`` must not ask for a fraction above 1.

        Example: ``TrainConfig(batch_size=1, until="acc=0.9").check_metrics(["accuracy", "loss"])`` raises it.
        """
        # Each metric that an option names must be measured.
        metric_of_option = {
            "--best": self.best,
            "--until": self.target and self.target[0],
            "--patience": self.best_metric if self.patience else None,
        }
        named_metrics = [("--metrics", name) for name in self.metrics if ":" not in name]
        for option, metric in [*metric_of_option.items(), *named_metrics]:
            if metric and metric not in measured:
                names = ", ".join(measured) or "nothing"
                hint = did_you_mean(metric, measured)
                raise UsageError(
                    f"{option} needs {metric}{hint}, and evaluations measure {names}; {advice or _OTHER_METRICS}."
                )

        # A percentage is a common mistake: accuracy=95 would train to the last epoch.
        if advice is None and self.target and is_fraction(self.target[0]) and self.target[1] > 1:
            metric, value = self.target
            raise UsageError(
                f"--until is {self.until}, which no evaluation reaches: {metric} is a fraction; {metric}="
                f"{value / 100:g} is {value:g} %."
            )

    def to_json(self) -> str:
        """Return the options as indented JSON text, without secrets."""
        options = dataclasses.asdict(self)
        for name in options_with(Mark.SECRET):
            del options[name]
        return json.dumps(options, indent=2) + "\n"


def _check_sections_fit(config: TrainConfig) -> None:
    """Raise UsageError if options of different sections contradict each other."""
    # A run that resumes takes the price that it was started with, which only its documents say.
    if not config.resume:
        config.check_has_price()

    # Images that grow need a larger size to grow to, and epochs to grow in.
    first, full = first_and_full_size(config.image_size or DEFAULT_SIZE)
    if isinstance(config.image_size, str) and (first[0] >= full[0] or config.epochs == 1):
        raise UsageError(
            f"--image-size is {config.image_size} and --epochs {config.epochs}; a range starts with the smaller size, "
            "and needs at least two epochs to grow in."
        )

    # Random crops of the originals decode other pixels in each epoch: only files can be kept in memory.
    if config.cache == "memory" and config.crops_originals and config.decoder != "gpu":
        raise UsageError(
            "--cache is memory, and --random-resized-crop reads the original images in every epoch; add --cache-side "
            "1.15 to cut the crops from images in memory, or --decoder gpu to keep files there, or omit --cache memory."
        )
    if config.decoder == "gpu" and config.transforms is not None:
        raise UsageError(
            f"--decoder is gpu, and --transforms {config.transforms} changes images on the CPU, before they reach a "
            "GPU; omit one of them."
        )

    # Whoever computes in float64 wants digits that bfloat16 does not have.
    if config.gradient_dtype == "bfloat16" and config.precision == "float64":
        raise UsageError(
            "--gradient-dtype is bfloat16, which keeps 8 of the 53 bits of --precision float64; omit one of them."
        )

    # An image that is shifted by its whole side is gone. Without --image-size, the size is not known yet.
    if config.image_size is not None and config.translate >= min(first):
        raise UsageError(
            f"--translate is {config.translate}, and images have {first[0]}x{first[1]} pixels; it must be less than "
            "each side."
        )

    # These options are defined by the one class of an image. A recipe may have set them, so name the value to give.
    needs_one_class = {
        "--sampling balanced": (config.sampling == "balanced", "--sampling uniform"),
        "--focal-gamma": (config.focal_gamma > 0, "--focal-gamma 0"),
        "--label-smoothing": (config.label_smoothing > 0, "--label-smoothing 0"),
    }
    for option, (is_used, instead) in needs_one_class.items():
        if is_used and config.multi_label:
            raise UsageError(
                f"{option} needs images of one class each, and here an image may have several; give {instead}."
            )


@cache
def options_with(mark: Mark) -> tuple[str, ...]:
    """Return the names of the options whose fields carry ``mark``, in the order of the fields.

    Example: ``"epochs" in options_with(Mark.SWEEPABLE)``
    """
    return tuple(name for name, hint in hints_of(TrainConfig).items() if mark in marks_of(hint))


def own_functions(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield each option that names a function of the user's own, with the function's name.

    Example: ``list(own_functions(TrainConfig(loop="loop.py:train"))) == [("loop", "loop.py:train")]``
    """
    for option in options_with(Mark.OWN_CODE):
        value: str | tuple[str, ...] | None = getattr(config, option)
        names = value if isinstance(value, tuple) else (value,)
        yield from ((option, name) for name in names if name and names_own_function(name))


def option_known_as(name: str) -> str | None:
    """Return the option that has the second flag ``name``, or that other trainers call so; None if there is none.

    Example: ``option_known_as("amp") == "precision"``
    """
    for option, hint in hints_of(TrainConfig).items():
        for mark in marks_of(hint):
            flags = [mark.flag] if isinstance(mark, Synonym) else []
            flags += map(flag, mark.flags.split()) if isinstance(mark, KnownAs) else []
            if flag(name) in flags:
                return option
    return None


def why_needless(name: str) -> str | None:
    """Return why no option is needed for what other trainers call ``name``; None for any other name.

    Example: ``why_needless("num_classes")``
    """
    return next((reason for names, reason in _NEEDLESS.items() if flag(name)[2:] in names.split()), None)


def similar_options(name: str) -> str:
    """Return `` (did you mean …?)`` with the options that are similar to ``name``; empty text if there are none.

    If ``name`` is the second flag of an option, or its flag in other trainers, it names only that one. If no option is
    needed for what it says, the text says why.

    Example: ``similar_options("lr") == " (did you mean learning_rate?)"``
    """
    if reason := why_needless(name):
        return f" ({reason})"
    meant = option_known_as(name)
    return f" (did you mean {meant}?)" if meant else did_you_mean(name, hints_of(TrainConfig))


@cache
def options_by_call() -> dict[str, list[str]]:
    """Return the names of the options that take effect only in one call of a loop, such as run.loss, by that call.

    Example: ``"focal_gamma" in options_by_call()["run.loss"]``
    """
    options: dict[str, list[str]] = {}
    for name, annotation in hints_of(TrainConfig).items():
        for mark in marks_of(annotation):
            if isinstance(mark, TakenBy):
                options.setdefault(mark.call, []).append(name)
    return options


def marks_of(annotation: Any) -> tuple[Any, ...]:
    """Return the metadata of an option's annotation: limits, the form of its values, and marks."""
    return getattr(annotation, "__metadata__", ())


@_says_how_to_change
@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """The options of a run as it trains, with everything decided. ``config.json`` of a run holds these.

    ``batch_size`` and ``learning_rate`` are global. The learning rate is 0 if the user's own loop does without one. The
    defaults below apply if neither the user nor the machines nor the weights have decided.
    """

    name: str = field()
    batch_size: int = field()
    learning_rate: float = field()
    device: str = field()
    precision: Precision = field()
    # Of options that code may give in several ways, pyright takes the type for that of a descriptor.
    mean: tuple[float, ...] = field()  # pyright: ignore[reportIncompatibleVariableOverride]
    std: tuple[float, ...] = field()  # pyright: ignore[reportIncompatibleVariableOverride]
    image_size: ImageSize | str = DEFAULT_SIZE  # pyright: ignore[reportIncompatibleVariableOverride]
    resize: Resize = "stretch"
    crop_fraction: CropFraction = 0.875
    interpolation: Interpolation = "bilinear"
    resizer: Resizer = "pillow"
    decoder: Decoder = "cpu"
    channels_last: bool = False
