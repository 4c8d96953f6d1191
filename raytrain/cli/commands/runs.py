"""Commands that show, watch, tag, delete and copy stored runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

import raytrain
from raytrain.cli.command import CommandResult, Flag, RunName, Storage, ask
from raytrain.errors import UsageError, format_count, shell_command
from raytrain.runs.redact import one_line

if TYPE_CHECKING:
    from raytrain.display.page.server import PageServer
    from raytrain.monitor.run_reader import RunReader
    from raytrain.monitor.snapshot import Snapshot

Png = Annotated[str | None, arg(help="PNG file to draw the curves into.")]


def runs(
    storage: Storage = "./runs",
    filter: Annotated[
        tuple[str, ...], arg(help="Show those that match all of these: status=finished, tag=WORD, learning-rate=0.1.")
    ] = (),
    sort: Annotated[
        Literal["heartbeat", "name", "recipe", "status", "step", "best", "accuracy", "time", "cost"],
        arg(
            help="The largest numbers first. heartbeat: when a run was last active; best: the best value by each run's "
            "--best; accuracy: that of its last evaluation."
        ),
    ] = "heartbeat",
) -> CommandResult:
    """List the runs.

    Example: raytrain runs --filter recipe=cifar10 status=finished --sort best
    """
    from raytrain.display.run_tables import run_info_json, runs_table
    from raytrain.experiments.compare import sort_runs, with_measured
    from raytrain.runs.records import list_runs, select_runs

    listed = sort_runs(with_measured(select_runs(list_runs(storage), filter), storage), sort)
    document = {"storage": storage, "runs": [run_info_json(run) for run in listed]}
    return CommandResult(runs_table(listed, storage, filtered=bool(filter), sorted_by=sort), document)


def show(run: RunName, storage: Storage = "./runs", png: Png = None) -> CommandResult:
    """Show a run: options, status, curves, checkpoints, skipped images.

    Example: raytrain show first --png first.png
    """
    from raytrain.display.curves import curve_figure, save_png
    from raytrain.display.run_tables import run_page, run_record_json
    from raytrain.runs.records import read_run
    from raytrain.storage.open import check_output

    check_output(png, (".png",), "--png")
    record = read_run(storage, run)
    if png is not None:
        save_png(curve_figure(record), png)
    return CommandResult(run_page(record), run_record_json(record))


def compare(
    runs: Annotated[Positional[tuple[str, ...]], arg(help="Names of runs, or of a sweep.")],
    storage: Storage = "./runs",
    png: Png = None,
) -> CommandResult:
    """Show runs side by side: the options that differ, their progress, their results and their curves.

    Example: raytrain compare first second
    """
    from raytrain.display.curves import comparison_figure, save_png
    from raytrain.display.run_tables import comparison_page
    from raytrain.experiments.compare import compare_records, read_runs
    from raytrain.storage.open import check_output

    check_output(png, (".png",), "--png")
    records = read_runs(runs, storage)
    if png is not None:
        save_png(comparison_figure(records), png)
    return CommandResult(comparison_page(records), {"runs": [asdict(run) for run in compare_records(records)]})


def track(
    run: RunName,
    track: Annotated[tuple[str, ...], arg(help="tensorboard, mlflow, wandb, prometheus, or package.module:Class.")],
    storage: Storage = "./runs",
) -> CommandResult:
    """Send the metrics of a run that is over, and its last checkpoint, to trackers, as far as they lack them.

    A sweep stands for its trials, which the trackers show together.

    Example: raytrain track first --track mlflow
    """
    return CommandResult(None, asdict(raytrain.track(run, track, storage=storage)))


def audit(run: RunName, storage: Storage = "./runs") -> CommandResult:
    """Check that a run trained with --trace used each sample exactly once per epoch, in the planned step.

    Example: raytrain audit first
    """
    from raytrain.display.diagnostics_tables import audit_page

    result = raytrain.audit(run, storage=storage)
    return CommandResult(audit_page(result), result.summary(), exit_code=0 if result.clean else 1)


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
    from raytrain.display.console import key_value_table
    from raytrain.runs.records import tag_run

    config = tag_run(storage, run, add, remove, note)
    document = {"name": run, "tags": config.tag, "note": config.note}
    shown = {"name": run, "tags": " ".join(config.tag) or "none", "note": config.note or "none"}
    return CommandResult(key_value_table(shown), document)


def rm(
    runs: Annotated[Positional[tuple[str, ...]], arg(help="Names of runs.")],
    yes: Annotated[Flag, arg(help="Do not ask.")] = False,
    storage: Storage = "./runs",
) -> CommandResult:
    """Delete runs with their checkpoints. A run that trains is not deleted.

    Example: raytrain rm first second
    """
    from raytrain.experiments.trials import begun_trials
    from raytrain.runs.documents import open_run
    from raytrain.runs.records import delete_run

    if not runs:
        raise UsageError(f"raytrain rm takes the names of runs; `{shell_command('runs', storage=storage)}` lists them.")
    runs = tuple(dict.fromkeys(runs))  # a name that is given twice is deleted once
    for name in runs:
        open_run(storage, name)  # raises UsageError if there is none, before anything is deleted
    if not yes:
        question = one_line(f"Delete {', '.join(runs)} from {storage}, with all checkpoints?")
        if not sys.stdin.isatty():
            raise UsageError(f"{question} Nobody can be asked here; add --yes to answer with yes.")
        if ask(f"{question} [y/N] ") not in ("y", "yes"):
            return CommandResult("Nothing was deleted.", {"deleted": []}, exit_code=1)

    # The trials are looked up before their sweep is deleted, whose documents name them.
    trials = [trial for name in runs for trial in begun_trials(storage, name) if trial not in runs]
    num_files, left = 0, list[str]()
    for name in runs:
        num_deleted, paths_left = delete_run(storage, name)
        num_files += num_deleted
        left += [f"{name}/{path}" for path in paths_left]
    text = f"Deleted {', '.join(runs)}: {format_count(num_files, 'file')}."
    if left:
        subject = "file that no run wrote is" if len(left) == 1 else "files that no run wrote are"
        text += f" {len(left):,} {subject} left in {storage}, such as {left[0]}."
    if trials:
        command = shell_command("rm", *trials, storage=storage)
        text += f" The trials of a sweep are runs, and stay: {command} deletes them."
    return CommandResult(text, {"deleted": runs, "files": num_files, "left": left})


def export_history(
    run: RunName, output: Annotated[str, arg(help="File to write: .parquet or .csv.")], storage: Storage = "./runs"
) -> CommandResult:
    """Write a run's metrics as a table, a row for each logged step and each evaluation.

    Example: raytrain export-history first --output first.csv
    """
    from raytrain.data.table_file import export_history as export

    num_rows = export(storage, run, output)
    return CommandResult(
        f"Wrote {format_count(num_rows, 'row')} to {output}.", {"run": run, "output": output, "rows": num_rows}
    )


def logs(
    run: RunName,
    storage: Storage = "./runs",
    worker: Annotated[int | None, arg(help="Show what this worker printed, by its rank, counted from 0.")] = None,
    driver: Annotated[Flag, arg(help="Show what the process that started the run printed and logged.")] = False,
    follow: Annotated[Flag, arg(help="Go on with new lines until the run is over.")] = False,
) -> CommandResult:
    """Show the events of a run: starts, checkpoints, evaluations, failures; or the lines that its processes printed.

    Example: raytrain logs first --worker 1 --follow
    """
    from raytrain.display.log_lines import LogLines
    from raytrain.experiments.trials import begun_trials
    from raytrain.monitor.run_reader import RunReader, follow_run
    from raytrain.runs.documents import SWEEP, open_run
    from raytrain.runs.logs import DRIVER, LogReader, worker_log

    store = open_run(storage, run)
    if store.exists(SWEEP):
        trials = begun_trials(storage, run)
        hint = f"such as `{shell_command('logs', trials[0], storage=storage)}`" if trials else "none of which has begun"
        raise UsageError(f"{run!r} is a sweep; its trials have the logs, {hint}.")
    reader = RunReader(store, run)
    if worker is not None:
        _check_worker(reader, worker)

    # With --follow, lines are printed as they come; otherwise all together as the text of the result.
    printed_lines: list[str] = []

    def write(line: str) -> None:
        printed_lines.append(line)
        if follow:
            print(line, flush=True)

    lines = LogLines(write)
    # The processes whose output is shown; without --driver and --worker, the events of the run are.
    processes = [DRIVER] * driver + ([] if worker is None else [worker_log(worker)])
    log_readers = [LogReader(reader.store, process) for process in processes]

    def show(snapshot: Snapshot) -> None:
        if not log_readers:
            lines.print_events(snapshot)
        for log in log_readers:
            lines.print_process(log.process.replace("-", " "), log.read(), grows=follow and not snapshot.over)

    if follow:
        with suppress(KeyboardInterrupt):
            follow_run(reader, show)
    else:
        show(reader.snapshot())
    text = "" if follow else "\n".join(printed_lines)
    if not printed_lines:
        text = _why_no_lines(reader.snapshot(), processes, follow=follow)
    return CommandResult(text, {"run": run, "lines": printed_lines})


def _check_worker(reader: RunReader, worker: int) -> None:
    """Raise UsageError if the run that ``reader`` reads has no such worker, and never had one."""
    from raytrain.runs.logs import LogReader, worker_log

    # An earlier attempt may have had more workers: a rank with a log is allowed.
    num_workers = reader.snapshot().num_workers
    if worker < 0 or (worker >= num_workers > 0 and not LogReader(reader.store, worker_log(worker)).read()):
        workers = format_count(num_workers, "worker")
        raise UsageError(f"--worker is {worker}, and run {reader.name!r} has {workers}, counted from 0.")


def _why_no_lines(snapshot: Snapshot, processes: Sequence[str], *, follow: bool) -> str:
    """Return the sentence in place of lines: the ``processes``, if any are shown, have printed none, or none yet."""
    if processes and snapshot.over and snapshot.num_workers:
        titles = [process.replace("-", " ") for process in processes]
        have = "has" if len(titles) == 1 else "have"
        return f"{' and '.join(titles)} {have} printed nothing, and the run is over."
    return "There is nothing yet." if follow or snapshot.over else "There is nothing yet; --follow waits for it."


def watch(
    runs: Annotated[Positional[tuple[str, ...]], arg(help="Names of runs or sweeps; all by default.")] = (),
    storage: Storage = "./runs",
    port: Annotated[int | None, arg(help="Port on this machine; by default 8266, or any that is free.")] = None,
    terminal: Annotated[Flag, arg(help="Show one run in this terminal, until it is over.")] = False,
) -> CommandResult:
    """Show runs in the browser, live or when they are over, until Ctrl-C. The page can stop them.

    Without names, the page begins with a list of all runs.

    Example: raytrain watch first
    """
    if terminal:
        from raytrain.display.terminal import TerminalView
        from raytrain.monitor.run_reader import RunReader, follow_run
        from raytrain.runs.documents import open_single_run

        if len(runs) != 1:
            raise UsageError("--terminal shows one run; without it, the page shows several.")
        reader = RunReader(open_single_run(storage, runs[0]).fail_fast(), runs[0])
        with TerminalView(hint="Ctrl-C ends the view, not the run") as view, suppress(KeyboardInterrupt):
            follow_run(reader, view.update)
        return CommandResult("", {"storage": storage, "runs": runs})

    from raytrain.display.page.server import PageServer
    from raytrain.display.page.watched_runs import HomeRuns, StoredRuns
    from raytrain.experiments.trials import names_of
    from raytrain.runs.documents import run_names
    from raytrain.storage.open import open_store

    # The name of a sweep stands for its trials; without names, the page begins with the list of all runs.
    if not runs:
        run_names(open_store(storage))  # raises StorageError if the storage cannot be listed
    names = [name for run in runs for name in names_of(storage, run)]
    with StoredRuns(storage, names) if runs else HomeRuns(storage) as watched, PageServer(watched, port) as server:
        print_address(server)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
    return CommandResult("", {"storage": storage, "runs": names})


def print_address(server: PageServer) -> None:
    """Print the address of the page, which contains its key: whoever knows it can watch and stop the runs."""
    print(f"Watch it at {server.url}", flush=True)
