"""The command line: one command a function; torch and ray are imported inside the commands."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from tyro.conf import Positional, arg

from raytrain.cli.parser import RecipeOptions, StudyOptions, parse
from raytrain.config import TrainConfig
from raytrain.errors import RaytrainError
from raytrain.runs.history import plain

if TYPE_CHECKING:
    from rich.console import RenderableType

Address = Annotated[str | None, arg(help="Ray cluster to use; by default RAY_ADDRESS, else one on this machine.")]
Data = Annotated[str, arg(help="Images: s3://bucket/prefix or a folder.")]
Png = Annotated[str | None, arg(help="PNG file to draw the curves into, too.")]
Run = Annotated[Positional[str], arg(help="Name of the run.")]
Storage = Annotated[str, arg(help="Where runs are kept: a folder or s3://bucket/prefix.")]
Workers = Annotated[int | None, arg(help="Processes that share the work; by default as many as fit.")]


@dataclass(frozen=True)
class Outcome:
    """What a command has to say: to a person, and as a JSON object."""

    text: RenderableType
    document: dict[str, Any]
    exit_code: int = 0


def train(options: RecipeOptions) -> Outcome:
    """Train a recipe's network on labelled images."""
    config = TrainConfig(**vars(options))
    from raytrain.backends import train
    from raytrain.display import tables
    from raytrain.display.terminal import TerminalView

    with TerminalView() as view:
        result = train.train(config, view=view.update).summary()
    return Outcome(tables.train_outcome(config, result), result, exit_code=int(result["status"] == "failed"))


def study(
    options: StudyOptions,
    workers: Annotated[tuple[int, ...], arg(help="Numbers of workers to try, such as 1 2 4 8.")],
    target_accuracy: Annotated[float | None, arg(help="Test accuracy whose time is told; by default 95 % of the best final one.")] = None,
    output: Annotated[str | None, arg(help="PNG file for the figures; by default NAME.png.")] = None,
) -> Outcome:
    """Train a recipe on several numbers of workers and compare them; the same command goes on where it was interrupted."""
    from raytrain.display import figures, study_tables
    from raytrain.experiments import study
    from raytrain.storage.output_file import check_output

    config = study.named(TrainConfig(**vars(options)))
    picture = output or f"{config.name}.png"
    check_output(picture, (".png",))
    result = study.study(config, workers, target_accuracy=target_accuracy)
    if result.histories:
        figures.save(figures.scaling(result), picture)
    return Outcome(study_tables.study_page(result), {**result.summary(), "picture": picture if result.histories else None})


def sweep(
    options: RecipeOptions,
    vary: Annotated[tuple[str, ...], arg(help="What differs: learning-rate=0.01,0.1 or, for numbers, weight-decay=log:1e-5..1e-2.")] = (),
    trials: Annotated[int | None, arg(help="Points to draw at random; by default every combination of values.")] = None,
    early_stopping: Annotated[
        bool, arg(help="Stop a trial that is not among the better half after an eighth of the epochs, or later.")
    ] = True,
    png: Annotated[str | None, arg(help="PNG file for the plot; by default NAME.png.")] = None,
) -> Outcome:
    """Train several runs that differ in some options, at once, on the same images in memory, and tell which is best."""
    config = TrainConfig(**vars(options))
    from raytrain.display import figures, sweep_figure, sweep_terminal
    from raytrain.experiments.sweep import sweep as sweeping
    from raytrain.storage.output_file import check_output

    check_output(png or f"{config.name}.png", (".png",), "--png")
    with sweep_terminal.SweepTerminalView() as live:
        result = sweeping.sweep(config, vary=vary, trials=trials, early_stopping=early_stopping, view=live.update)
    drawn = (png or f"{result.name}.png") if any(trial.evaluations for trial in result.trials) else None
    if drawn is not None:
        figures.save(sweep_figure.picture(result), drawn)
    document = {**result.summary(), "picture": drawn}
    return Outcome(sweep_terminal.results_table(result), document, exit_code=int(result.status == "failed"))


def stop(name: Run, storage: Storage = "./runs", address: Address = None) -> Outcome:
    """Ask a run, or all of a sweep, to stop; a checkpoint is kept."""
    from raytrain.backends import train

    reason = f"raytrain stop on {socket.gethostname()}"
    train.stop(name, storage=storage, address=address, reason=reason)
    text = f"Asked {name} to stop; it writes a checkpoint first, and --resume goes on from there."
    return Outcome(text, {"name": name, "status": "stop requested", "reason": reason})


def evaluate(
    run: Run,
    data: Data,
    output: Annotated[str | None, arg(help="PNG file for the confusion matrix; by default RUN-confusion.png.")] = None,
    storage: Storage = "./runs",
    workers: Workers = None,
    address: Address = None,
) -> Outcome:
    """Measure a run's best checkpoint on labelled images, each exactly once: accuracy, classes, confusions."""
    from raytrain.display import figures, tables
    from raytrain.inference import predict
    from raytrain.storage.output_file import check_output

    picture = output or f"{run}-confusion.png"
    check_output(picture, (".png",))
    result = {**predict.evaluate(run, data, storage=storage, workers=workers, address=address), "picture": picture}
    figures.save(figures.confusion(result), picture)
    return Outcome(tables.evaluation(result), result)


def predict(
    run: Run,
    data: Data,
    output: Annotated[str, arg(help="File to write: .parquet or .csv.")],
    storage: Storage = "./runs",
    top_k: Annotated[int, arg(help="Classes to give for each image, the likeliest first.")] = 1,
    workers: Workers = None,
    address: Address = None,
) -> Outcome:
    """Classify images, labelled or not, and write a row for each."""
    from raytrain.display import tables
    from raytrain.inference import predict

    result = predict.predict(run, data, output, storage=storage, top_k=top_k, workers=workers, address=address)
    return Outcome(tables.facts(result), result)


def export(
    run: Run,
    output: Annotated[str, arg(help="File to write: .pt2 (torch.export) or .onnx.")],
    data: Annotated[str | None, arg(help="Images to check the file on; by default random pixels.")] = None,
    storage: Storage = "./runs",
) -> Outcome:
    """Write a run's network with its preprocessing into one file that runs without raytrain, and check it."""
    from raytrain.display import tables
    from raytrain.inference import export

    result = export.export(run, output, data=data, storage=storage)
    return Outcome(tables.facts(result), result)


def runs(storage: Storage = "./runs") -> Outcome:
    """List the runs."""
    from raytrain.display import tables
    from raytrain.runs.records import list_runs

    listed = list_runs(storage)
    return Outcome(tables.runs_table(listed, storage), {"storage": storage, "runs": [tables.run_line(run) for run in listed]})


def show(run: Run, storage: Storage = "./runs", png: Png = None) -> Outcome:
    """Show a run: options, status, curves, checkpoints, skipped images."""
    from raytrain.display import figures, tables
    from raytrain.runs.records import read_run

    record = read_run(storage, run)
    if png is not None:
        figures.save(figures.curves(record), png)
    return Outcome(tables.run_page(record), tables.run_document(record))


def audit(run: Run, storage: Storage = "./runs") -> Outcome:
    """Check that a run made with --trace used each sample exactly once an epoch, in the step that its plan says."""
    from raytrain.diagnostics.audit import audit as audit_run
    from raytrain.display import tables

    result = audit_run(run, storage=storage)
    return Outcome(tables.audit_page(result), result, exit_code=0 if result["clean"] else 1)


def compare(
    runs: Annotated[Positional[tuple[str, ...]], arg(help="Names of two runs or more.")], storage: Storage = "./runs", png: Png = None
) -> Outcome:
    """Show runs side by side: the options that differ, how far and how well each went, and the curves of all."""
    from raytrain.display import figures, tables
    from raytrain.experiments import compare

    records = compare.read_runs(runs, storage)
    if png is not None:
        figures.save(figures.comparison(records), png)
    return Outcome(tables.comparison(records), {"runs": compare.comparison(records)})


def doctor(
    data: Annotated[str | None, arg(help="Images that every node should be able to read.")] = None,
    storage: Storage = "./runs",
    address: Address = None,
) -> Outcome:
    """Look at every node: what it has, and whether it can read the data and write the runs."""
    from raytrain.diagnostics.doctor import diagnose

    found = diagnose(data, storage, address)
    return Outcome(found, found.summary(), exit_code=0 if found.ok else 1)


def new(folder: Annotated[Positional[str], arg(help="Folder to make.")]) -> Outcome:
    """Begin a project: a training loop of your own, and a script that trains it."""
    from raytrain.cli.new_project import new as write_project

    names = write_project(folder)
    text = f"Wrote {', '.join(names)} into {folder}. Train with:  cd {folder} && python train.py"
    return Outcome(text, {"folder": folder, "files": names})


def devices(address: Address = None) -> Outcome:
    """List the devices of every node, by the numbers that --gpus takes."""
    from raytrain.diagnostics.devices import list_devices

    found = list_devices(address)
    return Outcome(found, found.summary())


def demo(storage: Storage = "./runs", workers: Annotated[int, arg(help="Training workers.")] = 2) -> Outcome:
    """Draw digits, serve them over S3 on this machine, train on them, and test."""
    from raytrain.demo.demo import run_demo, summary

    result = run_demo(storage=storage, workers=workers)
    return Outcome(summary(result, storage), result.summary())


def upload(
    folder: Annotated[Positional[str], arg(help="Folder to copy.")],
    url: Annotated[Positional[str], arg(help="Where to: s3://bucket/prefix.")],
) -> Outcome:
    """Copy a folder of images to S3; what is there already is not sent again."""
    from raytrain.datasets import upload
    from raytrain.display import tables

    result = asdict(upload.upload(folder, url))
    return Outcome(tables.facts(result), result)


def pack(
    source: Annotated[Positional[str], arg(help="Images in class folders: s3://bucket/prefix or a folder.")],
    destination: Annotated[Positional[str], arg(help="Where the shards go: s3://bucket/prefix or a folder.")],
) -> Outcome:
    """Pack images into shards, which are read faster; --data takes them as it takes images."""
    from raytrain.datasets import pack
    from raytrain.display import tables

    result = asdict(pack.pack(source, destination))
    return Outcome(tables.facts(result), result)


def fetch_dataset(
    name: Annotated[Positional[str], arg(help="cifar10 or flowers.")],
    destination: Annotated[Positional[str], arg(help="New folder for its class folders.")],
) -> Outcome:
    """Download a public data set."""
    from raytrain.datasets import download
    from raytrain.display import tables

    result = asdict(download.download(name, destination))
    return Outcome(tables.facts(result), result)


COMMANDS: dict[str, Callable[..., Outcome]] = {
    command.__name__.replace("_", "-"): command
    for command in (
        *(train, study, sweep, stop, evaluate, predict, export, runs, show, compare, audit, doctor, devices),
        *(fetch_dataset, upload, pack, new, demo),
    )
}


def run() -> NoReturn:
    """Run this process's command line, and end it at once: not when threads that import Ray and torch have done so."""
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; gives the exit code: 0 done, 1 failed, 2 bad usage or input, 130 aborted."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    sys.path.insert(0, os.getcwd())  # as for `python -m`: --model may name a module of the folder that one is in
    debug = "--debug" in argv or os.environ.get("RAYTRAIN_DEBUG", "0") not in ("", "0")
    try:
        outcome = parse(argv, COMMANDS)()
    except KeyboardInterrupt:
        print("raytrain: aborted.", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _fail(error, argv)
    _tell(outcome, argv)
    return outcome.exit_code


def _unexpected(error: Exception) -> str:
    """One sentence for an error that nobody foresaw; its traceback goes to a file, for the run may have taken hours."""
    with tempfile.NamedTemporaryFile("w", prefix="raytrain-", suffix=".log", delete=False) as log:
        traceback.print_exception(error, file=log)
    said = (str(error).strip().splitlines() or ["no message"])[-1]
    return f"unexpected {type(error).__name__}: {said} (the traceback is in {log.name}; --debug shows it here)"


def _tell(outcome: Outcome, argv: Sequence[str]) -> None:
    if "--json" in argv:
        print(json.dumps(plain(outcome.document), default=str), flush=True)
        return
    from rich.console import Console

    Console().print(outcome.text, highlight=False)


def _fail(error: Exception, argv: Sequence[str]) -> int:
    """Say what went wrong in one sentence, on standard error and, where asked for, as JSON with what is known of the run."""
    sentence = str(error) if isinstance(error, RaytrainError) else _unexpected(error)
    print(f"raytrain: {sentence}", file=sys.stderr, flush=True)
    if "--json" in argv:
        print(json.dumps({**getattr(error, "summary", {}), "status": "failed", "error": sentence}), flush=True)
    return getattr(error, "exit_code", 1)
