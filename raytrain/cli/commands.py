"""The commands: one function each, whose parameters are its arguments and whose docstring is its --help.

Whatever needs Ray, torch or figures is imported inside the functions, because the command line must start at once.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import FlagCreatePairsOff, Positional, arg

import raytrain
from raytrain.backends.torchrun_environment import is_first_process
from raytrain.cli.parser import RecipeOptions, StudyOptions
from raytrain.errors import option_name

if TYPE_CHECKING:
    from rich.console import RenderableType

Address = Annotated[str | None, arg(help="Ray cluster to use; by default RAY_ADDRESS, else one on this machine.")]
Data = Annotated[str, arg(help="Images: s3://bucket/prefix or a folder.")]
Png = Annotated[str | None, arg(help="PNG file to draw the curves into.")]
RunName = Annotated[Positional[str], arg(help="Name of the run.")]
Storage = Annotated[str, arg(help="Where runs are stored: a folder or s3://bucket/prefix.")]
Trust = Annotated[FlagCreatePairsOff[bool], arg(help="Run the network also if it is code of whoever wrote the run.")]
TrustResumed = Annotated[
    FlagCreatePairsOff[bool],
    arg(help="With --resume: run the stored --model and --loop even if they are code of whoever wrote the run."),
]
Workers = Annotated[int | None, arg(help="Number of worker processes; by default as many as fit.")]


@dataclass(frozen=True)
class Outcome:
    """What a command prints: ``text`` for a person, or ``document`` as a JSON object."""

    text: RenderableType
    document: dict[str, Any]
    exit_code: int = 0


def train(options: RecipeOptions, trust: TrustResumed = False) -> Outcome:
    """Train a recipe's network on labelled images.

    Example: raytrain train cifar10 --data s3://bucket/train --name first --epochs 10
    """
    config = options.checked()
    from rich.console import Console

    from raytrain.display.run_tables import result_page
    from raytrain.display.terminal import TerminalView

    # Under torchrun only one process shows the run. The others must not even take over the terminal.
    console = None if is_first_process() else Console(quiet=True, force_terminal=False)
    with TerminalView(console) as view:
        result = raytrain.train(config, view=view.update)
    return Outcome(result_page(config, result), result.summary(), exit_code=int(result.status == "failed"))


def study(
    options: StudyOptions,
    workers: Annotated[tuple[int, ...], arg(help="Numbers of workers to compare, such as 1 2 4 8.")],
    target_accuracy: Annotated[
        float | None, arg(help="Compare the time to this test accuracy; by default 95 % of the best final accuracy.")
    ] = None,
    output: Annotated[str | None, arg(help="PNG file for the figures; by default NAME.png.")] = None,
) -> Outcome:
    """Train a recipe on several numbers of workers and compare them. If interrupted, the same command continues.

    Example: raytrain study cifar10 --data s3://bucket/train --workers 1 2 4
    """
    from raytrain.display.png import save_png
    from raytrain.display.study_figure import study_figure
    from raytrain.display.study_tables import study_page
    from raytrain.display.terminal import StudyTerminalView
    from raytrain.experiments.study import named, runs_of
    from raytrain.storage.output_file import check_output

    config = named(options.checked())
    picture = output or f"{config.name}.png"
    check_output(picture, (".png",))
    with StudyTerminalView([run.name or "" for run in runs_of(config, workers).values()]) as view:
        result = raytrain.study(config, workers, target_accuracy=target_accuracy, view=view.update)
    if result.histories:
        save_png(study_figure(result), picture)
    document = {**result.summary(), "picture": picture if result.histories else None}
    return Outcome(study_page(result), document)


def sweep(
    options: RecipeOptions,
    vary: Annotated[
        tuple[str, ...], arg(help="What differs: learning-rate=0.01,0.1 or, for numbers, weight-decay=log:1e-5..1e-2.")
    ] = (),
    trials: Annotated[int | None, arg(help="Trials to draw at random; by default every combination of values.")] = None,
    early_stopping: Annotated[
        bool, arg(help="Stop trials that are in the worse half, after an eighth of the epochs at the earliest.")
    ] = True,
    png: Annotated[str | None, arg(help="PNG file for the plot; by default NAME.png.")] = None,
    trust: TrustResumed = False,
) -> Outcome:
    """Train several runs with different options at once, on the same images in memory, and find the best.

    Example: raytrain sweep cifar10 --data s3://bucket/train --vary learning-rate=0.01,0.1 batch-size=128,256
    """
    config = options.checked()
    from raytrain.display.png import save_png
    from raytrain.display.sweep_figure import sweep_figure
    from raytrain.display.sweep_tables import results_table
    from raytrain.display.sweep_terminal import SweepTerminalView
    from raytrain.storage.output_file import check_output

    check_output(png or f"{config.name}.png", (".png",), "--png")
    with SweepTerminalView() as view:
        result = raytrain.sweep(
            config,
            vary=vary,
            trials=trials,
            early_stopping=early_stopping,
            view=view.update,
            trust=trust,
        )
    picture = (png or f"{result.name}.png") if any(trial.evaluations for trial in result.trials) else None
    if picture is not None:
        save_png(sweep_figure(result), picture)
    document = {**result.summary(), "picture": picture}
    return Outcome(results_table(result), document, exit_code=int(result.status == "failed"))


def stop(name: RunName, storage: Storage = "./runs", address: Address = None) -> Outcome:
    """Ask a run, or all trials of a sweep, to stop after writing a checkpoint.

    Example: raytrain stop first
    """
    reason = f"raytrain stop on {socket.gethostname()}"
    raytrain.stop(name, storage=storage, address=address, reason=reason)
    text = f"Asked {name} to stop. It writes a checkpoint first; --resume continues from there."
    return Outcome(text, {"name": name, "status": "stop requested", "reason": reason})


def evaluate(
    run: RunName,
    data: Data,
    output: Annotated[str | None, arg(help="PNG file for the confusion matrix; by default RUN-confusion.png.")] = None,
    storage: Storage = "./runs",
    workers: Workers = None,
    address: Address = None,
    trust: Trust = False,
) -> Outcome:
    """Measure a run's best checkpoint on labelled images, each used exactly once: accuracy, per class, confusions.

    Example: raytrain evaluate first --data s3://bucket/test
    """
    from raytrain.display.confusion_figure import confusion_figure
    from raytrain.display.evaluation_tables import evaluation_page
    from raytrain.display.png import save_png
    from raytrain.storage.output_file import check_output

    picture = output or f"{run}-confusion.png"
    check_output(picture, (".png",))
    result = raytrain.evaluate(run, data, storage=storage, workers=workers, address=address, trust=trust)
    save_png(confusion_figure(result), picture)
    return Outcome(evaluation_page(result, picture), {**result.summary(), "picture": picture})


def predict(
    run: RunName,
    data: Data,
    output: Annotated[str, arg(help="File to write: .parquet or .csv.")],
    storage: Storage = "./runs",
    top_k: Annotated[int, arg(help="Number of most likely classes to write per image.")] = 1,
    workers: Workers = None,
    address: Address = None,
    trust: Trust = False,
) -> Outcome:
    """Classify images, labelled or not, and write one row per image.

    Example: raytrain predict first --data s3://bucket/new --output predictions.csv
    """
    from raytrain.display.key_value_table import key_value_table

    result = raytrain.predict(
        run, data, output, storage=storage, top_k=top_k, workers=workers, address=address, trust=trust
    )
    return Outcome(key_value_table(result.summary()), result.summary())


def export(
    run: RunName,
    output: Annotated[str, arg(help="File to write: .pt2 (torch.export) or .onnx.")],
    data: Annotated[str | None, arg(help="Images to check the file on; by default random pixels.")] = None,
    storage: Storage = "./runs",
    trust: Trust = False,
) -> Outcome:
    """Write a run's network with its preprocessing into one file that works without raytrain, and check the file.

    Example: raytrain export first --output first.onnx
    """
    from raytrain.display.key_value_table import key_value_table

    result = raytrain.export(run, output, data=data, storage=storage, trust=trust)
    return Outcome(key_value_table(result.summary()), result.summary())


def runs(storage: Storage = "./runs") -> Outcome:
    """List the runs.

    Example: raytrain runs --storage s3://bucket/runs
    """
    from raytrain.display.run_json import run_info_json
    from raytrain.display.run_tables import runs_table
    from raytrain.runs.records import list_runs

    listed = list_runs(storage)
    document = {"storage": storage, "runs": [run_info_json(run) for run in listed]}
    return Outcome(runs_table(listed, storage), document)


def show(run: RunName, storage: Storage = "./runs", png: Png = None) -> Outcome:
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
    return Outcome(run_page(record), run_record_json(record))


def audit(run: RunName, storage: Storage = "./runs") -> Outcome:
    """Check that a run trained with --trace used each sample exactly once per epoch, in the planned step.

    Example: raytrain audit first
    """
    from raytrain.display.audit_table import audit_page

    result = raytrain.audit(run, storage=storage)
    return Outcome(audit_page(result), result.summary(), exit_code=0 if result.clean else 1)


def compare(
    runs: Annotated[Positional[tuple[str, ...]], arg(help="Names of two runs or more.")],
    storage: Storage = "./runs",
    png: Png = None,
) -> Outcome:
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
    return Outcome(comparison_page(records), {"runs": [run.summary() for run in compare_records(records)]})


def doctor(
    data: Annotated[str | None, arg(help="Images that every node must be able to read.")] = None,
    storage: Storage = "./runs",
    address: Address = None,
) -> Outcome:
    """Check every node: its hardware and software, and whether it can read the data and write runs.

    Example: raytrain doctor --data s3://bucket/train --storage s3://bucket/runs
    """
    from raytrain.diagnostics.doctor import diagnose
    from raytrain.display.doctor_tables import doctor_page

    report = diagnose(data, storage, address)
    return Outcome(doctor_page(report), report.summary(), exit_code=0 if report.ok else 1)


def new(folder: Annotated[Positional[str], arg(help="Folder to create.")]) -> Outcome:
    """Start a project: a training loop of your own, and a script that trains it.

    Example: raytrain new my-project
    """
    from raytrain.cli.new_project import write_project

    names = write_project(folder)
    text = f"Wrote {', '.join(names)} into {folder}. Train with:  cd {folder} && python train.py"
    return Outcome(text, {"folder": folder, "files": names})


def devices(address: Address = None) -> Outcome:
    """List the devices of every node, with the numbers that --gpus takes.

    Example: raytrain devices
    """
    from raytrain.diagnostics.devices import list_devices
    from raytrain.display.device_tables import devices_page

    found = list_devices(address)
    return Outcome(devices_page(found), found.summary())


def demo(storage: Storage = "./runs", workers: Annotated[int, arg(help="Training workers.")] = 2) -> Outcome:
    """Draw images of digits, serve them over S3 on this machine, train on them, and test the result.

    Example: raytrain demo
    """
    from raytrain.demo.demo import run_demo, summary

    result = run_demo(storage=storage, workers=workers)
    return Outcome(summary(result, storage), result.summary())


def upload(
    folder: Annotated[Positional[str], arg(help="Folder to copy.")],
    url: Annotated[Positional[str], arg(help="Destination: s3://bucket/prefix.")],
) -> Outcome:
    """Copy a folder of images to S3. Images that are there already are not sent again.

    Example: raytrain upload images s3://bucket/images
    """
    from raytrain.datasets.upload import upload as upload_folder
    from raytrain.display.key_value_table import key_value_table

    result = asdict(upload_folder(folder, url))
    return Outcome(key_value_table(result), result)


def pack(
    source: Annotated[Positional[str], arg(help="Images in class folders: s3://bucket/prefix or a folder.")],
    destination: Annotated[Positional[str], arg(help="Destination of the shards: s3://bucket/prefix or a folder.")],
) -> Outcome:
    """Pack images into shards, which are faster to read. --data takes shards as well as images.

    Example: raytrain pack s3://bucket/train s3://bucket/train-shards
    """
    from raytrain.datasets.pack import pack as pack_shards
    from raytrain.display.key_value_table import key_value_table

    result = asdict(pack_shards(source, destination))
    return Outcome(key_value_table(result), result)


def fetch_dataset(
    name: Annotated[Positional[str], arg(help="cifar10 or flowers.")],
    destination: Annotated[Positional[str], arg(help="New folder to write its class folders into.")],
) -> Outcome:
    """Download a public data set.

    Example: raytrain fetch-dataset cifar10 images
    """
    from raytrain.datasets.download import download
    from raytrain.display.key_value_table import key_value_table

    result = asdict(download(name, destination))
    return Outcome(key_value_table(result), result)


COMMANDS: dict[str, Callable[..., Outcome]] = {
    option_name(command.__name__): command
    for command in (
        *(train, study, sweep, stop, evaluate, predict, export, runs, show, compare, audit, doctor, devices),
        *(fetch_dataset, upload, pack, new, demo),
    )
}
