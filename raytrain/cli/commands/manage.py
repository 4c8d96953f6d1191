"""Commands that tag, delete and copy stored runs."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from tyro.conf import FlagCreatePairsOff, Positional, arg

from raytrain.cli.command_result import CommandResult
from raytrain.cli.commands.arguments import RunName, Storage
from raytrain.cli.commands.confirm import confirmed
from raytrain.errors import UsageError

if TYPE_CHECKING:
    from raytrain.runs.snapshot import Snapshot

Runs = Annotated[Positional[tuple[str, ...]], arg(help="Names of runs.")]


def tag(
    run: RunName,
    add: Annotated[tuple[str, ...], arg(help="Tags to add.")] = (),
    remove: Annotated[tuple[str, ...], arg(help="Tags to remove.")] = (),
    note: Annotated[str | None, arg(help="The run's new note; '' removes it.")] = None,
    storage: Storage = "./runs",
) -> CommandResult:
    """Show or change the tags and the note of a run.

    Example: raytrain tag first --add good --note "the learning rate drops too late"
    """
    from raytrain.display.key_value_table import key_value_table
    from raytrain.runs.manage_runs import tag_run

    config = tag_run(storage, run, add, remove, note)
    document = {"name": run, "tags": config.tag, "note": config.note}
    return CommandResult(key_value_table({**document, "tags": " ".join(config.tag) or None}), document)


def rm(
    runs: Runs,
    yes: Annotated[FlagCreatePairsOff[bool], arg(help="Do not ask.")] = False,
    storage: Storage = "./runs",
) -> CommandResult:
    """Delete runs with their checkpoints. A run that trains is not deleted.

    Example: raytrain rm first second
    """
    from raytrain.runs.documents import open_run
    from raytrain.runs.manage_runs import delete_run

    if not runs:
        raise UsageError("raytrain rm takes the names of runs; `raytrain runs` lists them.")
    for name in runs:
        open_run(storage, name)
    if not yes and not confirmed(f"Delete {', '.join(runs)} from {storage}, with all checkpoints?"):
        return CommandResult("Nothing was deleted.", {"deleted": []}, exit_code=1)
    num_files = sum(delete_run(storage, name) for name in runs)
    return CommandResult(f"Deleted {', '.join(runs)}: {num_files:,} files.", {"deleted": runs, "files": num_files})


def export_history(
    run: RunName,
    output: Annotated[str, arg(help="File to write: .parquet or .csv.")],
    storage: Storage = "./runs",
) -> CommandResult:
    """Write a run's metrics as a table, a row for each logged step and each evaluation.

    Example: raytrain export-history first --output first.csv
    """
    from raytrain.data.history_table import export_history as export

    num_rows = export(storage, run, output)
    return CommandResult(f"Wrote {num_rows:,} rows to {output}.", {"run": run, "output": output, "rows": num_rows})


def logs(
    run: RunName,
    storage: Storage = "./runs",
    worker: Annotated[int | None, arg(help="Show what this worker printed, by its rank, counted from 0.")] = None,
    driver: Annotated[
        FlagCreatePairsOff[bool], arg(help="Show what the process that started the run printed and logged.")
    ] = False,
    follow: Annotated[FlagCreatePairsOff[bool], arg(help="Show what comes, too, until the run is over.")] = False,
) -> CommandResult:
    """Show what happened to a run: starts, checkpoints, evaluations, failures; or what its processes printed.

    Example: raytrain logs first --worker 1 --follow
    """
    from raytrain.display.log_page import LogLines
    from raytrain.runs.documents import open_run
    from raytrain.runs.logs import DRIVER, LogReader, worker_log
    from raytrain.runs.run_reader import RunReader, follow_run

    reader, texts = RunReader(open_run(storage, run), run), list[str]()
    lines = LogLines(lambda line: print(line, flush=True) if follow else texts.append(line))
    asked = [DRIVER] * driver + ([] if worker is None else [worker_log(worker)])
    logs = [LogReader(reader.store, whose) for whose in asked]

    def show(snapshot: Snapshot) -> None:
        if not logs:
            lines.events(snapshot)
        for log in logs:
            lines.printed(log.whose.replace("-", " "), log.read())

    if follow:
        with suppress(KeyboardInterrupt):
            follow_run(reader, show)
    else:
        show(reader.snapshot())
    return CommandResult("\n".join(texts) or ("" if follow else "There is nothing yet."), {"run": run, "lines": texts})
