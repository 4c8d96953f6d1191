"""Commands that begin a project, that train, and the one that stops a run."""

from __future__ import annotations

import logging
import shlex
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, UseAppendAction, arg

import raytrain
from raytrain.cli.command import CommandResult, Flag, RunName, Storage, process_started_at
from raytrain.cli.commands.runs import print_address
from raytrain.cli.tyro_parser import Without
from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.errors import StorageError, UsageError, shell_command
from raytrain.experiments.sweep_options import SweepOptions
from raytrain.monitor.snapshot import Snapshot, View
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import RATE_PICTURE, SWEEP_PICTURE
from raytrain.storage.folder import explain_os_error
from raytrain.storage.open import open_store

RateConfig = Annotated[TrainConfig, Without(Mark.SET_BY_FIND_RATE)]
TrustResumed = Annotated[
    Flag,
    arg(
        help="With --resume or --config: run functions that are named there, such as --loop, even if others have "
        "written them."
    ),
]
Watch = Annotated[Flag, arg(help="Show the run in the browser too; prints the address.")]


def demo(storage: Storage = "./runs", workers: Annotated[int, arg(help="Training workers.")] = 2) -> CommandResult:
    """Draw images of digits, serve them over S3 on this machine, train on them, and test the result.

    Example: raytrain demo
    """
    from raytrain.demo.demo import demo_page, run_demo

    result = run_demo(storage=storage, workers=workers)
    return CommandResult(demo_page(result, storage), result.summary())


def new(
    folder: Annotated[Positional[str], arg(help="Folder to write into; no file there is replaced.")],
) -> CommandResult:
    """Start a project: a training loop of your own, and a script that trains it.

    Example: raytrain new my-project
    """
    if "://" in folder:
        raise UsageError(f"{folder} is not a folder of this machine; give one: a loop travels to a cluster from there.")
    target = Path(folder)
    with as_file(files("raytrain.cli") / "project_template") as template:
        names = sorted(path.name for path in template.iterdir() if path.is_file())
        # If one of the files exists already, none is written.
        existing = [name for name in names if (target / name).exists()]
        if existing:
            raise UsageError(f"{folder} already has a file {existing[0]}; name a new or an empty folder.")
        open_store(folder).check_writable()
        target.mkdir(parents=True, exist_ok=True)
        try:
            for name in names:
                shutil.copyfile(template / name, target / name)
        except OSError as error:
            # As on a full disk. Remove the files written so far, so that the command can be repeated.
            for name in names:
                (target / name).unlink(missing_ok=True)
            raise explain_os_error(error, folder) from error
    command = shell_command("train.py", program="python")
    text = f"Wrote {', '.join(names)} into the folder {folder}; train with: cd {shlex.quote(folder)} && {command}"
    return CommandResult(text, {"folder": folder, "files": names})


def train(config: TrainConfig, trust: TrustResumed = False, watch: Watch = False) -> CommandResult:
    """Train a recipe's network on labelled images.

    Example: raytrain train cifar10 --data s3://bucket/train --name first --epochs 10
    """
    from raytrain.display.result_page import result_page
    from raytrain.runs.documents import run_store
    from raytrain.runs.stored_checkpoints import best_scored_checkpoint

    signals = StopSignals()
    with _views(config, signals, watch) as view:
        result = raytrain.train(config, view=view, signals=signals, started_at=process_started_at())
    best = best_scored_checkpoint(run_store(config.storage, result.name))
    return CommandResult(result_page(config, result, best), result.summary(), exit_code=int(result.status == "failed"))


@contextmanager
def _views(config: TrainConfig, signals: StopSignals, watch: bool) -> Generator[View]:
    """Show a run in the terminal and, with ``watch``, on a page too; give the function that takes its snapshots.

    The page's Stop button asks ``signals`` to stop the run. Prints the address of the page, and when it has ended, the
    command that shows the run again.
    """
    from raytrain.display.terminal import TerminalView, startup_lines

    if not watch:
        with TerminalView() as terminal:
            yield terminal.update
        return

    # The page opens before the run has a name; until then it shows what the command is doing.
    from raytrain.display.page.server import PageServer
    from raytrain.display.page.watched_runs import WatchedRuns

    def show(snapshot: Snapshot) -> None:
        watched.update(snapshot)
        terminal.update(snapshot)

    watched = WatchedRuns(config.storage, [config.name] if config.name else [], signals.request_stop)
    with PageServer(watched) as server, startup_lines(watched.show_phase):
        print_address(server)
        with TerminalView() as terminal:
            yield show
    command = shell_command("watch", *(feed.name for feed in watched.feeds), storage=config.storage)
    print(f"The page has ended with the run. See it again with: {command}", flush=True)


def profile(
    config: TrainConfig,
    output: Annotated[str | None, arg(help="Folder for the traces; by default NAME-profile below --storage.")] = None,
    trust: TrustResumed = False,
) -> CommandResult:
    """Train 15 steps on this machine and say where the time of the last 10 goes. Writes a Chrome trace of each worker.

    With --resume and the --name of a run, it takes that run's options.

    Example: raytrain profile cifar10 --data s3://bucket/train
    """
    from raytrain.diagnostics.profile import profile
    from raytrain.display.diagnostics_tables import profile_page

    # torch writes the traces, and cannot write to a bucket.
    folder = f"{config.name or config.recipe}-profile"
    beside_runs = folder if "://" in config.storage else f"{config.storage.rstrip('/')}/{folder}"
    result = profile(config, output=output or beside_runs)
    return CommandResult(profile_page(result), result.summary())


def look(
    config: TrainConfig,
    limit_s: Annotated[
        float, arg(help="Seconds after which no more files are read; the result says how many were.")
    ] = 30.0,
    output: Annotated[str | None, arg(help="PNG file; by default NAME-look.png below --storage.")] = None,
    write_labels: Annotated[
        str | None, arg(help="With --resume: label file to write, .csv or .parquet, the most suspicious images first.")
    ] = None,
    trust: TrustResumed = False,
) -> CommandResult:
    """Show the images as the network would see them, count the classes, find bad images and duplicates. Trains nothing.

    With --resume and the --name of a run, it also shows the training images whose labels look wrong to that run.

    Example: raytrain look cifar10 --data s3://bucket/train
    """
    from raytrain.display.curves import save_png
    from raytrain.display.look import look_figure, look_page
    from raytrain.storage.open import check_output

    check_output(output, (".png",))  # before minutes of reading
    picture = output or f"{config.storage.rstrip('/')}/{config.name or config.recipe}-look.png"
    result = raytrain.look(config, limit_s=limit_s, write_labels=write_labels)
    try:
        save_png(look_figure(result), picture)
    except StorageError as error:
        # The tables are of use to those who can write nothing here, too.
        if output is not None:
            raise
        logging.getLogger("raytrain").warning("no picture of the images (--output names another place): %s", error)
        picture = None
    return CommandResult(look_page(result, picture), {**result.summary(), "picture": picture})


def find_rate(
    config: RateConfig,
    output: Annotated[str | None, arg(help="PNG file for the plot; by default rate.png in the run's folder.")] = None,
    watch: Watch = False,
) -> CommandResult:
    """Suggest a learning rate: train 100 steps (--max-steps), each at a higher rate, and look where the loss falls.

    Step i of n, counted from 0, has the rate low · (high / low) ^ (i / (n - 1)), from 1e-6 to 10, or as --schedule
    rising:LOW..HIGH says. The run ends earlier if the loss is over four times that of the first step. Nothing is
    evaluated, and no checkpoint is kept. In a loop of your own, the run sets the rates before each optimizer steps.

    Example: raytrain find-rate cifar10 --data s3://bucket/train
    """
    from raytrain.display.curves import save_png
    from raytrain.display.find_rate import rate_figure, rate_page
    from raytrain.storage.open import check_output

    check_output(output, (".png",))  # before it trains; the default name is known only afterwards
    signals = StopSignals()
    with _views(config, signals, watch) as view:
        result = raytrain.find_rate(config, view=view, signals=signals)
    picture = output or f"{result.run.run_dir}/{RATE_PICTURE}"
    save_png(rate_figure(result), picture)
    return CommandResult(rate_page(result, picture), {**result.summary(), "picture": picture})


def sweep(
    config: TrainConfig,
    sweeping: SweepOptions,
    vary: Annotated[
        tuple[tuple[str, ...], ...],
        UseAppendAction,
        arg(help="What differs: learning-rate=0.01,0.1 or, for numbers, weight-decay=log:1e-5..1e-2; workers=1,2,4."),
    ] = (),
    png: Annotated[str | None, arg(help="PNG file for the plot; by default sweep.png in the sweep's folder.")] = None,
    trust: TrustResumed = False,
) -> CommandResult:
    """Train several runs with different options at once, on the same images in memory, and find the best.

    Each trial has --workers workers, 1 by default, and as many train at once as there is room for. The metric of --best
    compares them. With --vary workers=1,2,4 they train one after the other, none is stopped early, and the figures are
    accuracy against time and images/s against workers. Batch size and learning rate may be per worker: 32/worker.

    Example: raytrain sweep cifar10 --data s3://bucket/train --vary learning-rate=log:0.01..1 --trials 20 --sampler tpe
    """
    from raytrain.display.curves import save_png
    from raytrain.display.sweep import SweepTerminalView, sweep_figure, sweep_page
    from raytrain.storage.open import check_output

    check_output(png, (".png",), "--png")
    with SweepTerminalView() as view:
        words = [word for words in vary for word in words]
        result = raytrain.sweep(config, vary=words, **vars(sweeping), view=view.update, trust=trust)
    # A sweep in which no trial was evaluated, and no trial of a comparison of speeds has finished, has nothing to plot.
    has_curves = result.histories or any(trial.evaluations for trial in result.trials)
    picture = (png or f"{result.run_dir}/{SWEEP_PICTURE}") if has_curves else None
    if picture is not None:
        save_png(sweep_figure(result), picture)
    document = {**result.summary(), "picture": picture}
    return CommandResult(sweep_page(result, config, picture), document, exit_code=int(result.status == "failed"))


def stop(
    name: RunName,
    storage: Storage = "./runs",
    address: Annotated[
        str | None, arg(help="Ray cluster of a run, to ask it there (no sweep); by default through --storage alone.")
    ] = None,
) -> CommandResult:
    """Ask a run, or all trials of a sweep, to stop after writing a checkpoint.

    Example: raytrain stop first
    """
    raytrain.stop(name, storage=storage, address=address)
    text = f"Asked {name} to stop. It writes a checkpoint first; --resume continues from there."
    return CommandResult(text, {"name": name, "status": "stop requested"})
