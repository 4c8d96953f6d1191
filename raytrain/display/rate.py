"""The loss over a rising learning rate: for the terminal, and as a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from raytrain.display.braille_plot import Plot, Series
from raytrain.display.console import format_duration, key_value_table
from raytrain.display.curves import BLUE, GREY, ORANGE, plain_axes, titled_figure
from raytrain.errors import format_count
from raytrain.experiments.find_rate import RateResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HEIGHT = 10


def rate_page(result: RateResult, picture: str) -> RenderableType:
    """Return the plot, the suggested rate with its reason, and what was trained."""
    # The loss of each step, its average, and a dot at the suggested rate.
    rate, rates = result.suggestion, np.log10(result.rates).tolist()
    curves = {("loss", "dim"): result.losses, ("averaged", "cyan"): result.smoothed}
    lines = [Series(*about, rates, losses.tolist()) for about, losses in curves.items()]
    if rate is not None:
        suggested = float(np.log10(rate))
        loss = float(np.interp(suggested, rates, result.smoothed))
        lines.append(Series(f"at the suggested rate {rate:g}", "yellow", [suggested], [loss], mark="●"))
    first, last = (f"{end:.2g}" for end in result.rates[[0, -1]])
    about = {
        "suggestion": "none" if rate is None else f"--learning-rate {rate:g}",
        "reason": result.reason,
        "ran": _training_text(result),
        "run": f"{result.run.run_dir}, without a checkpoint",
        "picture": picture,
    }
    plot = Plot("loss", lines, _HEIGHT, first_x=first, last_x=f"learning rate {last}")  # over the logarithm
    return Group(plot, Text(), key_value_table(about))


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
