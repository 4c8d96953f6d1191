"""The runs and faults of the soak test. Each fault is a function that returns whether it could be injected."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import psutil

import raytrain
from raytrain.monitor.stop_request import request_stop
from raytrain.runs.documents import CLAIM, run_store
from raytrain.runs.outcome import StopReason
from tests.faults.soak_machines import Machines
from tests.helpers.faulty_s3 import FaultyS3
from tests.helpers.waiting import wait_for

DATA, STORAGE = "s3://soak/images", "s3://soak-runs"
_TROUBLE_S, _TROUBLED_FRACTION = 20.0, 0.3
_PATIENCE_S = 300.0
_FOR_READERS_S = 20.0
_HUNG_S = 45.0

LOOP = """
import time
from pathlib import Path
from tests.helpers.small_runs import loop_with

FOLDER = Path({folder!r})
STEP = FOLDER / (FOLDER / "start").read_text()  # workers of a killed driver may train on for a while

def is_asked(wish):
    try:
        (FOLDER / wish).unlink()
        return True
    except FileNotFoundError:
        return False

first_steps = []

def before_step(run, batch):
    time.sleep(0.25)  # Slow enough for faults to happen in between.
    # From the second step on: a loop that raises in the first step of a start ends the run.
    first_steps.append(batch.step)
    if run.rank == 0 and first_steps[0] < batch.step:
        STEP.write_text(str(batch.step))
    if is_asked("print"):
        print(",".join(f"http://10.0.0.5:9000/images/{{number:08d}}.jpg" for number in range(26_000)), flush=True)
    if is_asked("raise"):
        raise RuntimeError("something broke")

def loop(run):
    loop_with(run, before_step=before_step)
"""


@dataclass
class Soaked:
    """One run, whose driver is a process of its own."""

    name: str
    cache: str
    machines: Machines
    proxy: FaultyS3
    folder: Path
    environment: dict[str, str]
    workers: int = 2
    starts: int = 0
    met: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def begin(self, *more: str) -> None:
        options = {
            "name": self.name,
            "data": DATA,
            "storage": STORAGE,
            "workers": self.workers,
            "cache": self.cache,
            "loop": f"{self.folder / 'loop.py'}:loop",
            "model": "tests.helpers.memory_runs:network",
            "batch-size": 150,
            "epochs": 2,
            "learning-rate": 0.05,
            "precision": "float64",
            "log-every": 1,
            "checkpoint-every": "10st",
            "max-failures": 50,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        command = [
            sys.executable,
            "-m",
            "raytrain",
            "train",
            "custom",
            *words,
            *self.machines.launch,
            "--image-size",
            "12",
            "12",
            "--trace",
            "--json",
            *more,
        ]
        # Each start has a file of its own for its step.
        self.starts += 1
        self._step = self.folder / f"step-{self.name}-{self.starts}"
        self._step.write_text("")
        (self.folder / "start").write_text(self._step.name)
        self.log = (self.folder / f"{self.name}.log").open("a+")
        self.driver = subprocess.Popen(command, env=self.environment, stdout=self.log, stderr=self.log)

    @property
    def step(self) -> int:
        return int(self._step.read_text() or -1)

    @property
    def over(self) -> bool:
        return self.driver.poll() is not None

    def reach(self, step: int) -> bool:
        """Wait until the run is in this step; return False if it has ended."""
        wait_until(lambda: self.over or self.step >= step)
        return not self.over

    def kill_one(self, kind: str) -> bool:
        found = self.machines.find(kind)
        with suppress(psutil.NoSuchProcess):
            if found:
                random.choice(found).kill()
        return bool(found)

    @property
    def keepsake(self) -> Path:
        """A user's file in the run's place in storage, which looks like a checkpoint."""
        return self.folder / "s3" / "soak-runs" / self.name / "checkpoints" / "my-backup" / "step-000000100.pt"

    def end(self) -> None:
        """Wait for the driver's end, and note a problem if it fails or never ends."""
        try:
            self.driver.wait(2 * _PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.problems.append("it never ended")
            self.driver.kill()
        if self.driver.wait() != 0:
            self.problems.append(f"exit code {self.driver.returncode}: {last_line(self.log.name)}")


def worker_killed(run: Soaked) -> bool:
    return run.kill_one("worker")


def reader_killed(run: Soaked) -> bool:
    """Kill a process that reads images; wait up to 20 s for one to appear."""
    return wait_until(lambda: run.over or run.kill_one("reader"), _FOR_READERS_S) and not run.over


def coordinator_killed(run: Soaked) -> bool:
    return run.kill_one("coordinator")


def coordinator_killed_in_a_start(run: Soaked) -> bool:
    """Kill the driver, start the run again, and kill the coordinator in the next phase of that start."""
    before = {process.pid for process in run.machines.find("coordinator")}
    run.driver.kill()
    run.driver.wait()
    begun_at = Path(run.log.name).stat().st_size
    run.begin("--resume")

    def coordinators() -> list[psutil.Process]:
        return [process for process in run.machines.find("coordinator") if process.pid not in before]

    is_reached = {
        "it begins": lambda: True,
        "workers begin": lambda: bool(run.machines.find("worker")),
        "workers train": lambda: b"training on" in Path(run.log.name).read_bytes()[begun_at:],
        "the first step comes": lambda: run.step >= 0,
    }
    phase = next(_phases)
    if not wait_until(lambda: run.over or (bool(coordinators()) and is_reached[phase]())) or run.over:
        return False
    print(f"{run.name}: the coordinator dies as soon as {phase}", flush=True)
    with suppress(psutil.NoSuchProcess, IndexError):
        coordinators()[0].kill()
    return True


_phases = cycle(("it begins", "workers begin", "workers train", "the first step comes"))


def agent_killed(run: Soaked) -> bool:
    """Kill the process that watches the workers."""
    return run.kill_one("agent")


def driver_killed(run: Soaked) -> bool:
    run.driver.kill()
    run.driver.wait()
    run.begin("--resume")
    return True


def stopped_and_resumed(run: Soaked) -> bool:
    """Stop the run, and resume it on another number of workers."""
    try:
        request_stop(STORAGE, run.name, StopReason("caller", "soak"))
    except raytrain.UsageError:  # The run is just ending.
        return False
    run.end()
    if '"status": "stopped"' in last_line(run.log.name):
        run.workers = 3 - run.workers
        run.begin("--resume")
    return True


def taken_over(run: Soaked) -> bool:
    """Freeze the driver, with or without its workers, until another one has taken the run over.

    The first one must end when it goes on, and say why.
    """
    frozen, store = run.driver, run_store(STORAGE, run.name)
    if not store.exists(CLAIM):
        return False
    before = store.get(CLAIM)
    workers = random.choice(([], run.machines.find("worker")))
    for process in (frozen, *workers):
        process.send_signal(signal.SIGSTOP)
    run.begin("--resume")
    is_taken = wait_until(lambda: run.over or _token(store.get(CLAIM)) != _token(before))
    for process in (*workers, frozen):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    try:
        frozen.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        run.problems.append("the driver that lost the run trains on")
        frozen.kill()
    if frozen.wait() == 0 or "took over the run" not in Path(run.log.name).read_text():
        run.problems.append("the driver that lost the run does not say so")
    return is_taken and not run.over


def _token(claim: bytes) -> str:
    return json.loads(claim)["token"]


def s3_troubled(run: Soaked) -> bool:
    run.proxy.fraction = _TROUBLED_FRACTION
    time.sleep(_TROUBLE_S)  # the fault lasts this long, whatever the run does
    run.proxy.fraction = 0.0
    return True


def s3_hung(run: Soaked) -> bool:
    """Leave requests without an answer for longer than an owner may be silent."""
    (run.folder / "hang").touch()
    time.sleep(_HUNG_S)  # the fault lasts this long, whatever the run does
    (run.folder / "hang").unlink()
    return True


def loop_raised(run: Soaked) -> bool:
    (run.folder / "raise").touch()
    wait_until(lambda: run.over or not (run.folder / "raise").exists())
    (run.folder / "raise").unlink(missing_ok=True)
    return True


def line_printed(run: Soaked) -> bool:
    """Have a worker print a line of 1 MB, full of URLs, which the logs look at for keys."""
    (run.folder / "print").touch()
    wait_until(lambda: run.over or not (run.folder / "print").exists())
    (run.folder / "print").unlink(missing_ok=True)
    return True


def tmpdir_full(run: Soaked) -> bool:
    """Fill the disk of TMPDIR for a while; a soak that may not mount one has none."""
    if not os.path.ismount(run.folder / "tmp"):
        return False
    filler = run.folder / "tmp" / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    time.sleep(_TROUBLE_S)  # the fault lasts this long, whatever the run does
    filler.unlink()
    return True


def descriptors_gone(run: Soaked) -> bool:
    """Let a process of the run open no further file for a while: the driver, a worker or the coordinator."""
    processes = {kind: run.machines.find(kind) for kind in ("worker", "coordinator")}
    processes["driver"] = [psutil.Process(run.driver.pid)]
    kind = random.choice([kind for kind, there in processes.items() if there])
    with suppress(psutil.NoSuchProcess):
        process = random.choice(processes[kind])
        limits = process.rlimit(psutil.RLIMIT_NOFILE)
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds(), limits[1]))
        print(f"{run.name}: the {kind} opens no further file", flush=True)
        time.sleep(_TROUBLE_S)  # the fault lasts this long, whatever the run does
        process.rlimit(psutil.RLIMIT_NOFILE, limits)
        return True
    return False


WHAT_IT_DOES: dict[Callable[[Soaked], bool], str] = {
    worker_killed: "continues by itself",
    reader_killed: "continues by itself",
    coordinator_killed: "continues by itself",
    coordinator_killed_in_a_start: "continues by itself",
    agent_killed: "continues by itself",
    driver_killed: "continues with --resume",
    stopped_and_resumed: "stops; continues with --resume on another number of workers",
    taken_over: "the new driver continues; the one that was frozen stops and says why",
    s3_troubled: "continues by itself",
    s3_hung: "continues by itself",
    loop_raised: "continues by itself",
    line_printed: "continues by itself",
    tmpdir_full: "continues by itself",
    descriptors_gone: "continues by itself",
}


ONLY_ON: dict[Callable[[Soaked], bool], str] = {
    reader_killed: "ray",
    coordinator_killed: "ray",
    coordinator_killed_in_a_start: "ray",
    agent_killed: "local",
}


def last_line(path: str) -> str:
    return next((line for line in reversed(Path(path).read_text().splitlines()) if line.strip()), "")


def wait_until(condition: Callable[[], bool], patience_s: float = _PATIENCE_S) -> bool:
    """Return whether ``condition`` was met in time."""
    with suppress(AssertionError):
        return wait_for(condition, deadline_s=patience_s)
    return False
