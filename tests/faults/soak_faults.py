"""The runs and faults of the soak test. Each fault is a function that returns whether it could be injected."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

import raytrain
from raytrain.monitor.stop_request import request_stop
from raytrain.runs.documents import CLAIM, run_store
from raytrain.runs.outcome import StopReason
from tests.helpers.faulty_s3 import FaultyS3
from tests.helpers.ray_head import Head

DATA, STORAGE = "s3://soak/images", "s3://soak-runs"
_TROUBLE_S, _TROUBLED_FRACTION = 20.0, 0.3
_PATIENCE_S = 300.0
_FOR_READERS_S = 20.0

LOOP = """
import time
from pathlib import Path
from tests.helpers.small_runs import loop_with

FOLDER = Path({folder!r})

def before_step(run, batch):
    time.sleep(0.25)  # Slow enough for faults to happen in between.
    if run.rank == 0:
        (FOLDER / "step").write_text(str(batch.step))
    try:
        (FOLDER / "raise").unlink()
    except FileNotFoundError:
        return
    raise RuntimeError("something broke")

def loop(run):
    loop_with(run, before_step=before_step)
"""


@dataclass
class Soaked:
    """One run, whose driver is a process of its own, in a cluster that outlives it."""

    name: str
    cache: str
    head: Head
    proxy: FaultyS3
    folder: Path
    environment: dict[str, str]
    workers: int = 2
    met: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def begin(self, *more: str) -> None:
        options = {
            "name": self.name,
            "data": DATA,
            "storage": STORAGE,
            "address": self.head.address,
            "workers": self.workers,
            "cache": self.cache,
            "loop": f"{self.folder / 'loop.py'}:loop",
            "model": "tests.integration.test_exact:network",
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
            "--image-size",
            "12",
            "12",
            "--trace",
            "--json",
            *more,
        ]
        (self.folder / "step").write_text("")
        self.log = (self.folder / f"{self.name}.log").open("a+")
        self.driver = subprocess.Popen(command, env=self.environment, stdout=self.log, stderr=self.log)

    @property
    def step(self) -> int:
        return int((self.folder / "step").read_text() or -1)

    @property
    def over(self) -> bool:
        return self.driver.poll() is not None

    def reach(self, step: int) -> bool:
        """Wait until the run is in this step; return False if it has ended."""
        wait_until(lambda: self.over or self.step >= step)
        return not self.over

    def kill_one(self, *names: str) -> bool:
        found = [process for name in names for process in named(self.head, name)]
        if found:
            random.choice(found).kill()
        return bool(found)

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
    return run.kill_one("RayTrainWorker")


def reader_killed(run: Soaked) -> bool:
    """Kill a process that reads images; wait up to 20 s for one to appear."""
    return wait_until(lambda: run.over or run.kill_one("read_block", "MapBatches"), _FOR_READERS_S) and not run.over


def coordinator_killed(run: Soaked) -> bool:
    return run.kill_one("Coordinator")


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
    """Freeze the driver until another one has taken the run over; the first one must end when it goes on."""
    frozen, store = run.driver, run_store(STORAGE, run.name)
    if not store.exists(CLAIM):
        return False
    before = store.get(CLAIM)
    frozen.send_signal(signal.SIGSTOP)
    run.begin("--resume")
    is_taken = wait_until(lambda: run.over or _token(store.get(CLAIM)) != _token(before))
    frozen.send_signal(signal.SIGCONT)
    try:
        frozen.wait(_PATIENCE_S)
    except subprocess.TimeoutExpired:
        run.problems.append("the driver that lost the run trains on")
        frozen.kill()
    if frozen.wait() == 0:
        run.problems.append("the driver that lost the run does not say so")
    return is_taken and not run.over


def _token(claim: bytes) -> str:
    return json.loads(claim)["token"]


def s3_troubled(run: Soaked) -> bool:
    run.proxy.fraction = _TROUBLED_FRACTION
    time.sleep(_TROUBLE_S)
    run.proxy.fraction = 0.0
    return True


def loop_raised(run: Soaked) -> bool:
    (run.folder / "raise").touch()
    wait_until(lambda: run.over or not (run.folder / "raise").exists())
    (run.folder / "raise").unlink(missing_ok=True)
    return True


WHAT_IT_DOES: dict[Callable[[Soaked], bool], str] = {
    worker_killed: "continues by itself",
    reader_killed: "continues by itself",
    coordinator_killed: "continues by itself",
    driver_killed: "continues with --resume",
    stopped_and_resumed: "stops; continues with --resume on another number of workers",
    taken_over: "the new driver continues; the one that was frozen stops and says why",
    s3_troubled: "continues by itself",
    loop_raised: "continues by itself",
}


def named(head: Head, part: str) -> list[psutil.Process]:
    return [process for process in head_processes(head) if part in title(process)]


def head_processes(head: Head) -> list[psutil.Process]:
    return psutil.Process(head.process.pid).children(recursive=True)


def title(process: psutil.Process) -> str:
    try:
        return next(iter(process.cmdline()), "")
    except psutil.Error:  # The process has just ended.
        return ""


def last_line(path: str) -> str:
    return next((line for line in reversed(Path(path).read_text().splitlines()) if line.strip()), "")


def wait_until(condition: Callable[[], bool], patience_s: float = _PATIENCE_S) -> bool:
    deadline = time.monotonic() + patience_s
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met
