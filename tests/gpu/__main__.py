"""The command: runs each part in a process of its own, and writes one JSON document and one page of text."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from rich.console import Console

from raytrain.loader.machine import cores
from tests.benchmarks.report import Check, Figure, Report

_ROOT = Path(__file__).parents[2]
_LEAST_S = 5.0  # of time left, with which another part is begun
_AT_ONCE = 4
_PRINT_EVERY_S = 1.0
_SLOWER_ON_CPU = 8  # than on a GPU, though they do less there
_PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "numpy",
    "pyarrow",
    "pillow",
    "simplejpeg",
    "cykooz-resizer",
    "torchcodec",
    "ray",
)
Status = Literal["passed", "failed", "broke", "out of time", "left out"]


@dataclass(frozen=True)
class Part:
    """A function ``module:function`` that takes a Trial, and the seconds that it may take."""

    name: str
    function: str
    limit_s: float
    needs: Literal["nothing", "a GPU", "CIFAR-10"] = "nothing"
    alone: bool = False
    """Whether it measures times, so that nothing may run beside it."""


PARTS = (
    # First what people ask for first, then what is computed, several parts at a time, then the rest.
    Part("step", "tests.gpu.speed:beside_a_plain_loop", 60, alone=True),
    Part("random changes", "tests.gpu.speed:random_changes", 60, alone=True),
    Part("compile", "tests.gpu.speed:compiled", 120, alone=True),
    Part("cifar10-fast", "tests.gpu.commands:fast", 90, needs="CIFAR-10", alone=True),
    Part("same as plain PyTorch", "tests.gpu.same:as_plain_pytorch", 60),
    Part("same as on the CPU", "tests.gpu.same:as_on_the_cpu", 90),
    Part("bit for bit", "tests.gpu.same:bit_for_bit", 45),
    Part("two workers on one device", "tests.gpu.same:two_workers", 60),
    Part("loops of others", "tests.gpu.loops:of_others", 60),
    Part("loops for GPUs", "tests.gpu.loops:for_gpus", 90, needs="a GPU"),
    Part("precisions", "tests.gpu.options:precisions", 90),
    Part("loss scale of float16", "tests.gpu.options:loss_scale", 30),
    Part("what the host waits for", "tests.gpu.options:waits", 45),
    Part("commands", "tests.gpu.commands:run_and_use", 90),
    Part("commands as typed", "tests.gpu.typed:lines", 90),
    Part("out of memory", "tests.gpu.commands:out_of_memory", 60, needs="a GPU"),
    Part("profile", "tests.gpu.commands:profiled", 60),
    Part("machine", "tests.gpu.machine:measure", 30, alone=True),
    Part("copies beside the step", "tests.gpu.options:copies", 30, alone=True),
    Part("photographs", "tests.gpu.photographs:streamed", 150, alone=True),
    Part("decoding", "tests.gpu.photographs:decoded", 45, alone=True),
    Part("own transforms", "tests.gpu.workers:own_transforms", 60, alone=True),
    Part("gradient dtype", "tests.gpu.workers:gradient_dtype", 60, alone=True),
    Part("switches", "tests.gpu.speed:switches", 90, alone=True),
)


@dataclass(frozen=True)
class Outcome:
    """What came of a part; ``output`` is the end of what it printed, if it broke."""

    part: Part
    status: Status
    seconds: float = 0.0
    figures: list[Figure] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    output: str = ""

    def document(self) -> dict[str, Any]:
        report = Report(self.part.name, self.figures, self.checks).document()
        about = {"status": self.status, "seconds": round(self.seconds, 1), "limit_s": self.part.limit_s}
        return {**about, **report, "sentences": self.sentences, "output": self.output}


def run(part: Part, device: str, limit_s: float, cifar: Path | None = None) -> Outcome:
    """Run a part in a process of its own, which is ended after ``limit_s``, with all that it has started."""
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as folder:
        notes, printed, scratch = (Path(folder, name) for name in ("notes", "printed", "scratch"))
        scratch.mkdir()
        notes.touch()
        given = {"device": device, "folder": str(scratch), "notes": str(notes), "cifar": cifar and str(cifar)}
        command = [sys.executable, "-m", "tests.gpu.trial", part.function, json.dumps(given)]
        started = time.monotonic()
        with open(printed, "wb") as output:
            process = subprocess.Popen(command, **_apart(folder), stdout=output, stderr=output)
            code = _wait(process, limit_s, notes)
        seconds = time.monotonic() - started
        end = printed.read_text(errors="replace")[-4000:]
        return _outcome(part, code, seconds, notes.read_text(), end)


def _wait(process: subprocess.Popen[Any], limit_s: float, notes: Path) -> int | None:
    """The exit code; None if it took too long. Nothing that the process has started is left, but what ends with it.

    Figures are printed as soon as they are in ``notes``: the machine may be taken away any time.
    """
    ends_at, num_printed, code = time.monotonic() + limit_s, 0, None
    try:
        while code is None and time.monotonic() < ends_at:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(min(_PRINT_EVERY_S, max(0.0, ends_at - time.monotonic())))
            lines = [line for line in notes.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for note in map(json.loads, lines[num_printed:]):
                if note["kind"] == "figure":
                    values = ", ".join(f"{value:,.4g}" for value in note["values"])
                    print(f"    {note['name']}: {values} {note['unit']}", flush=True)
            num_printed = len(lines)
        return code
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _apart(folder: str) -> dict[str, Any]:
    """How a process is started that can be ended with all of its own."""
    return {"cwd": _ROOT, "env": _environment(folder), "stdin": subprocess.DEVNULL, "start_new_session": True}


def _environment(folder: str) -> dict[str, str]:
    cublas = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # without it, matrix products differ from call to call
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    alone = {"RAY_TMPDIR": folder}  # which hides clusters that run on this machine
    return {**os.environ, **cublas, **alone, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}


def _outcome(part: Part, code: int | None, seconds: float, notes: str, end: str) -> Outcome:
    found: dict[str, list[Any]] = {"figure": [], "check": [], "sentence": []}
    for note in map(json.loads, notes.splitlines()):
        found[note.pop("kind")].append(note)
    figures = [Figure(**each) for each in found["figure"]]
    checks = [Check(**each) for each in found["check"]]
    sentences = [each["text"] for each in found["sentence"]]
    if code == 0:
        status: Status = "passed" if all(check.holds for check in checks) else "failed"
        return Outcome(part, status, seconds, figures, checks, sentences)
    why = f"ended after {seconds:.0f} s" if code is None else _exit(code)
    return Outcome(part, "out of time" if code is None else "broke", seconds, figures, checks, sentences, why + end)


def _exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}\n" if code < 0 else f"ended with {code}\n"


def run_all(parts: Sequence[Part], device: str, out: Path, seconds: float, cifar: Path | None) -> list[Outcome]:
    """Run the parts, and write what is known after each. What happens to one has no effect on the others.

    They run in their order, but for those that measure no time, which run together, in the place of the first of them,
    a few at a time if there are cores for that.
    """
    started, outcomes, noting = time.monotonic(), list[Outcome](), Lock()

    def begin(part: Part) -> None:
        left = seconds - (time.monotonic() - started)
        limit_s = part.limit_s * (1 if device == "cuda" else _SLOWER_ON_CPU)
        reason = _reason_to_leave_out(part, device, left, cifar)
        outcome = (
            Outcome(part, "left out", sentences=[reason]) if reason else run(part, device, min(limit_s, left), cifar)
        )
        with noting:
            outcomes.append(outcome)
            outcomes.sort(key=lambda each: parts.index(each.part))
            write(out, device, outcomes, time.monotonic() - started)
            held = f"{sum(check.holds for check in outcome.checks)} of {len(outcome.checks)} checks hold"
            print(f"{outcome.status:11} {outcome.seconds:5.1f} s  {part.name}: {reason or held}", flush=True)

    first = list(takewhile(lambda part: part.alone, parts))
    for part in first:
        begin(part)
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, cores() // 4))) as pool:
        list(pool.map(begin, [part for part in parts if not part.alone]))
    for part in parts[len(first) :]:
        if part.alone:
            begin(part)
    return outcomes


def _reason_to_leave_out(part: Part, device: str, left_s: float, cifar: Path | None) -> str | None:
    if (part.needs == "a GPU" and device == "cpu") or (part.needs == "CIFAR-10" and cifar is None):
        return f"it needs {part.needs}"
    return "there is no time left" if left_s < _LEAST_S else None


def write(out: Path, device: str, outcomes: Sequence[Outcome], seconds: float) -> None:
    """Write ``gpu.json`` and ``gpu.txt`` into the folder ``out``, with what is known after ``seconds``."""
    document = {
        "device": device,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "seconds": round(seconds, 1),
        "parts": {outcome.part.name: outcome.document() for outcome in outcomes},
    }
    (out / "gpu.json").write_text(json.dumps(_finite(document), indent=1) + "\n")
    with open(out / "gpu.txt", "w") as file:
        console = Console(file=file, width=150, highlight=False)
        console.print(f"On {device}, Python {document['python']}, {document['seconds']} s")
        for outcome in outcomes:
            console.print(f"\n== {outcome.part.name}: {outcome.status}, {outcome.seconds:.1f} s")
            for sentence in outcome.sentences:
                console.print(sentence, markup=False)
            if outcome.figures or outcome.checks:
                console.print(Report("", outcome.figures, outcome.checks).tables())
            if outcome.output:
                console.print(outcome.output, markup=False)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main() -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("out", type=Path, help="folder for gpu.json and gpu.txt")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these; all by default")
    parser.add_argument("--seconds", type=float, help="for all parts together; 460 by default, on the CPU 1,800")
    parser.add_argument("--cifar", type=Path, help="folder that has CIFAR-10 in train and test, in folders or packed")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.device == "cpu":
        print("No GPU is used: the parts run on the CPU in a small way, but for those that need one.", flush=True)
    chosen = [part for part in PARTS if given.parts is None or part.name in given.parts]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part that runs is ended, too
    seconds = given.seconds or (460.0 if given.device == "cuda" else 1800.0)
    outcomes = run_all(chosen, given.device, given.out, seconds, given.cifar)
    counts = Counter(outcome.status for outcome in outcomes)
    print(f"{', '.join(f'{number} {status}' for status, number in counts.items())}; see {given.out / 'gpu.txt'}")
    return int(not counts.keys() <= {"passed", "left out"})


if __name__ == "__main__":
    sys.exit(main())
