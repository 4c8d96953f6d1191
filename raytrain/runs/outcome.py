"""Progress, outcome and result of a run, and the command that resumes it."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.config.options import options_with, own_functions
from raytrain.errors import TrainingFailed, option_name, shell_command
from raytrain.recipes import AUTO, CUSTOM, RECIPES
from raytrain.runs.documents import known_fields
from raytrain.runs.redact import redact

EndStatus = Literal["finished", "stopped", "failed"]
StopKind = Literal[
    "signal",  # detail: SIGINT, SIGTERM or SIGHUP
    "command",  # `raytrain stop`; detail: the host
    "page",  # its Stop button; detail: the host
    "caller",  # a program or a notebook; detail: its words
    "early_stopping",  # a trial of a sweep; detail: Optuna's pruner, if one did it; metric, value, count of epochs
    "target",  # --until; detail: its value; metric, value
    "patience",  # --patience; metric, the best value, count of evaluations
    "time",  # --max-time; detail: its value
    "cost",  # --max-cost; detail: its value; value: the dollars so far
    "tracker",  # a stop that somebody asked for there; detail: its name
    "too_many_bad_images",  # detail: the error
    "diverged",  # detail: the error
    "owner_changed",  # detail: the error
]

SUBMIT_VARIABLE = "RAYTRAIN_SUBMIT"
"""The variable of a job that holds the words before its own command, with which it was sent."""
DIVERGED_HINT = "lower --learning-rate, or use a --precision with a larger range, such as float32"
"""Advice if a loss or a weight is not finite."""


@dataclass(frozen=True)
class StopReason:
    """Why a run stops, or should stop, with a checkpoint: a kind, and the fields that :data:`StopKind` lists for it.

    ``metric`` is the name of a metric, ``value`` a value of it, or dollars, and ``count`` a number of evaluations or
    epochs. ``detail`` may be the words of a person or of an exception, so secrets are removed from it: it is stored,
    shown and sent to trackers.
    """

    kind: StopKind
    detail: str | None = None
    metric: str | None = None
    value: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if self.detail is not None:
            object.__setattr__(self, "detail", redact(self.detail))

    def __str__(self) -> str:
        return "/".join(map(str, self.to_json().values()))

    @property
    def option(self) -> str | None:
        """The option that has stopped the run, and would stop it again at the first evaluation after a resume.

        It is ``until`` or ``patience``; None if the run was stopped for another reason.
        """
        return {"target": "until", "patience": "patience"}.get(self.kind)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_json(cls, document: object) -> StopReason:
        """Return the reason in a document of :meth:`to_json`; raise ValueError for another document."""
        values = known_fields(cls, cast("dict[str, Any]", document)) if isinstance(document, dict) else {}
        if "kind" not in values or values != document:  # it lacks the kind, or has something else
            raise ValueError(f"{document!r} is no reason to stop")
        return cls(**values)


def stop_reason_of(summary: Mapping[str, Any]) -> StopReason | None:
    """Return why a run stopped according to its stored summary; None if that gives no reason."""
    with suppress(ValueError):
        return StopReason.from_json(summary.get("stop_reason"))
    return None


@dataclass(frozen=True)
class Progress:
    """Progress of a run, and the results of its last evaluation.

    ``step`` counts the completed steps. Together with the seed and the batch plan, it determines the next draw.
    """

    step: int = 0
    samples_seen: int = 0
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    test_accuracy: float | None = None  # measured once, at the end of a run with test images
    test_loss: float | None = None
    evaluated_step: int | None = None
    score: float | None = None  # of the last evaluation by --best, the larger the better
    best_score: float | None = None
    best_value: float | None = None  # of the metric of --best; best_score is this, negative if smaller is better
    num_worse: int = 0  # evaluations since the best one, none of which was better
    thresholds: tuple[float, ...] | None = None
    """The probability for each class from which on an image has the class, if an image may have several."""
    network: str | None = None  # the network that was evaluated, by its name in checkpoints
    is_own_network: bool = False  # built by the loop itself, not as the options name it


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """End of an attempt, as its workers report it.

    ``checkpoint`` is the path of the newest checkpoint, relative to the run, and ``error`` the reason of a failure.
    ``accumulate`` is a number of microbatches with which a run that ran out of memory may fit.
    """

    status: EndStatus
    progress: Progress
    checkpoint: str | None = None
    error: str | None = None
    stop_reason: StopReason | None = None  # if the run stopped by itself
    accumulate: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a run; ``summary.json`` holds the same under the same names.

    ``status`` is ``finished`` or ``stopped``; a run that failed raises :class:`TrainingFailed`, whose ``summary`` has
    these fields. ``steps``, ``epochs`` and ``samples_seen`` count over all resumes; ``seconds`` is the time since the
    run was last started or resumed, ``total_seconds`` that of all attempts. Metrics are those of the last evaluation,
    accuracies as fractions; None if there was none.

    Example::

        result = raytrain.train(config)
        print(result.status, result.validation_accuracy, result.checkpoint)
    """

    name: str
    status: str
    steps: int
    epochs: float
    samples_seen: int
    validation_accuracy: float | None
    validation_loss: float | None
    checkpoint: str | None
    run_dir: str
    seconds: float
    num_workers: int
    num_skipped: int = 0
    num_retries: int = 0
    num_decoded_on_cpu: int = 0  # images that GPUs could not decode, with --decoder gpu; each as often as it was used
    test_accuracy: float | None = None  # None if the run has no test images, or has not ended
    test_loss: float | None = None
    best_metric: str | None = None  # that of --best
    best_value: float | None = None  # the best that an evaluation has measured of it
    dollars: float | None = None  # by --price, in all attempts
    gpu_kwh: float | None = None  # energy of the GPUs, in all attempts
    startup_seconds: float | None = None  # the part of ``seconds`` before the workers trained
    total_seconds: float | None = None
    stop_reason: StopReason | None = None
    error: str | None = None
    accumulate: int | None = None  # microbatches with which a run that ran out of memory may fit

    def __repr__(self) -> str:
        """Return the fields that are not None, because a notebook shows this text below a cell."""
        fields = [f"{name}={value!r}" for name, value in vars(self).items() if value is not None]
        return f"{type(self).__name__}({', '.join(fields)})"

    def summary(self) -> dict[str, Any]:
        """Return the result as a dictionary of plain values."""
        return dataclasses.asdict(self) | {"stop_reason": self.stop_reason and self.stop_reason.to_json()}


def result_of(summary: Mapping[str, Any]) -> TrainResult | None:
    """Return the result of a run that has ended, from its stored summary; None if that is missing or damaged."""
    values: dict[str, Any] = known_fields(TrainResult, summary) | {"stop_reason": stop_reason_of(summary)}
    with suppress(TypeError):  # a field is missing
        return TrainResult(**values)
    return None


def successful(result: TrainResult) -> TrainResult:
    """Return ``result``; raise TrainingFailed if the run failed."""
    if result.error is not None:
        raise TrainingFailed(result.error, result.summary())
    return result


def failure_sentence(
    config: TrainConfig,
    reason: str,
    loop: object = None,
    *,
    has_checkpoint: bool = True,
    has_step: bool = True,
    command: str = "train",
) -> str:
    """Return a text that says why a run failed, and how to resume it. It ends without a full stop.

    ``command`` is what has started the run: a command of the shell, or, with a ``loop``, the function of this name in
    ``raytrain``, because no command of the shell can name a loop that was given as a function or is a block of
    :func:`raytrain.attach`. ``has_step``: a step was completed. A run without checkpoint or step has left nothing to
    resume, and its name is free, so it is to be started as before.
    """
    failed = f"Run {config.name!r} failed: {reason.rstrip('.')}."
    if not has_checkpoint and not has_step:
        return (
            f"{failed} It has made no step, and nothing is kept: start it again in the same way once the reason is gone"
        )
    advice = "Its last checkpoint is kept: resume" if has_checkpoint else "It has no checkpoint yet: start it again"
    call = f"raytrain.{command}, the same loop, name={config.name!r} and resume=True"
    how = resume_command(config, command) if loop is None else call
    return f"{failed} {advice} with {how}"


def resume_command(config: TrainConfig, command: str = "train") -> str:
    """Return the shortest command that resumes a run.

    It has flags only for options that a resume does not read from the run's documents: the place of the run, its
    machines, and code of the user's. In a job of ``raytrain submit``, it is the command that sends another job, because
    its reader is not on the cluster.
    """
    code = dict.fromkeys(option for option, _ in own_functions(config))
    names = ["name", "storage", *options_with(Mark.DECIDED_ANEW), *code]
    submitted = shlex.split(os.environ.get(SUBMIT_VARIABLE, ""))
    return shell_command(*submitted, command, *_flags(config, names), "--resume")


def train_command(config: TrainConfig, command: str = "train") -> str:
    """Return the command ``raytrain train RECIPE`` with a flag for each option that differs from the recipe's.

    For a sweep, ``command`` is ``sweep``. ``--resume`` is left out, and options that may hold a secret.
    """
    # Once the images have decided on the options that the recipe auto leaves open, they are plain options, which the
    # recipe custom takes: auto would choose those anew that happen to have its default values.
    if config.recipe == AUTO and not config.open_options:
        config = dataclasses.replace(config, recipe=CUSTOM)
    words = ["raytrain", command, *([config.recipe] if config.recipe in RECIPES else [])]
    hidden = ("resume", *options_with(Mark.SUBCOMMAND), *options_with(Mark.SECRET))
    names = [field.name for field in dataclasses.fields(TrainConfig) if field.name not in hidden]
    return shlex.join([*words, *_flags(config, names)])


def _flags(config: TrainConfig, names: Sequence[str]) -> list[str]:
    """Return the flags, with their values, for those of the options ``names`` that differ from the recipe's.

    Of the recipe auto, options that somebody has given are among them even if they have its default values.
    """
    recipe = RECIPES.get(config.recipe)
    defaults = vars(recipe()) if recipe else {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    closed = set(options_with(Mark.CHOSEN_BY_AUTO)).difference(config.open_options) if config.open_options else ()
    words: list[str] = []
    for name in names:
        option, value = option_name(name), getattr(config, name)
        if value == defaults[name] and name not in closed:
            continue
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words += [f"--{option}", *map(str, as_tuple("none" if value is None else value))]
    return words


def as_tuple(value: object) -> tuple[object, ...]:
    """Return the ``value`` of an option as a tuple: unchanged if it is one, otherwise as the only item."""
    return cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
