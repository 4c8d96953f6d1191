"""Commands as a user types them on a machine with a GPU: what they print, and what they refuse in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tests.gpu.trial import Trial
from tests.helpers.photographs import write_photographs

_TRAIN = (
    "train custom --backend local --model resnet18 --image-size 64 64 --batch-size 32 --log-every 1 --data photographs"
)


@dataclass(frozen=True)
class Line:
    """A command's words, what it must say, and whether it ends well; ``environment`` is beside that of the suite."""

    words: str
    says: str
    works: bool = True
    environment: dict[str, str] = field(default_factory=dict)


_HIDDEN = {"CUDA_VISIBLE_DEVICES": ""}
_ON_GPU = (
    Line("devices", "NVIDIA"),
    Line(f"{_TRAIN} --name first --device cuda:0 --epochs 1", "finished after"),
    Line(f"{_TRAIN} --name auto --epochs 1", "finished after"),
    Line(f"{_TRAIN} --name hidden --max-steps 2", "finished after", environment=_HIDDEN),
    Line(f"{_TRAIN} --name refused --device cuda", "hides all", works=False, environment=_HIDDEN),
    Line(f"{_TRAIN} --name refused --device cuda:1", "counted from 0", works=False),
    Line(f"{_TRAIN} --name refused --device cuda --workers 2", "this machine has 1 GPU;", works=False),
    Line(f"find-rate {_TRAIN[6:].replace(' --log-every 1', '')} --name rate --max-steps 20", "rate"),
    Line(f"sweep {_TRAIN[6:]} --name trials --vary learning-rate=0.01,0.1 --max-steps 3", "learning"),
)
_ON_CPU = (
    Line("devices", "CPU"),
    Line(f"{_TRAIN} --name first --device cpu --max-steps 2", "finished after"),
    Line(f"{_TRAIN} --name refused --device cuda", "no GPU", works=False),
)


def lines(trial: Trial) -> None:
    write_photographs(trial.folder / "photographs", trial.scaled(200, on_cpu=60))
    chosen = _ON_GPU if trial.on_gpu else _ON_CPU
    with ThreadPoolExecutor(trial.scaled(4, on_cpu=1)) as pool:
        for line, done in zip(chosen, pool.map(lambda line: _run(trial, line), chosen), strict=True):
            _note(trial, line, done)


def _run(trial: Trial, line: Line) -> subprocess.CompletedProcess[str]:
    command: Sequence[str] = [sys.executable, "-m", "raytrain", *line.words.split()]
    environment = {**os.environ, **line.environment}
    return subprocess.run(command, cwd=trial.folder, env=environment, capture_output=True, text=True)


def _note(trial: Trial, line: Line, done: subprocess.CompletedProcess[str]) -> None:
    printed = done.stdout + done.stderr
    name = " ".join([*line.environment, line.words.removeprefix(_TRAIN)])
    trial.says(f"$ {name}\n{printed[-1500:]}")
    trial.holds(f"{name}: ends {'well' if line.works else 'with an error'}", (done.returncode == 0) == line.works)
    trial.holds(
        f"{name}: says {line.says!r}, and has no traceback", line.says in printed and "Traceback" not in printed
    )
