"""The commands: one function each, whose parameters are its arguments and whose docstring is its --help.

Whatever needs Ray, torch or figures is imported inside the functions, because the command line must start at once.
"""

from __future__ import annotations

from collections.abc import Callable

from raytrain.cli.command import CommandResult
from raytrain.cli.commands.cluster import devices, doctor, submit
from raytrain.cli.commands.datasets import fetch_dataset, pack, upload
from raytrain.cli.commands.inference import evaluate, export, predict, serve
from raytrain.cli.commands.runs import audit, compare, export_history, logs, rm, runs, show, tag, track, watch
from raytrain.cli.commands.training import demo, find_rate, look, new, profile, stop, sweep, train
from raytrain.errors import option_name

GROUPS: dict[str, tuple[Callable[..., CommandResult], ...]] = {
    "Begin": (demo, new, fetch_dataset),
    "Train": (look, find_rate, train, stop, sweep, submit),
    "Watch and compare": (watch, runs, show, compare, logs, track, tag, rm, export_history, audit),
    "Use what was trained": (evaluate, predict, serve, export),
    "Data": (upload, pack),
    "Machines": (doctor, devices, profile),
}
"""The commands by what people want to do, as the help shows them."""

COMMANDS = {option_name(command.__name__): command for group in GROUPS.values() for command in group}
