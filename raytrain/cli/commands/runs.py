"""Commands that show runs, or send them to where others look at them."""

from __future__ import annotations

from typing import Annotated

from tyro.conf import Positional, arg

import raytrain
from raytrain.cli.command_result import CommandResult
from raytrain.cli.commands.arguments import RunName, Storage
from raytrain.runs.select_runs import SortKey

Png = Annotated[str | None, arg(help="PNG file to draw the curves into.")]


def runs(
    storage: Storage = "./runs",
    filter: Annotated[
        tuple[str, ...], arg(help="Show those that match all of these: status=finished, tag=WORD, learning-rate=0.1.")
    ] = (),
    sort: Annotated[SortKey, arg(help="heartbeat, step and accuracy: the largest first.")] = "heartbeat",
) -> CommandResult:
    """List the runs.

    Example: raytrain runs --filter recipe=cifar10 status=finished --sort accuracy
    """
    from raytrain.display.run_json import run_info_json
    from raytrain.display.run_tables import runs_table
    from raytrain.runs.records import list_runs
    from raytrain.runs.select_runs import select_runs

    listed = select_runs(list_runs(storage), filter, sort)
    document = {"storage": storage, "runs": [run_info_json(run) for run in listed]}
    return CommandResult(runs_table(listed, storage, filtered=bool(filter)), document)


def show(run: RunName, storage: Storage = "./runs", png: Png = None) -> CommandResult:
    """Show a run: options, status, curves, checkpoints, skipped images.

    Example: raytrain show first --png first.png
    """
    from raytrain.display.curve_figures import curve_figure
    from raytrain.display.png import save_png
    from raytrain.display.run_json import run_record_json
    from raytrain.display.run_tables import run_page
    from raytrain.runs.records import read_run

    record = read_run(storage, run)
    if png is not None:
        save_png(curve_figure(record), png)
    return CommandResult(run_page(record), run_record_json(record))


def compare(
    runs: Annotated[Positional[tuple[str, ...]], arg(help="Names of two runs or more.")],
    storage: Storage = "./runs",
    png: Png = None,
) -> CommandResult:
    """Show runs side by side: the options that differ, their progress, their results and their curves.

    Example: raytrain compare first second
    """
    from raytrain.display.comparison_table import comparison_page
    from raytrain.display.curve_figures import comparison_figure
    from raytrain.display.png import save_png
    from raytrain.experiments.compare import compare_records, read_runs

    records = read_runs(runs, storage)
    if png is not None:
        save_png(comparison_figure(records), png)
    return CommandResult(comparison_page(records), {"runs": [run.summary() for run in compare_records(records)]})


def track(
    run: RunName,
    track: Annotated[tuple[str, ...], arg(help="tensorboard, mlflow, wandb, prometheus, or package.module:Class.")],
    storage: Storage = "./runs",
) -> CommandResult:
    """Send the metrics of a run that is over, and its last checkpoint, to trackers, as far as they lack them.

    Example: raytrain track first --track mlflow
    """
    from raytrain.display.key_value_table import key_value_table

    result = raytrain.track(run, track, storage=storage)
    return CommandResult(key_value_table(result.summary()), result.summary())


def audit(run: RunName, storage: Storage = "./runs") -> CommandResult:
    """Check that a run trained with --trace used each sample exactly once per epoch, in the planned step.

    Example: raytrain audit first
    """
    from raytrain.display.audit_table import audit_page

    result = raytrain.audit(run, storage=storage)
    return CommandResult(audit_page(result), result.summary(), exit_code=0 if result.clean else 1)
