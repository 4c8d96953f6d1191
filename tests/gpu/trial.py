"""One part of the suite in its own process: what it computes on, and the checks and figures that it notes.

``python -m tests.gpu.trial MODULE:FUNCTION ARGUMENTS`` calls the function with a :class:`Trial`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.report import Check, Figure


@dataclasses.dataclass(frozen=True)
class Trial:
    """The device of a part, and where its notes go. They are written at once, for the part may be ended any time."""

    device: str
    """cuda or cpu."""
    folder: Path
    """An empty folder for files."""
    notes: Path
    cifar: Path | None = None
    """Folder that has CIFAR-10 in train and test; None if there is none."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def scaled(self, number: int, on_cpu: int) -> int:
        """``number`` on a GPU, a smaller one on the CPU, where the part is only tried out."""
        return number if self.on_gpu else on_cpu

    def synchronise(self) -> None:
        """Wait until the device has done all that it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def figure(self, name: str, unit: str, *values: float) -> None:
        """Note what was measured, once or several times; nothing if it was not."""
        if values:
            self._note("figure", Figure(name, unit, values))

    def check(self, name: str, value: float, unit: str, **limits: float) -> None:
        """Note a value that must be ``at_least`` or ``at_most`` a limit. The part goes on if it is not."""
        self._note("check", Check(name, float(value), unit=unit, **limits))

    def holds(self, name: str, holds: bool) -> None:
        """Note something that is so, or is not."""
        self.check(name, float(holds), "(1 is yes)", at_least=1)

    def says(self, sentence: str) -> None:
        """Note a sentence for the page."""
        self._write({"kind": "sentence", "text": sentence})

    def _note(self, kind: str, noted: Figure | Check) -> None:
        self._write({"kind": kind, **dataclasses.asdict(noted)})

    def _write(self, note: dict[str, Any]) -> None:
        with open(self.notes, "a") as file:
            file.write(json.dumps(note) + "\n")


def main(function: str, arguments: str) -> None:
    module, _, name = function.partition(":")
    given = json.loads(arguments)
    paths = {key: given[key] and Path(given[key]) for key in ("folder", "notes", "cifar")}
    if given["device"] == "cpu":
        torch.set_num_threads(1)  # the arrays of a part are small there
    getattr(import_module(module), name)(Trial(given["device"], **paths))


if __name__ == "__main__":
    main(*sys.argv[1:])
