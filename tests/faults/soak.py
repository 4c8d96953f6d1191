"""A soak test: train runs with random faults, one after the other.

``python -m tests.faults.soak --minutes 60 --seed 1 --backend local``

All runs have the same options, so each must end with the weights of the first one, which has no faults. Prints the
faults and their effects. The exit code is 1 if samples were lost or used twice, a user's file was deleted, or processes
or files were left over.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path

import raytrain
from raytrain.demo.s3_server import S3Server
from raytrain.runs.records import read_run
from tests.faults.soak_faults import LOOP, ONLY_ON, STORAGE, WHAT_IT_DOES, Soaked, last_line, wait_until
from tests.faults.soak_machines import Machines, machines
from tests.helpers.faulty_s3 import faulty_s3
from tests.helpers.small_runs import make_images, weights

NUM_IMAGES = 6000
FAULTS_PER_RUN = 3
SETTLED_S = 20.0
"""Time after a run in which Ray ends the run's processes."""
TMPDIR_BYTES = 64 << 20
MORE_FDS, MORE_BYTES = 32, 64 << 20
"""Allowed growth of a process that outlives all runs; it varies with the number of idle processes that Ray keeps."""


def suffer(run: Soaked, faults: Iterator[Callable[[Soaked], bool]]) -> None:
    """Start the run, inject the faults at random steps, and wait for the run's end."""
    run.begin()
    try:
        for fault in faults:
            if not run.reach(max(run.step, 0) + random.randint(3, 40)):
                break
            run.keepsake.parent.mkdir(parents=True, exist_ok=True)
            run.keepsake.touch()
            step = run.step
            if fault(run):
                run.met.append(fault.__name__)
                print(f"{run.name}: {fault.__name__} in step {step}", flush=True)
        run.end()
    finally:
        run.driver.kill()


# Results.


@dataclass
class Verdict:
    run: Soaked
    lost: int
    doubled: int
    equal: bool
    ended: bool = True
    """If False, the lost and doubled samples are unknown."""

    @property
    def good(self) -> bool:
        return not (self.run.problems or self.lost or self.doubled) and self.equal


def judge(run: Soaked, undisturbed: raytrain.TrainResult | None) -> tuple[Verdict, raytrain.TrainResult | None]:
    """Compare a run that has ended with the plan and with the undisturbed run."""
    try:
        summary = json.loads(last_line(run.log.name))
        result = raytrain.TrainResult(**{each.name: summary[each.name] for each in fields(raytrain.TrainResult)})
    except (ValueError, KeyError):
        run.problems.append(f"no summary: {last_line(run.log.name)}")
        return Verdict(run, 0, 0, equal=False, ended=False), None
    if result.status != "finished":
        run.problems.append(f"it ended {result.status}")
    steps = [row.step for row in read_run(STORAGE, run.name).metrics if row.kind == "step"]
    if steps != list(range(1, result.steps + 1)):
        run.problems.append(
            f"its history lacks {sorted(set(range(1, result.steps + 1)) - set(steps))} or has steps twice"
        )
    if run.met and not run.keepsake.exists():
        run.problems.append(f"{run.keepsake.name} of a user was deleted")
    audit = raytrain.audit(run.name, storage=STORAGE)
    lost = sum(len(epoch.missing) for epoch in audit.epochs)
    doubled = sum(len(epoch.doubled) for epoch in audit.epochs)
    if not audit.clean:
        run.problems.append("its audit is not clean")
    return Verdict(run, lost, doubled, undisturbed is None or same_weights(result, undisturbed)), result


def same_weights(one: raytrain.TrainResult, other: raytrain.TrainResult) -> bool:
    ours, theirs = weights(one), weights(other)
    return max((ours[name].double() - theirs[name].double()).abs().max().item() for name in theirs) < 1e-10


def left_behind(machines: Machines, usual: Counter[str]) -> list[str]:
    """Names of the processes that are still there a minute after a run, other than the usual ones."""
    wait_until(lambda: not machines.working() - usual, 60)
    return sorted((machines.working() - usual).elements())


def sizes(machines: Machines) -> dict[str, tuple[int, int]]:
    """Open files and memory in bytes of the processes that outlive every run, by process name."""
    return {each.name(): (each.num_fds(), each.memory_info().rss) for each in machines.lasting()}


@contextmanager
def scene(folder: Path, backend: str) -> Iterator[Callable[[int], Soaked]]:
    """Start an S3 server behind a proxy, and a cluster for Ray; yield a function that makes the run of a number."""
    (folder / "loop.py").write_text(LOOP.format(folder=str(folder)))
    for name in ("tmp", "s3/soak/images", "s3/soak-runs"):
        (folder / name).mkdir(parents=True)
    make_images(folder / "s3" / "soak" / "images", NUM_IMAGES)
    hang = folder / "hang"
    with (
        own_disk(folder / "tmp"),
        S3Server(folder / "s3") as server,
        machines(backend, folder) as there,
        faulty_s3(server.endpoint_url, interfere=lambda request, body: "stall" if hang.exists() else None) as proxy,
    ):
        os.environ.update(server.environment())  # This process bypasses the proxy.
        environment = {
            **there.environment,
            **server.environment(),
            "AWS_ENDPOINT_URL": proxy.url,
            "PYTHONFAULTHANDLER": "1",
            "TMPDIR": str(folder / "tmp"),
        }
        yield lambda number: Soaked(f"run-{number}", ("none", "memory")[number % 2], there, proxy, folder, environment)


@contextmanager
def own_disk(folder: Path) -> Iterator[None]:
    """Have ``folder`` on a small disk of its own, which can be filled, if this user may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPDIR_BYTES}", "soak", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount).returncode == 0
    try:
        yield
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def endless_faults(backend: str, only: Sequence[str] | None) -> Iterator[Callable[[Soaked], bool]]:
    """Yield the faults that a backend has forever, in rounds that contain each of them once."""
    possible = [fault for fault in WHAT_IT_DOES if ONLY_ON.get(fault, backend) == backend]
    chosen = [fault for fault in possible if only is None or fault.__name__ in only]
    while True:
        yield from random.sample(chosen, len(chosen))


def soak(new_run: Callable[[int], Soaked], minutes: float, faults: Iterator[Callable[[Soaked], bool]]) -> int:
    """Train one run after another until ``minutes`` after the first one have passed; return the exit code."""
    first = new_run(0)
    suffer(first, iter(()))
    verdict, undisturbed = judge(first, None)
    verdicts, there = [verdict], first.machines
    time.sleep(SETTLED_S)  # Ray ends idle processes some seconds after a run, and announces it to nobody
    usual, before, deadline = there.working(), sizes(there), time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        run = new_run(len(verdicts))
        suffer(run, islice(faults, FAULTS_PER_RUN))
        verdict, _ = judge(run, undisturbed)
        run.problems += [f"left behind: {name}" for name in left_behind(there, usual)]
        verdicts.append(verdict)
        print(
            f"{run.name}: {', '.join(run.met) or 'nothing'}: {'; '.join(run.problems) or 'no problems'}",
            flush=True,
        )
        if run.problems:
            print(textwrap.indent(Path(run.log.name).read_text(), "    "), flush=True)
    kept = [*grown(before, sizes(there)), *forgotten(first.folder / "tmp")]
    print_table(verdicts)
    print("\n".join(kept))
    return 0 if all(verdict.good for verdict in verdicts) and not any(line.startswith("BAD") for line in kept) else 1


def grown(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> Iterator[str]:
    """Yield a line for each process that outlives the runs."""
    for name, (fds, size) in before.items():
        more_fds, more_bytes = after.get(name, (10**9, 0))
        bad = more_fds - fds > MORE_FDS or more_bytes - size > MORE_BYTES
        memory = f"memory {size >> 20} -> {more_bytes >> 20} MiB"
        yield f"{'BAD ' if bad else ''}{name}: open files {fds} -> {more_fds}, {memory}"


def forgotten(folder: Path) -> Iterator[str]:
    """Yield a line about leftover temporary files, but torch's. The next driver removes those of a killed one."""
    there = sorted(path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_"))
    yield f"{'BAD ' if there else ''}temporary files: {' '.join(there) or 'none'}"


def print_table(verdicts: list[Verdict]) -> None:
    print("\n| fault | times | the run | samples lost, doubled | weights equal | passed |\n|---|---|---|---|---|---|")
    for fault, does in WHAT_IT_DOES.items():
        if not (met := [verdict for verdict in verdicts if fault.__name__ in verdict.run.met]):
            continue
        times = sum(verdict.run.met.count(fault.__name__) for verdict in met)
        lost, doubled = (sum(getattr(verdict, name) for verdict in met) for name in ("lost", "doubled"))
        equal, good = (all(getattr(verdict, name) for verdict in met) for name in ("equal", "good"))
        counted = f"{lost}, {doubled}" if all(verdict.ended for verdict in met) else "unknown for some runs"
        cells = (fault.__name__.replace("_", " "), times, does, counted, equal, good)
        print(f"| {' | '.join(map(str, cells))} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=("ray", "local"), default="ray")
    parser.add_argument("--only", nargs="+", choices=[fault.__name__ for fault in WHAT_IT_DOES])
    chosen = parser.parse_args()
    random.seed(chosen.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Run the cleanup.
    with tempfile.TemporaryDirectory(prefix="soak-") as name, scene(Path(name), chosen.backend) as new_run:
        return soak(new_run, chosen.minutes, endless_faults(chosen.backend, chosen.only))


if __name__ == "__main__":
    sys.exit(main())
