"""The commands below "Jobs" in docs/cluster.md, as they stand there: a head, two kinds of jobs, a stop and a resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from raytrain import UsageError
from raytrain.demo.demo import render_digits
from raytrain.runs.records import read_run
from tests.helpers.waiting import DEADLINE_S, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"
PROGRAMS = ("curl", "ip", "unshare", "nsenter")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to make namespaces"),
    pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=f"needs {', '.join(PROGRAMS)}"),
]

# The page's head has Ray's usual ports, and Ray looks for heads among all processes: these see no others. Ray keeps its
# files in these folders.
_BOOT = """
set -e
mount --make-rprivate /
mkdir -p /tmp/ray
for folder in /tmp/ray /dev/shm; do mount -t tmpfs machine $folder; done
ip link set lo up
echo started
exec sleep infinity
"""


def commands_of_page() -> list[str]:
    """Return the indented lines below "Jobs", for a cluster on this machine, with the packages that are installed."""
    section = PAGE.read_text().partition("\n## Jobs\n")[2].partition("\n## ")[0]
    lines = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    return [re.sub(r"^uv run ", "", line).replace("HEAD", "127.0.0.1").replace("BUCKET", "bucket") for line in lines]


class Terminal:
    """A terminal on a machine of its own, whose variables stay from one command to the next."""

    def __init__(self, first_process: int, folder: Path, home: Path) -> None:
        self._inside, self._folder = first_process, folder
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.variables = {**os.environ, "HOME": str(home), "PATH": path, "PYTHONPATH": os.getcwd()}

    def start(self, line: str) -> subprocess.Popen[str]:
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            self.variables[name] = value
        there = ["nsenter", f"--target={self._inside}", "--all", f"--wd={self._folder}", "bash", "-c", line]
        pipe = subprocess.PIPE
        return subprocess.Popen(there, env=self.variables, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def run(self, line: str) -> str:
        return finish(self.start(line), line)


def finish(process: subprocess.Popen[str], line: str) -> str:
    """Return what a command prints. It has to succeed, and to say nothing of a token that was not asked for."""
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, f"{line}\n{out}{errors}"
    assert "InvalidAuthToken" not in out + errors, f"{line}\n{out}{errors}"
    return out


@contextmanager
def machine(project: Path, buckets: Path) -> Iterator[Terminal]:
    """Start a machine, which serves ``buckets`` by S3; its terminal is in the folder ``project``."""
    namespaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.Popen([*namespaces, "sh", "-c", _BOOT], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        (first,) = psutil.Process(process.pid).children()
        terminal = Terminal(first.pid, project, home=project.parent)
        server = terminal.start(f"python -m tests.helpers.s3_host {buckets} 127.0.0.1")
        assert server.stdout is not None
        terminal.variables |= json.loads(server.stdout.readline())
        yield terminal
    finally:
        process.kill()
        process.wait()


def stop_in_training(terminal: Terminal, stop: str, running: subprocess.Popen[str], runs: Path, at_least: int) -> int:
    """Stop the run ``first`` as the page says once it has done some steps; return the steps that it has done."""

    def is_far_enough() -> bool:
        assert running.poll() is None, running.communicate()
        with suppress(UsageError):  # until the run has begun, and its documents are written
            return read_run(str(runs), "first").status.step >= at_least
        return False

    wait_for(is_far_enough, "it does not train")
    terminal.run(stop)
    finish(running, "the job that was stopped")
    run = read_run(str(runs), "first")
    assert (run.status.status, bool(run.summary["checkpoint"])) == ("stopped", True)
    return run.status.step


def kinds(lines: Sequence[str]) -> list[str]:
    return [" ".join(word for word in line.split()[:3] if not word.startswith("-")) for line in lines]


def test_the_commands_of_the_page_work_as_they_stand(tmp_path: Path) -> None:
    lines = commands_of_page()
    assert kinds(lines) == [
        "export RAY_AUTH_MODE=token",
        "ray get-auth-token",
        "ray start",
        "raytrain submit",
        "ray job submit",
        "raytrain stop first",
        "raytrain submit",
    ]
    project, bucket = tmp_path / "project", tmp_path / "buckets" / "bucket"
    (bucket / "cifar10").mkdir(parents=True)
    (render_digits(tmp_path / "digits", num_images=400) / "train").rename(bucket / "cifar10" / "train")
    (project / "runs" / "of-before").mkdir(parents=True)
    (project / "runs" / "of-before" / "step-000000001.pt").write_bytes(os.urandom(110 << 20))  # more than Ray takes
    with machine(project, bucket.parent) as terminal:
        *start, submit, ray_submit, stop, resume = lines
        for line in start:
            terminal.run(line)
        terminal.run("env -u RAY_AUTH_MODE raytrain devices")  # it learns that the cluster asks for a token
        terminal.run(submit)
        runs = bucket / "runs"
        (run,) = runs.iterdir()
        assert read_run(str(runs), run.name).status.status == "finished"

        # Stopped in another terminal, resumed from the laptop, and stopped again.
        steps = stop_in_training(terminal, stop, terminal.start(ray_submit), runs, at_least=2)
        stop_in_training(terminal, stop, terminal.start(resume), runs, at_least=steps + 1)

        # The Train tab of the dashboard lists the runs by their names.
        url = "http://127.0.0.1:8265/api/train/v2/runs/v1"
        listed = json.loads(terminal.run(f'curl --silent --header "Authorization: Bearer $(ray get-auth-token)" {url}'))
        assert [train_run["name"] for train_run in listed["train_runs"]] == ["first", "first", run.name]
