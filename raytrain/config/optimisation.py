"""Options of the optimisation: length, batch, optimizer, learning rate and its schedule, loss."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, TypeVar, get_args

from annotated_types import Interval

from raytrain.config.option_marks import KnownAs, Mark, Synonym, TakenBy
from raytrain.config.option_values import (
    Accepts,
    Location,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    option_field,
    seconds,
    section,
)
from raytrain.errors import UsageError, did_you_mean

N = TypeVar("N", int, float)
Shape = Literal["constant", "cosine", "linear", "piecewise", "rising"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

_NUMBER = r"\d*\.?\d+(?:e[-+]?\d+)?"
_PER_WORKER = "/worker"


class Schedule(NamedTuple):
    """How the learning rate changes over the epochs.

    ``piecewise`` multiplies it by ``factor`` after every ``period`` epochs. ``rising`` goes from the first of ``rates``
    to the second.
    """

    shape: Shape
    factor: float = 0.1
    period: int = 10
    rates: tuple[float, float] = (1e-6, 10.0)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Return the schedule that ``text`` names; raise UsageError if it names none.

        Example: ``Schedule.parse("piecewise:0.5/3ep") == Schedule("piecewise", factor=0.5, period=3)``
        """
        if text in SHAPES:
            return cls(text)
        parts = re.fullmatch(rf"piecewise:({_NUMBER})/([1-9]\d*)ep", text)
        if parts and math.isfinite(float(parts[1])):
            return cls("piecewise", float(parts[1]), int(parts[2]))
        parts = re.fullmatch(rf"rising:({_NUMBER})\.\.({_NUMBER})", text)
        if parts and 0 < float(parts[1]) < float(parts[2]) < math.inf:
            return cls("rising", rates=(float(parts[1]), float(parts[2])))
        raise UsageError(
            f"--schedule is {text!r}{did_you_mean(text, SHAPES)}; give constant, cosine, linear, or "
            "piecewise:0.1/10ep, which multiplies the learning rate by 0.1 every 10 epochs; find-rate takes "
            "rising:1e-6..10."
        )


@section
class OptimisationOptions:
    """How long and how the network learns."""

    epochs: Annotated[
        PositiveInt,
        Mark.CHOSEN_BY_AUTO,
        Mark.COMMON,
        Mark.SWEEPABLE,
        Mark.SET_BY_FIND_RATE,
        KnownAs("max-epochs num-epochs"),
    ] = 10
    """Passes over the training images."""
    batch_size: Annotated[
        PositiveInt | str | None,
        "N|N/worker",
        Mark.CHOSEN_BY_AUTO,
        Mark.COMMON,
        Mark.SWEEPABLE,
        Mark.DECIDED_AT_START,
        Synonym("--bs"),
    ] = None
    """Images per step: 128 of all workers together, or 32/worker."""
    learning_rate: Annotated[
        NonNegativeFloat | str | None,
        "X|X/worker",
        Mark.CHOSEN_BY_AUTO,
        Mark.COMMON,
        Mark.SWEEPABLE,
        Mark.DECIDED_AT_START,
        Mark.SET_BY_FIND_RATE,
        TakenBy("run.build_optimizer"),
        Synonym("--lr"),
    ] = None
    """Peak learning rate: 0.1 for any number of workers, or 0.05/worker, which is multiplied by their number."""
    schedule: Annotated[
        str,
        "constant|cosine|linear|piecewise:X/Nep|rising:X..X",
        Mark.CHOSEN_BY_AUTO,
        Mark.COMMON,
        Mark.SWEEPABLE,
        TakenBy("run.build_scheduler"),
        KnownAs("sched lr-scheduler"),
    ] = "constant"
    """Learning rate after the warm-up; piecewise:0.1/10ep multiplies it by 0.1 every 10 epochs, rising: find-rate."""
    warmup_epochs: Annotated[
        NonNegativeFloat,
        Mark.CHOSEN_BY_AUTO,
        Mark.SWEEPABLE,
        Mark.SET_BY_FIND_RATE,
        TakenBy("run.build_scheduler"),
        KnownAs("warmup"),
    ] = 0.0
    """Epochs of warm-up, in which the learning rate rises linearly from near 0."""
    optimizer: Annotated[
        Literal["sgd", "adamw", "lamb", "lion"],
        Mark.CHOSEN_BY_AUTO,
        Mark.COMMON,
        Mark.SWEEPABLE,
        TakenBy("run.build_optimizer"),
        KnownAs("opt"),
    ] = "sgd"
    """SGD with momentum, or AdamW; LAMB for large batches, or Lion, both from timm."""
    momentum: Annotated[
        float, Interval(ge=0, lt=1), Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, TakenBy("run.build_optimizer")
    ] = 0.9
    """Momentum of SGD."""
    nesterov: Annotated[bool, Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, TakenBy("run.build_optimizer")] = False
    """SGD looks ahead along its momentum, as Nesterov's does."""
    weight_decay: Annotated[
        NonNegativeFloat, Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, TakenBy("run.build_optimizer"), Synonym("--wd")
    ] = 0.0
    """L2 penalty for SGD, decoupled weight decay for the others."""
    decay_norms_and_biases: Annotated[
        bool, Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, Mark.SHAPES_STATE, TakenBy("run.build_optimizer")
    ] = True
    """Apply --weight-decay to norms and biases, too."""
    head_learning_rate_factor: Annotated[
        NonNegativeFloat, Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, Mark.SHAPES_STATE, TakenBy("run.build_optimizer")
    ] = 1.0
    """Multiplies the learning rate of the head, the layer that outputs one number per class."""
    head_epochs: Annotated[
        NonNegativeInt, Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, Mark.SET_BY_FIND_RATE, TakenBy("run.train_head_first")
    ] = 0
    """Epochs at the start in which the head learns alone; then warm-up and schedule begin, with all layers."""
    layer_decay: Annotated[
        float, Interval(gt=0, le=1), Mark.SWEEPABLE, Mark.SHAPES_STATE, TakenBy("run.build_optimizer")
    ] = 1.0
    """Multiplies the learning rate once more for each layer nearer to the images, such as 0.75; for timm's networks."""
    clip_norm: Annotated[
        PositiveFloat | None, Mark.SWEEPABLE, TakenBy("clip_grad_norm_"), KnownAs("clip-grad grad-clip max-grad-norm")
    ] = None
    """Scale the gradients of each step down to this Euclidean norm, if theirs is larger."""
    ema_decay: Annotated[
        Annotated[float, Interval(ge=0, lt=1)] | None,
        Mark.CHOSEN_BY_AUTO,
        Mark.SWEEPABLE,
        Mark.SHAPES_STATE,
        TakenBy("WeightAverage"),
        KnownAs("ema model-ema"),
    ] = None
    """Evaluate and export a moving average of the weights with this decay per step, such as 0.999."""
    label_smoothing: Annotated[
        float, Interval(ge=0, lt=1), Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, TakenBy("run.loss"), KnownAs("smoothing")
    ] = 0.0
    """Probability that is spread evenly over all classes."""
    class_weights: Annotated[
        str | None, "balanced|FILE|JSON", Mark.CHOSEN_BY_AUTO, Mark.SWEEPABLE, TakenBy("run.loss")
    ] = option_field(default=None, converter=Accepts[Location | Mapping[str, float] | None, str | None]())
    """Weights of the classes in the loss: balanced (inverse to their sizes), or JSON such as {"cat": 2}, or a file."""
    focal_gamma: Annotated[NonNegativeFloat, Mark.SWEEPABLE, TakenBy("run.loss")] = 0.0
    """Focal loss: multiplies an image's loss by (1 - p)^gamma, p being the probability of its class; 2 is usual."""
    accumulate: Annotated[
        PositiveInt | Literal["auto"],
        Mark.SWEEPABLE,
        TakenBy("batch.microbatches"),
        KnownAs("grad-accum-steps gradient-accumulation-steps accumulate-grad-batches"),
    ] = 1
    """Compute each global batch in this many microbatches, one by one, to need less memory; auto: as few as fit."""
    gradient_dtype: Annotated[Literal["bfloat16"] | None, Mark.SWEEPABLE] = None
    """bfloat16: gradients travel between the workers at half the bytes, and are added up in float32."""
    max_steps: Annotated[PositiveInt | None, Mark.SWEEPABLE] = None
    """Finish after this many steps, even in the middle of an epoch."""
    max_time: Annotated[str | None, "TIME", Mark.SWEEPABLE] = None
    """Stop after this time, such as 90s, 30m or 2h, counted anew from the start of each attempt, as after a resume."""

    @property
    def learning_rate_schedule(self) -> Schedule:
        """``schedule``, parsed."""
        return Schedule.parse(self.schedule)

    @property
    def is_range_test(self) -> bool:
        """True if the run raises the learning rate to find a good one; it neither evaluates nor keeps checkpoints."""
        return self.learning_rate_schedule.shape == "rising"

    @property
    def max_time_s(self) -> float | None:
        """``max_time`` in seconds; None if it is not given."""
        return seconds(self.max_time) if self.max_time else None


def check_optimisation(options: OptimisationOptions) -> None:
    """Raise UsageError if the batch size is missing, a text is malformed, or options contradict each other."""
    # Texts are numbers per worker, such as 32/worker; the types of the options have let any text pass.
    if options.batch_size is None:
        raise UsageError("--batch-size is not given; give 128 for all workers together, or 32/worker.")
    if isinstance(options.batch_size, str) and not re.fullmatch(r"[1-9]\d*" + _PER_WORKER, options.batch_size):
        raise UsageError(f"--batch-size is {options.batch_size!r}; give a number of images, such as 128 or 32/worker.")
    rate = options.learning_rate
    per_worker = re.fullmatch(f"({_NUMBER}){_PER_WORKER}", rate) if isinstance(rate, str) else None
    if isinstance(rate, str) and (per_worker is None or not math.isfinite(float(per_worker[1]))):
        raise UsageError(f"--learning-rate is {rate!r}; give a number of at least 0, such as 0.1 or 0.05/worker.")

    # How long the network learns, and how the learning rate changes meanwhile.
    Schedule.parse(options.schedule)
    if options.max_time is not None and options.max_time_s is None:
        raise UsageError(f"--max-time is {options.max_time!r}; give a number and s, m, h or d, such as 90s or 2h.")
    if options.head_epochs >= options.epochs:
        raise UsageError(
            f"--head-epochs is {options.head_epochs} and --epochs {options.epochs}, which leaves no epoch for all "
            "layers; give fewer, or --freeze all to train the head alone."
        )

    # torch's SGD raises an error of its own for Nesterov without momentum, and the other optimizers do not know it.
    if options.nesterov and (options.optimizer != "sgd" or options.momentum == 0):
        raise UsageError(
            f"--nesterov is for SGD with momentum, and --optimizer is {options.optimizer} with --momentum "
            f"{options.momentum:g}; give --no-nesterov."
        )


def is_per_worker(value: object) -> bool:
    """Return True if ``value`` is a text such as ``32/worker``; what stands before the slash is not checked.

    Example: ``is_per_worker("0.05/worker") and not is_per_worker(0.1)``
    """
    return isinstance(value, str) and value.endswith(_PER_WORKER)


def total_of_workers(value: N | str, kind: type[N], num_workers: int) -> N:
    """Resolve a per-worker value, a number of the type ``kind``, for all workers; return a plain number unchanged.

    Example: ``total_of_workers("32/worker", int, num_workers=4) == 128``
    """
    return kind(value.removesuffix(_PER_WORKER)) * num_workers if isinstance(value, str) else value
