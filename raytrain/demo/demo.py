"""The whole way on one machine: digits are drawn, put into an S3 server, trained on by two workers and tested."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.text import Text

from raytrain.demo.digits import render
from raytrain.errors import UsageError
from raytrain.storage.tempdir import TemporaryFolder

if TYPE_CHECKING:
    from raytrain.backends.train import TrainResult
    from raytrain.config import TrainConfig

IMAGES = "demo-images"
URL = "s3://demo/digits"


def demo(storage: str = "./runs", workers: int = 2, images: str = IMAGES) -> TrainResult:
    """Train on digits from an S3 server of this machine's own, which ends with the run; takes about a minute on two cores.

    The digits stay in the folder ``images`` and the run in the folder ``storage``, as ``demo``, ``demo-2``, …
    Raises UsageError where ``storage`` is not a folder, and what :func:`raytrain.backends.train.train` raises.
    """
    from raytrain.backends.train import train
    from raytrain.datasets.upload import upload
    from raytrain.demo.s3_server import serve
    from raytrain.display.terminal import TerminalView

    config = _config(_free_name(storage), storage, workers)
    console = Console()
    console.print(f"Drawing 5,000 digits into {images}/", highlight=False)
    folder = render(images)
    with TemporaryFolder() as scratch:
        buckets = scratch / "buckets"
        (buckets / "demo").mkdir(parents=True)
        with serve(buckets) as server, _only(server.environment()):
            upload(str(folder), URL, console)
            with TerminalView(console) as view:
                return train(config, view=view.update)


def outcome(result: TrainResult, storage: str = "./runs", images: str = IMAGES) -> RenderableType:
    """What came of it, where everything is, and what to try next."""
    command = "uv run raytrain" if "UV" in os.environ else "raytrain"  # uv says so to what it runs
    place = [] if storage == "./runs" else ["--storage", storage]
    accuracy = f"{result.test_accuracy:.2%} of the test images are right" if result.test_accuracy is not None else "not tested yet"
    tries = (
        ["show", result.name, *place],
        ["evaluate", result.name, "--data", f"{images}/test", *place],
        ["predict", result.name, "--data", f"{images}/test", "--output", "predictions.csv", *place],
    )
    where = {"images": images, "run": _near(result.run_dir), "checkpoint": _near(result.checkpoint or "–")}
    return Group(
        Text.assemble((accuracy, "bold"), f" after {result.steps:,} steps in {result.seconds:.0f} s ({result.status})."),
        *(Text(f"{name:<12}{place}") for name, place in where.items()),
        Text("\nTry next"),
        *(Text(f"  {command} {shlex.join(words)}", style="bold", overflow="fold") for words in tries),
    )


def _near(path: str) -> str:
    """The shorter of a path's two names, from here and from the root."""
    return min(path, os.path.relpath(path), key=len)


def _config(name: str, storage: str, workers: int) -> TrainConfig:
    from raytrain.recipes import digits

    return digits(
        name=name,
        storage=storage,
        data=f"{URL}/train",
        test_data=f"{URL}/test",
        address="local",  # another cluster's machines could not reach the server
        workers=workers,
        device="cpu",
        epochs=8,
        batch_size=256,
        learning_rate=0.02,
        schedule="cosine",
        warmup_epochs=1,
        translate=2,
    )


def _free_name(storage: str) -> str:
    """``demo``, or the first of ``demo-2``, ``demo-3``, … that is not taken."""
    from raytrain.runs.records import CONFIG, run_store

    if "://" in storage:
        raise UsageError(f"--storage is {storage}; the demo keeps its run in a folder, such as ./runs.")
    names = itertools.chain(["demo"], (f"demo-{number}" for number in itertools.count(2)))
    return next(name for name in names if not run_store(storage, name).exists(CONFIG))


@contextmanager
def _only(aws: dict[str, str]) -> Iterator[None]:
    """This process with ``aws`` as its whole AWS configuration: a user's own keys, profile or role must not mix with it."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    nobody = {"AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull, "AWS_EC2_METADATA_DISABLED": "true"}
    _replace_aws({**nobody, **aws})
    try:
        yield
    finally:
        _replace_aws(before)


def _replace_aws(variables: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(variables)
