"""The demo on one machine: draw digits, upload them to a local S3 server, train on them with two workers, and test."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from raytrain.demo.digits import render_digits
from raytrain.errors import UsageError
from raytrain.storage.tempdir import TemporaryFolder

if TYPE_CHECKING:
    from raytrain.config import TrainConfig
    from raytrain.runs.outcome import TrainResult

IMAGES = "demo-images"
URL = "s3://demo/digits"


def run_demo(storage: str = "./runs", workers: int = 2, images: str = IMAGES) -> TrainResult:
    """Train on digits from a local S3 server, which stops with the run; takes about a minute on two cores.

    The digits stay in the folder ``images``, and the run in the folder ``storage``, as ``demo``, ``demo-2``, …
    Raises UsageError if ``storage`` is not a folder, and what :func:`raytrain.backends.train.train` raises.
    """
    from raytrain.backends.train import train
    from raytrain.datasets.upload import upload
    from raytrain.demo.s3_server import S3Server
    from raytrain.display.terminal import TerminalView

    config = _config(_unused_name(storage), storage, workers)
    console = Console()
    console.print(f"Drawing 5,000 digits into {images}/", highlight=False)
    render_digits(images)
    with TemporaryFolder() as folder:
        buckets = folder / "buckets"
        (buckets / "demo").mkdir(parents=True)
        with S3Server(buckets) as server, _aws_environment(server.environment()):
            upload(images, URL, console)
            with TerminalView(console) as view:
                return train(config, view=view.update)


def summary(result: TrainResult, storage: str = "./runs", images: str = IMAGES) -> RenderableType:
    """Test accuracy, where everything is stored, and commands to try next."""
    command = "uv run raytrain" if "UV" in os.environ else "raytrain"  # set by uv for the programs that it runs
    storage_option = [] if storage == "./runs" else ["--storage", storage]
    accuracy = (
        f"{result.test_accuracy:.2%} of the test images are right"
        if result.test_accuracy is not None
        else "not tested yet"
    )
    commands = (
        ["show", result.name, *storage_option],
        ["evaluate", result.name, "--data", f"{images}/test", *storage_option],
        ["predict", result.name, "--data", f"{images}/test", "--output", "predictions.csv", *storage_option],
    )
    locations = {"images": images, "run": _shortest(result.run_dir), "checkpoint": _shortest(result.checkpoint or "–")}
    return Group(
        Text.assemble(
            (accuracy, "bold"), f" after {result.steps:,} steps in {result.seconds:.0f} s ({result.status})."
        ),
        *(Text(f"{name:<12}{path}") for name, path in locations.items()),
        Text("\nTry next"),
        *(Text(f"  {command} {shlex.join(words)}", style="bold", overflow="fold") for words in commands),
    )


def _shortest(path: str) -> str:
    """``path``, or its relative form if that is shorter."""
    return min(path, os.path.relpath(path), key=len)


def _config(name: str, storage: str, workers: int) -> TrainConfig:
    from raytrain.recipes import digits

    return digits(
        name=name,
        storage=storage,
        data=f"{URL}/train",
        test_data=f"{URL}/test",
        address="local",  # the machines of another cluster could not reach the server
        workers=workers,
        device="cpu",
        epochs=8,
        batch_size=256,
        learning_rate=0.02,
        schedule="cosine",
        warmup_epochs=1,
        translate=2,
    )


def _unused_name(storage: str) -> str:
    """``demo``, or the first of ``demo-2``, ``demo-3``, … that does not exist yet."""
    from raytrain.runs.documents import run_store
    from raytrain.runs.layout import CONFIG

    if "://" in storage:
        raise UsageError(f"--storage is {storage}; the demo stores its run in a folder, such as ./runs.")
    names = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    return next(name for name in names if not run_store(storage, name).exists(CONFIG))


@contextmanager
def _aws_environment(aws: dict[str, str]) -> Iterator[None]:
    """Make ``aws`` the whole AWS configuration of this process, so that a user's keys, profile or role do not
    interfere."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    no_other_source = {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    _replace_aws_variables({**no_other_source, **aws})
    try:
        yield
    finally:
        _replace_aws_variables(before)


def _replace_aws_variables(variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(variables)
