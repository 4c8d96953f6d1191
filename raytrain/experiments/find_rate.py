"""One short run whose learning rate rises, and the rate that its losses suggest."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.optimisation import Schedule
from raytrain.config.option_marks import Mark
from raytrain.config.options import options_with
from raytrain.errors import UsageError, format_count
from raytrain.launch.train import train
from raytrain.monitor.snapshot import View
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import new_name, read_resolved_config, run_store
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.metrics_history import read_metrics
from raytrain.runs.outcome import StopReason, TrainResult

if TYPE_CHECKING:
    from raytrain.training.run import Run

_NUM_STEPS, _FEWEST_STEPS = 100, 20
_MANY_EPOCHS = 1000  # more than the steps of --max-steps need, so that these end the run
_NEIGHBOURS_FRACTION = 1 / 20  # of all steps: as many on each side of a step are averaged with it
_DIVISOR = 10  # the suggestion is the rate of the lowest loss, divided by it
_LEAST_FALL = 0.05  # by which fraction of the loss of the first steps the loss must fall for a suggestion
_STOPS_BY_A_PERSON = ("signal", "command", "page", "caller")
"""Kinds of stops that end the run too early; a run that ended since its loss exploded is complete."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RateResult:
    """The learning rates and losses of a run with a rising rate, and the rate that they suggest.

    ``rates``, ``losses`` and ``smoothed`` (the losses averaged over neighbouring steps) are (num_steps,) each.
    ``suggestion`` is None if the losses suggest no rate; ``reason`` says why this rate, or why none.
    """

    run: TrainResult
    config: ResolvedConfig
    rates: Floats
    losses: Floats
    smoothed: Floats
    suggestion: float | None
    reason: str

    def summary(self) -> dict[str, Any]:
        """Return the run's summary, its batch size and precision, the suggestion and the curves, as plain values."""
        options = {"batch_size": self.config.batch_size, "precision": self.config.precision}
        curves = {name: getattr(self, name).tolist() for name in ("rates", "losses", "smoothed")}
        return {**self.run.summary(), **options, "suggestion": self.suggestion, "reason": self.reason, **curves}


def find_rate(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    signals: StopSignals | None = None,
) -> RateResult:
    """Train one short run with a rising learning rate; return its losses, and the rate that they suggest.

    The arguments are those of :func:`raytrain.find_rate`. ``view`` is called about twice a second with the run's
    :class:`Snapshot`; without one, nothing is shown. Raises what :func:`raytrain.train` raises, and UsageError if
    ``max_steps`` is below 20, or fewer than 20 steps have a finite loss.
    """
    short = _config_of_range_test(config)
    result = train(short, loop=loop, view=view, signals=signals)

    # The history has a row for each step. Rows whose loss is infinite or NaN, as at high rates, do not count.
    store = run_store(short.storage, result.name)
    rates, losses = losses_over_rates(read_metrics(store))
    if len(losses) < _FEWEST_STEPS:
        progress = f"{result.steps} of {short.max_steps} steps"
        problem, advice = (
            f"has {format_count(len(losses), 'step')} with a loss",
            "a loop of your own logs run.log(loss=…)",
        )
        if _is_cut_short(result.stop_reason):
            problem, advice = f"was stopped after {progress}", "let it run to its end"
        elif result.status == "finished" and result.steps != short.max_steps:
            problem, advice = f"ended after {progress}, since its loss had exploded", "give a larger --max-steps"
        needed = f"{_FEWEST_STEPS} are needed at least to suggest a learning rate"
        raise UsageError(f"Run {result.name!r} {problem}, and {needed}; {advice}.")
    averaged = smooth(losses)
    suggestion = suggest(rates, averaged, result.stop_reason)
    return RateResult(result, read_resolved_config(store), rates, losses, averaged, *suggestion)


def stored_suggestion(rows: Sequence[MetricRow], stop_reason: StopReason | None = None) -> tuple[float | None, str]:
    """Return the learning rate that the history of a run with a rising rate suggests, or None, and the reason.

    ``rows`` are the run's history, and ``stop_reason`` says why it stopped, if it did.
    """
    rates, losses = losses_over_rates(rows)
    if len(losses) < _FEWEST_STEPS:
        return (
            None,
            f"the run has {format_count(len(losses), 'step')} with a loss, and {_FEWEST_STEPS} are needed at least",
        )
    return suggest(rates, smooth(losses), stop_reason)


def losses_over_rates(rows: Sequence[MetricRow]) -> tuple[Floats, Floats]:
    """Return the learning rate and the loss of each training step whose loss is finite, (num_steps,) each.

    A step without a loss, whose value becomes NaN here, is left out as well.
    """
    steps = [row for row in rows if row.kind == "step" and row.learning_rate]
    rates, losses = (np.array([row.value(name) for row in steps], np.float64) for name in ("learning_rate", "loss"))
    finite = np.isfinite(losses)
    return rates[finite], losses[finite]


def _config_of_range_test(config: TrainConfig) -> TrainConfig:
    """Return the options of a run whose rate rises over its steps, without evaluations, warm-up or early stopping.

    Unless ``config`` gives them, the name is that of the recipe with the time, the rate rises from 1e-6 to 10, and
    there are 100 steps. Raises UsageError if ``max_steps`` is below 20.
    """
    schedule = config.schedule if config.is_range_test else "rising"
    num_steps = config.max_steps or _NUM_STEPS
    if num_steps < _FEWEST_STEPS:
        raise UsageError(f"--max-steps is {num_steps}; a learning rate is found in {_FEWEST_STEPS} steps at least.")
    # The recipe auto would decide on the options that are left open, and replace the values that are set here.
    open_options = tuple(name for name in config.open_options if name not in options_with(Mark.SET_BY_FIND_RATE))
    return dataclasses.replace(
        config,
        name=config.name or new_name(f"{config.recipe}-rate"),
        schedule=schedule,
        learning_rate=Schedule.parse(schedule).rates[1],  # the highest rate is the peak, as in any schedule
        warmup_epochs=0.0,
        head_epochs=0,
        open_options=open_options,
        max_steps=num_steps,
        epochs=_MANY_EPOCHS,
        log_every=1,
        evaluate_every=0,
        until=None,
        patience=None,
        resume=False,
    )


def smooth(losses: Floats) -> Floats:
    """Return each of ``losses``, (num_steps,), averaged with its neighbours: a twentieth of all steps on each side."""
    # The sum over the window is divided by the number of losses in it, which is smaller at both ends.
    window = np.ones(2 * max(1, round(len(losses) * _NEIGHBOURS_FRACTION)) + 1)
    return np.convolve(losses, window, "same") / np.convolve(np.ones(len(losses)), window, "same")


def suggest(rates: Floats, smoothed: Floats, stop_reason: StopReason | None = None) -> tuple[float | None, str]:
    """Return the suggested learning rate, or None, and the reason; ``rates`` and ``smoothed`` losses are (num_steps,).

    There is a suggestion only if the loss fell by 5 % at least, and rose again. If it did not, the reason says what to
    change, or, if the ``stop_reason`` is that a person stopped the run, to let it run to its end.
    """
    # At the lowest loss the rate is on the verge of being too high; a tenth of it is the usual choice.
    lowest = int(smoothed.argmin())
    rate, loss, first = (float(value) for value in (rates[lowest], smoothed[lowest], smoothed[0]))
    is_flat = loss > first - _LEAST_FALL * abs(first)  # abs, since the loss of a user's loop may be negative
    still_falls = lowest == len(rates) - 1
    if (is_flat or still_falls) and _is_cut_short(stop_reason):
        return (
            None,
            f"it was stopped at a rate of {rates[-1]:.2g}, before the loss showed enough; let it run to its end",
        )
    if is_flat:
        return None, (
            f"no rate from {rates[0]:.2g} to {rates[-1]:.2g} made the loss of the first steps, {first:.4g}, "
            f"{_LEAST_FALL:.0%} smaller; look at the images and labels, or give more steps with --max-steps"
        )
    if still_falls:
        return None, (
            f"the loss still falls at the highest rate, {rate:.2g}; try --schedule rising:{rates[0]:.2g}.."
            f"{100 * rate:.2g}"
        )
    suggestion = float(f"{rate / _DIVISOR:.2g}")
    return suggestion, (
        f"the loss, averaged over neighbouring steps, is lowest at {rate:.2g} ({loss:.4g}, after {first:.4g} in the "
        f"first steps); the suggestion is that rate / {_DIVISOR}"
    )


def _is_cut_short(stop_reason: StopReason | None) -> bool:
    """Return True if a person stopped the run before its end, so that its history may show too little."""
    return stop_reason is not None and stop_reason.kind in _STOPS_BY_A_PERSON
