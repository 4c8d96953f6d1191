"""The commands: one function each, whose parameters are its arguments and whose docstring is its --help.

Whatever needs Ray, torch or figures is imported inside the functions, because the command line must start at once.
"""

from __future__ import annotations

from collections.abc import Callable

from raytrain.cli.command import CommandResult
from raytrain.cli.commands.cluster import devices, doctor, submit
from raytrain.cli.commands.datasets import demo, fetch_dataset, new, pack, upload
from raytrain.cli.commands.inference import evaluate, export, predict, serve
from raytrain.cli.commands.runs import audit, compare, export_history, logs, rm, runs, show, tag, track, watch
from raytrain.cli.commands.training import look, profile, stop, study, sweep, train
from raytrain.errors import option_name

COMMANDS: dict[str, Callable[..., CommandResult]] = {
    option_name(command.__name__): command
    for command in (
        *(look, train, study, sweep, submit, stop),
        *(evaluate, predict, serve, export),
        *(watch, runs, show, compare, track, audit),
        *(logs, tag, export_history, rm),
        *(doctor, devices, profile),
        *(fetch_dataset, upload, pack),
        *(new, demo),
    )
}
