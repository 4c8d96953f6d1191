"""The command line of the benchmarks."""

from __future__ import annotations

import signal
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from tyro.conf import Positional, arg

from tests.benchmarks.report import Report, write
from tests.benchmarks.runner import Bench, served

Name = Literal[
    "ingest",
    "packed",
    "step",
    "startup",
    "memory",
    "plan",
    "switches",
    "watch",
    "parallel",
    "line",
    "network",
    "feed",
    "whole",
    "photographs",
    "reader",
    "augment",
    "finetune",
]
_ALL: tuple[Name, ...] = ("ingest", "packed", "step", "startup", "memory", "plan", "switches", "watch")


def main(
    benchmarks: Positional[tuple[Name, ...]] = _ALL,
    *,
    data: Annotated[Path, arg(help="Folder that holds CIFAR-10 as train/<class>/*.jpg.")],
    scale: Annotated[
        float, arg(help="Fraction of the images, epochs, steps and rounds to use; below 1 for a quick try.")
    ] = 1.0,
    output: Annotated[Path, arg(help="JSON file for the results.")] = Path("runs/benchmarks.json"),
) -> None:
    """Compare the speed and memory of raytrain with its references."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Run the cleanup, which ends all child processes.
    console = Console(log_path=False)
    reports: dict[str, Report] = {}
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as scratch,
        served(data, scale, Path(scratch)) as (url, images, environment),
    ):
        bench = Bench(url, images, environment, Path(scratch), scale, console)
        for name in benchmarks:
            reports[name] = import_module(f"tests.benchmarks.{name}").measure(bench)
            console.print(reports[name].tables())
            write(output, reports, scale)
    console.print(f"Written to {output}", highlight=False)


if __name__ == "__main__":
    tyro.cli(main)
