"""`raytrain.sweep`, and a sweep as people see it: a live table or lines while it trains, then results and a figure."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from raytrain.config.named_functions import names_own_function
from raytrain.config.option_calls import takes_config
from raytrain.display.console import UNKNOWN, format_optional, metric_label
from raytrain.display.curves import GREY, ORANGE, plain_axes, titled_figure, whole_ticks
from raytrain.display.event_text import stop_text
from raytrain.display.notebook import CellOutput
from raytrain.display.result_page import command_line, resume_heading, try_next
from raytrain.display.run_tables import Column, column_if_known, rows_table, status_text
from raytrain.display.scaling import scaling_figure, scaling_plots, scaling_sentences, scaling_table
from raytrain.display.terminal import LiveView, startup_lines
from raytrain.errors import UsageError, format_dollars, option_name, shell_command
from raytrain.experiments.sweep import sweep as run_sweep
from raytrain.experiments.sweep_options import Pruner, Sampler, SweepOptions
from raytrain.experiments.sweep_plan import PLAN
from raytrain.experiments.sweep_result import SweepResult, SweepSnapshot
from raytrain.experiments.sweep_session import SweepView
from raytrain.experiments.trial_results import WAITING, TrialResult
from raytrain.experiments.trials import as_typed, shown
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import CONFIG, read_config, run_store
from raytrain.runs.outcome import StopReason, resume_command
from raytrain.runs.redact import one_line
from raytrain.runs.stored_checkpoints import best_checkpoint, newest_checkpoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from typing_extensions import Self

    from raytrain.config import TrainConfig
    from raytrain.training.run import Run

_ACTIVE = ("running", "starting")
_STATUSES = (*_ACTIVE, "finished", "stopped", "failed", WAITING)
_HINT = "Ctrl-C stops all with checkpoints, twice aborts"
_CELL_HINT = "interrupt the kernel to stop all with checkpoints"
_LINES_BESIDE_TRIALS = 8  # of the live table: headings, the plan, counts and the hint
_BEST, _OTHER = ORANGE, "#8fb7d9"  # colours of the best trial, and of the others
_PANELS_PER_ROW = 3  # of the plots over options
_FEW_VALUES = 5  # up to this many values, each one is labelled
_DECADES = 1.0  # values that span more powers of ten have a logarithmic axis
_FIGURE_INCHES = 9.0  # the width of the figure
_DIGIT_INCHES = 0.09  # the width of a digit below an axis


@takes_config
def sweep(
    config: TrainConfig,
    *,
    vary: str | Sequence[str] = (),
    trials: int | None = None,
    sampler: Sampler | None = None,
    pruner: Pruner | None = None,
    folds: int | None = None,
    early_stopping: bool = True,
    target: float | None = None,
    notify_trials: bool = False,
    loop: Callable[[Run], None] | None = None,
    view: SweepView | None = None,
    signals: StopSignals | None = None,
    trust: bool = False,
) -> SweepResult:
    """Train several runs that differ in the options of ``vary``, several at once, on the same images in memory.

    Args:
        config: the options that all trials share. ``name`` is the sweep's: its trials are the runs NAME-00, NAME-01, …
            ``workers`` is how many workers each trial trains on, 1 by default; as many trials train at once as there
            are GPUs for, or without GPUs as leave room for reading data. ``best`` is the metric that trials are
            compared by. With ``resume``, trials that were stopped or failed are resumed.
        vary: ``option=VALUE,VALUE``, and for numbers ``option=LOW..HIGH`` or ``option=log:LOW..HIGH``; not needed with
            ``resume``. With ``workers=1,2,4``, one trial trains after the other, each on that many workers, none is
            stopped early, and the result has their ``scaling``.
        trials: how many points to choose; by default every combination of values.
        sampler: how points are chosen: ``random`` (the default with ``trials``), ``grid`` (the default without), or by
            a sampler of Optuna's, ``tpe``, ``cmaes``, ``gp`` or ``qmc``, which chooses by the results so far whenever a
            trial may start.
        pruner: which of Optuna's pruners stops trials early, in place of ``early_stopping``: ``median``,
            ``successive-halving`` or ``hyperband``.
        folds: cross-validation: train each point ``folds`` times, each with another part of the training images for
            validation (in equal shares of each class, and whole groups with ``group_by``), one after the other on
            ``workers`` workers (1 if it is auto); the result has mean and deviation.
        early_stopping: stop a trial whose value is worse than the median of the trials before it after an eighth, a
            quarter or half of the epochs.
        target: the value of the metric of ``best`` on the validation images to which trials on different numbers of
            workers are timed; by default a value 5 % worse than the best final one.
        notify_trials: have ``notify`` report how each trial ends, too, and not only how the sweep does.
        loop: a training loop to use instead of the built-in one or the one that ``config`` names.
        view: called about twice a second with how the ``trials`` stand, and the ``dollars`` that they have cost. By
            default, in the main thread, they are shown as by ``raytrain sweep``: as a table in a terminal or below a
            notebook's cell, else as lines; ``lambda snapshot: None`` shows nothing.
        signals: where stop requests come from; by default Ctrl-C, SIGTERM and SIGHUP, if this is the main thread.
        trust: with ``resume``, run also a network that is a function of the sweep's author, and that neither ``config``
            nor ``vary`` names.

    Raises:
        UsageError, StorageError: a setting or an input is wrong; nothing was started.
        TrainingFailed: the images cannot be used; a trial that fails by itself does not end the sweep.

    Example::

        config = recipes.cifar10(data="s3://bucket/train")
        raytrain.sweep(config, vary="learning-rate=0.01,0.1,1").best
        raytrain.sweep(config, vary="learning-rate=log:0.01..1", trials=20, sampler="tpe", pruner="median").best
        raytrain.sweep(config, vary="workers=1,2,4").scaling
    """
    options = SweepOptions(
        trials=trials,
        sampler=sampler,
        pruner=pruner,
        folds=folds,
        early_stopping=early_stopping,
        target=target,
        notify_trials=notify_trials,
    )
    # Only a sweep in the main thread is shown: a terminal has room for one table, and a program that starts sweeps in
    # other threads shows them itself.
    is_main = threading.current_thread() is threading.main_thread()
    terminal = SweepTerminalView() if view is None and is_main else None
    with terminal or nullcontext():
        update = view if terminal is None else terminal.update
        result = run_sweep(config, vary, options, loop=loop, view=update, signals=signals, trust=trust)
        if terminal is not None:
            terminal.finish(result)
    return result


class SweepTerminalView(LiveView):
    """Shows one sweep: ``with SweepTerminalView() as view``, then call ``view.update(…)`` twice a second.

    Args:
        console: where to print, by default standard output. If it is a terminal, the view is a live table; otherwise,
            it is a plain line whenever something changes.

    Example: ``with SweepTerminalView() as view: sweep(config, vary="seed=0,1", view=view.update)``
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console, "reading the data, starting the trials …")
        # The status, number of evaluations and value of each trial when its last line was printed, by its name.
        self._printed: dict[str, tuple[str, int, float | None]] = {}
        self._plan = ""  # the line of the sweep that says how many trials there are, and on which devices
        self._hint = _CELL_HINT if isinstance(self._live, CellOutput) else _HINT

    def __enter__(self) -> Self:
        super().__enter__()
        self._opened.enter_context(startup_lines(self._keep_plan, PLAN))
        return self

    def _keep_plan(self, line: str) -> None:
        self._plan = line

    def update(self, snapshot: SweepSnapshot) -> None:
        """Show the state of all trials."""
        if self._live is not None:
            num_rows = self._console.height - _LINES_BESIDE_TRIALS
            self._draw(live_table(snapshot, num_rows, self._plan, self._hint), keep=False)
            return

        # Plain lines: one for each trial that has changed since its last one.
        for trial in snapshot.trials:
            state = (trial.status, len(trial.evaluations), trial.value)
            if trial.status != WAITING and self._printed.get(trial.name) != state:
                self._printed[trial.name] = state
                self._print(_trial_line(trial))

    def finish(self, result: SweepResult) -> None:
        """Leave the table with all trials, from the best to the worst, on the screen when the view ends.

        Plain lines need no table: nothing is printed.
        """
        if self._live is not None:
            snapshot = SweepSnapshot(trials=tuple(result.trials), dollars=result.dollars)
            self._draw(live_table(snapshot, len(result.trials), self._plan), keep=True)


def _trial_line(trial: TrialResult) -> str:
    """Return the state of a trial as one line of plain text."""
    parts = [trial.name, as_typed(trial.values), trial.status]
    if trial.num_epochs:
        parts.append(f"epoch {trial.epoch}/{trial.num_epochs}")
    if trial.loss is not None:
        parts.append(f"loss {format_optional(trial.loss, '.3f')}")
    if trial.value is not None:
        parts.append(f"best validation {metric_label(trial.metric)} {format_optional(trial.value, '.4f')}")
    if trial.images_per_s is not None and trial.status == "running":
        parts.append(f"{trial.images_per_s:,.0f} images/s")
    if trial.dollars is not None:
        parts.append(format_dollars(trial.dollars))
    if trial.reason:
        parts.append(f"({_reason_text(trial)})")
    return "  ".join(parts)


def live_table(snapshot: SweepSnapshot, num_rows: int, plan: str = "", hint: str = "") -> RenderableType:
    """Return a table of at most ``num_rows`` trials, the sweep's ``plan``, and how many trials have each status.

    ``hint`` says how to stop the sweep. With --price, the table has the dollars of each trial, and the counts those of
    the whole sweep.
    """
    # If there is no room for all: first trials that train, then ended ones, then waiting ones, each from the best on.
    # Those that are shown stay in their order.
    trials = snapshot.trials
    order_of_status = {**dict.fromkeys(_ACTIVE, 0), WAITING: 2}
    by_importance = sorted(trials, key=lambda trial: (order_of_status.get(trial.status, 1), -(trial.score or 0.0)))
    names = {trial.name for trial in by_importance[: max(1, num_rows)]}
    shown_trials = [trial for trial in trials if trial.name in names]

    best_score = max((trial.score for trial in trials if trial.score is not None), default=None)
    speeds = [trial.images_per_s if trial.status == "running" else None for trial in shown_trials]
    table = rows_table(
        *_trial_columns(shown_trials),
        ("epoch", [f"{trial.epoch}/{trial.num_epochs}" if trial.num_epochs else UNKNOWN for trial in shown_trials]),
        ("loss", [format_optional(trial.loss, ".3f") for trial in shown_trials]),
        (_heading(trials), [_value_text(trial, best_score) for trial in shown_trials]),
        ("images/s", [format_optional(speed, ",.0f") for speed in speeds]),
        *column_if_known("cost", [trial.dollars for trial in shown_trials], format_dollars),
    )

    # Below the table, on one line each: the plan, the counts, and how to stop.
    statuses = [trial.status for trial in trials]
    counts = ", ".join(f"{statuses.count(status)} {status}" for status in _STATUSES if status in statuses)
    if snapshot.dollars is not None:
        counts += f"; {format_dollars(snapshot.dollars)} for the whole sweep"
    lines = (line for line in (plan, counts, hint) if line)
    return Group(table, *(Text(f" {line}", style="dim", no_wrap=True, overflow="ellipsis") for line in lines))


def sweep_page(result: SweepResult, config: TrainConfig, picture: str | None = None) -> RenderableType:
    """Return the trials from the best to the worst, why some failed or stopped, and commands for what to do next.

    Between them stand what more workers gain, if their number varies, and the means over the folds of a
    cross-validation. ``config`` are the options that all trials share, and ``picture`` is the path of the figure.
    """
    # The trials.
    trials = result.trials
    best_score = max((trial.score for trial in trials if trial.score is not None), default=None)
    table = rows_table(
        *_trial_columns(trials),
        ("evaluated\nto epoch", [str(trial.evaluations[-1][0]) if trial.evaluations else UNKNOWN for trial in trials]),
        (_heading(trials), [_value_text(trial, best_score) for trial in trials]),
        ("steps", [f"{trial.steps:,}" for trial in trials]),
        ("seconds", [f"{trial.seconds:,.0f}" for trial in trials]),
        *column_if_known("cost", [trial.dollars for trial in trials], format_dollars),
    )
    parts: list[RenderableType] = [table]

    # What more workers gain.
    if result.histories:
        parts += [scaling_table(result), scaling_plots(result), Text(), *scaling_sentences(result)]

    # A cross-validation: a line for each combination of the other options.
    for folds in result.folds:
        choice = f"{as_typed(folds.values)}: " if folds.values else ""
        if folds.mean is None:
            measured = "no fold was measured"
        else:
            deviation = "" if folds.deviation is None else f" ± {folds.deviation:.4f} (standard deviation)"
            mean = f"{metric_label(folds.metric)} {folds.mean:.4f}{deviation}"
            measured = f"{mean} over {folds.num_measured} of {folds.num_folds} folds"
        parts.append(Text.assemble(choice, (measured, "bold")))

    # The cost, why trials ended early, and the command that continues them.
    if result.dollars is not None:
        parts.append(Text(f"cost of the whole sweep {format_dollars(result.dollars)}"))
    parts += [
        Text.assemble(f"{trial.name} ", status_text(trial.status), f": {_reason_text(trial)}")
        for trial in trials
        if trial.reason
    ]
    if result.status == "stopped" or any(trial.status not in ("finished", "stopped") for trial in trials):
        command = resume_command(dataclasses.replace(config, name=result.name), "sweep")
        heading = resume_heading("Resume the stopped and failed trials", result.stop_reason)
        parts += [Text(heading), command_line(command)]

    # The file with all curves.
    parts.append(Text())
    if picture is not None:
        parts.append(Text(f"All curves are in the picture {one_line(picture)}. They are also shown by"))
        parts.append(command_line(shell_command("compare", result.name, storage=config.storage)))

    # The best trial, which is the first one, its checkpoints, and commands that use it. As on the page of a single run,
    # the commands trust the user's own code, which the user has just run.
    if result.best is not None:
        store = run_store(config.storage, result.best)
        values_of_best = f": {as_typed(trials[0].values)}"
        parts.append(Text.assemble("The best is ", (result.best, "bold"), values_of_best))
        if checkpoint := best_checkpoint(store):
            newest = newest_checkpoint(store)
            last = "it is also its last one" if newest == checkpoint else f"its last one is {newest}"
            parts.append(Text(f"Its best checkpoint is {checkpoint}, which the commands below use; {last}."))
        of_best = read_config(store) if store.exists(CONFIG) else None
        own_code = any(map(names_own_function, (of_best.model, of_best.loop) if of_best else ()))
        parts.append(try_next(result.best, config.storage, trust=own_code))
    return Group(*parts)


def _trial_columns(trials: Sequence[TrialResult]) -> list[Column]:
    """Return the columns of the trials' names, varied options and status; the names of options may be wrapped."""
    names = list(trials[0].values) if trials else []
    headings = [Text(option_name(name).replace("-", "-\n"), overflow="fold") for name in names]
    return [
        ("trial", [trial.name for trial in trials]),
        *(
            (heading, [shown(trial.values[name]) for trial in trials])
            for heading, name in zip(headings, names, strict=True)
        ),
        ("status", [status_text(trial.status) for trial in trials]),
    ]


def _heading(trials: Sequence[TrialResult]) -> str:
    """Return the heading of the trials' best values: ``best``, and the metric by which they are compared."""
    return "best\n" + metric_label(trials[0].metric if trials else "accuracy")


def _value_text(trial: TrialResult, best_score: float | None) -> Text:
    """Return the best value of a trial, in bold if it is the best of all trials."""
    is_best = trial.score is not None and trial.score == best_score
    return Text(format_optional(trial.value, ".4f"), style="bold green" if is_best else "")


def _reason_text(trial: TrialResult) -> str:
    """Return why a trial failed or stopped, without its name, which is shown already."""
    reason = stop_text(trial.reason) if isinstance(trial.reason, StopReason) else trial.reason or ""
    return one_line(reason.removeprefix(f"Run {trial.name!r} failed: "))


def sweep_figure(result: SweepResult) -> Figure:
    """Return a figure with the curves of all trials, the best in orange, and a plot for each varied option.

    If --vary has workers, the figure shows accuracy over time and images/s over workers, for the finished trials. Raise
    UsageError if no trial was evaluated, so that there is nothing to draw.
    """
    if result.histories:
        return scaling_figure(result)
    trials = [trial for trial in result.trials if trial.evaluations]
    if not trials:
        raise UsageError(
            f"No trial of sweep {result.name!r} was evaluated, so there is nothing to draw; trials are evaluated every "
            "--evaluate-every epochs."
        )

    # The curves above are 4.5 inches high; below them are the plots of the options, in rows 3 inches high.
    names = list(trials[0].values)
    num_rows = math.ceil(len(names) / _PANELS_PER_ROW)
    best = [f"    best: {trial.name}, {as_typed(trial.values)}" for trial in trials if trial.name == result.best]
    figure = titled_figure("".join([result.name, *best]), _FIGURE_INCHES, 4.5 + 3 * num_rows)
    subfigures: Any = figure.subfigures(2, 1, height_ratios=(4.5, 3 * num_rows))
    above, below = subfigures
    _draw_curves(above.add_subplot(), trials, result.best)
    for number, name in enumerate(names, start=1):
        panel = below.add_subplot(num_rows, min(len(names), _PANELS_PER_ROW), number)
        _draw_values_by_option(panel, trials, name, result.best)
    return figure


def _draw_curves(axes: Axes, trials: Sequence[TrialResult], best: str | None) -> None:
    """Draw the metric of the sweep over the epochs, a line for each trial with the trial's number at its end."""
    for trial in reversed(trials):  # the best is drawn last, on top of the others
        epochs, values = zip(*trial.evaluations, strict=True)  # (num_evaluations,) each
        color, width = (_BEST, 2.0) if trial.name == best else (_OTHER, 1.2)
        axes.plot(epochs, values, marker="o", markersize=3.5, color=color, linewidth=width)
        axes.annotate(
            trial.name.rpartition("-")[2],
            (epochs[-1], values[-1]),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
            color=_BEST if trial.name == best else GREY,
        )
    axes.set_xlabel("epoch")
    whole_ticks(axes)
    plain_axes(axes)
    axes.set_ylabel(f"validation {metric_label(trials[0].metric)}")


def _draw_values_by_option(axes: Axes, trials: Sequence[TrialResult], name: str, best: str | None) -> None:
    """Draw the best value of each trial over its value of one option."""
    values = [trial.values[name] for trial in trials]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    xs: Sequence[float]
    if len(numbers) == len(values):
        # Numbers: on a logarithmic axis if they span more than a decade, else each with a tick if they are few and far
        # enough from each other for their labels.
        xs = numbers
        ticks = sorted(set(numbers))
        labels = [shown(number) for number in ticks]
        inches = _FIGURE_INCHES * axes.get_position().width
        gap = min((after - before for before, after in pairwise(ticks)), default=math.inf)
        label_fraction = (max(map(len, labels)) + 1) * _DIGIT_INCHES / inches
        if min(numbers) > 0 and math.log10(max(numbers) / min(numbers)) > _DECADES:
            axes.set_xscale("log")
        elif len(ticks) <= _FEW_VALUES and gap >= label_fraction * (ticks[-1] - ticks[0]):
            axes.set_xticks(ticks, labels)
        elif all(isinstance(number, int) for number in numbers):
            whole_ticks(axes)
    else:
        # Other values: a tick for each different value, in the order of the trials.
        different = list(dict.fromkeys(map(shown, values)))
        xs = [different.index(shown(value)) for value in values]
        axes.set_xticks(range(len(different)), list(map(one_line, different)), parse_math=False)
        axes.set_xlim(-0.5, len(different) - 0.5)
    colours = [_BEST if trial.name == best else _OTHER for trial in trials]
    axes.scatter(xs, [trial.value or 0.0 for trial in trials], c=colours, s=28, zorder=3)
    axes.set_xlabel(option_name(name))
    plain_axes(axes)
    axes.set_ylabel(f"best validation {metric_label(trials[0].metric)}")
