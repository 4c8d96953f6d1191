"""`raytrain.find_rate`, and the loss over a rising learning rate: for the terminal, and as a figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.config.option_calls import takes_config
from raytrain.display.braille_plot import Plot, Series
from raytrain.display.console import format_duration, key_value_table
from raytrain.display.curves import BLUE, GREY, ORANGE, plain_axes, titled_figure
from raytrain.display.terminal import default_view
from raytrain.errors import format_count
from raytrain.experiments.find_rate import RateResult
from raytrain.experiments.find_rate import find_rate as run_find_rate
from raytrain.monitor.snapshot import View
from raytrain.monitor.stop_request import StopSignals

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from raytrain.config import TrainConfig
    from raytrain.training.run import Run

_HEIGHT = 10  # lines of the plot


@takes_config
def find_rate(
    config: TrainConfig,
    *,
    loop: Callable[[Run], None] | None = None,
    view: View | None = None,
    signals: StopSignals | None = None,
) -> RateResult:
    """Train a few steps, each at a higher learning rate, and suggest a rate: the range test of Smith 2015.

    The rate of step i of n, counted from 0, is low · (high / low) ^ (i / (n - 1)). The run ends earlier if the loss is
    over four times the first step's. It evaluates nothing and keeps no checkpoint; its history stays, as any run's.

    Args:
        config: the options of the run. ``max_steps`` is n, by default 100; ``schedule`` may be ``rising:LOW..HIGH``, by
            default from 1e-6 to 10.
        loop: as for :func:`raytrain.train`. A loop of one's own logs ``loss``. The run sets the rates of each optimizer
            before it steps; its groups rise in proportion, and the suggestion is a rate of the first one.
        signals: as for :func:`raytrain.train`.
        view: as for :func:`raytrain.train`: by default, in the main thread, the run is shown while it trains;
            ``lambda snapshot: None`` shows nothing.

    Raises:
        UsageError: as :func:`raytrain.train` does, and if fewer than 20 steps are to be made or have a finite loss.
        StorageError, TrainingFailed: as :func:`raytrain.train` does.

    Example:
        >>> raytrain.find_rate(recipes.cifar10(data="s3://bucket/train")).suggestion
    """
    with default_view(view) as shown:
        return run_find_rate(config, loop=loop, view=shown, signals=signals)


def rate_page(result: RateResult, picture: str) -> RenderableType:
    """Return the plot, the suggested rate with its reason, and what was trained; ``picture`` is the figure's path."""
    # The loss of each step, its average, and a dot at the suggested rate, over the logarithm of the rate.
    rate, log_rates = result.suggestion, np.log10(result.rates).tolist()
    lines = [
        Series("loss", "dim", log_rates, result.losses.tolist()),
        Series("averaged", "cyan", log_rates, result.smoothed.tolist()),
    ]
    if rate is not None:
        log_rate = float(np.log10(rate))
        loss = float(np.interp(log_rate, log_rates, result.smoothed))
        lines.append(Series(f"at the suggested rate {rate:g}", "yellow", [log_rate], [loss], mark="●"))
    first, last = (f"{end:.2g}" for end in result.rates[[0, -1]])
    plot = Plot("loss", lines, _HEIGHT, first_x=first, last_x=f"learning rate {last}")

    facts = {
        "suggestion": "none" if rate is None else f"--learning-rate {rate:g}",
        "reason": result.reason,
        "ran": _training_text(result),
        "run": f"{result.run.run_dir}, without a checkpoint",
        "picture": picture,
    }
    return Group(plot, Text(), key_value_table(facts))


def _training_text(result: RateResult) -> str:
    """Return one line about the run: steps, images, precision, workers and time."""
    run, config = result.run, result.config
    steps = f"{run.steps:,} of {config.max_steps:,} steps of {format_count(config.batch_size, 'image')}"
    workers = f"{format_count(run.num_workers, 'worker')} ({config.device})"
    time = format_duration(run.seconds)
    return f"{steps}, {run.samples_seen:,} images in all, in {config.precision}, on {workers}, in {time}"


def rate_figure(result: RateResult) -> Figure:
    """Return a figure of each step's loss over its learning rate, averaged, and the suggested rate."""
    title = f"{result.run.name}    {_training_text(result)}"
    figure = titled_figure(title, 9, 4.5, fontsize=9, weight="normal", color=GREY)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.plot(result.rates, result.losses, color="#8fb7d9", linewidth=1, label="each step")
    axes.plot(result.rates, result.smoothed, color=BLUE, linewidth=2, label="averaged over neighbouring steps")
    if result.suggestion is not None:
        axes.axvline(result.suggestion, color=ORANGE, linewidth=2, label=f"suggested: {result.suggestion:g}")
    plain_axes(axes)
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    return figure
