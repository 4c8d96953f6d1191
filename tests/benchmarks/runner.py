"""Run the sides of a comparison in turn, each in processes of its own, with one S3 server."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from raytrain.demo.s3_server import S3Server
from raytrain.errors import UsageError
from tests.benchmarks.process_tree import end_tree

_TIMEOUT_S = 900.0
_NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
"""With it, each process compiles all that it imports: torch takes twice as long, torch._dynamo three times."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Side:
    """One side of a comparison: a function at the top of a module, and its arguments as JSON values.

    If the function has a parameter ``folder``, it gets a new empty folder.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """The input of every benchmark."""

    url: str
    """URL of the training images."""
    images: Path
    """Folder with the same images."""
    environment: dict[str, str]
    scratch: Path
    scale: float
    console: Console

    def scaled(self, number: int, least: int = 1) -> int:
        """Return ``number`` times the scale, at least ``least``."""
        return max(least, math.ceil(number * self.scale))

    def alternate(
        self, sides: dict[str, Side], rounds: int, figure: Callable[[Any], str] = str
    ) -> dict[str, list[Any]]:
        """Run all sides one after the other in each round, and return the results of each side.

        Each result is printed at once, formatted by ``figure``.
        """
        results: dict[str, list[Any]] = {name: [] for name in sides}
        for number in range(rounds):
            for name, side in sides.items():
                result = self.alone(side)
                results[name].append(result)
                self.console.log(f"round {number + 1} of {rounds}: {name}: {figure(result)}", highlight=False)
        return results

    def alone(self, side: Side) -> Any:
        """Run a side in a new process and return its result; raise RuntimeError with its last output if it fails."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        arguments = side.arguments | ({"folder": str(folder)} if "folder" in side.function.__annotations__ else {})
        function = f"{side.function.__module__}:{side.function.__qualname__}"
        command = [
            sys.executable,
            "-m",
            "tests.benchmarks.alone",
            function,
            json.dumps(arguments),
            str(folder / "result"),
        ]
        with open(folder / "output", "w+b") as output:
            if code := self._run(command, output):
                output.seek(0)
                raise RuntimeError(f"{function} ended with {code}:\n{output.read().decode(errors='replace')[-3000:]}")
        return json.loads((folder / "result").read_text())

    def _run(self, command: list[str], output: IO[bytes]) -> int:
        """Run a command and return its exit code. All of its processes are ended, also after an exception."""
        process = subprocess.Popen(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            return process.wait(_TIMEOUT_S)
        finally:
            end_tree(process)  # Also after a normal end: its children may still write into the folder.


@contextmanager
def served(data: Path, scale: float, scratch: Path) -> Iterator[tuple[str, Path, dict[str, str]]]:
    """Serve the training images; yield their URL, their folder, and the environment for processes that read them.

    If ``scale`` is below 1, only this fraction of the images is used.
    """
    if not (data / "train").is_dir():
        raise UsageError(
            f"--data is {data}, which has no folder train in it; give the folder that holds train/<class>/*.jpg."
        )
    directory = data if scale >= 1 else _part(data, scale, scratch / "images")
    with S3Server(directory) as server:
        yield "s3://train", directory / "train", _environment(scratch) | server.environment()


def _part(data: Path, scale: float, target: Path) -> Path:
    """Copy the first images of each class to ``target``."""
    for folder in (data / "train").iterdir():
        (target / "train" / folder.name).mkdir(parents=True)
        images = sorted(folder.iterdir())
        for image in images[: math.ceil(len(images) * scale)]:
            shutil.copy(image, target / "train" / folder.name)
    return target


def _environment(scratch: Path) -> dict[str, str]:
    """Return this process's environment without AWS variables, and with a folder for Ray that hides other clusters.

    Python keeps what it has compiled, as it does by default: the first round of a benchmark compiles.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("AWS_") and name not in ("RAY_ADDRESS", _NO_BYTECODE)
    }
    return inherited | {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(_ROOT),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # Otherwise Ray installs an environment for each cluster.
        "RAY_TMPDIR": str(scratch),
    }
