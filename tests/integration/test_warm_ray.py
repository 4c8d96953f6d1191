"""Runs on the Ray that `raytrain up` keeps, with the real Ray: they use its processes, and the last one's images."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers.small_runs import make_images

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOOP = """
import json
import os
import random
import numpy
import psutil
from torchvision.models import resnet18
from raytrain.training.loop import train as built_in

def network(num_classes, channels):
    # Called in the driver, too.
    with open(f"{os.getpid()}.txt", "w") as file:
        file.write(repr([process.pid for process in psutil.Process().parents()]))
    return resnet18(num_classes=num_classes)

def loop(run):
    with open("folder-of-the-command.txt") as file:
        name = file.read()
    with open(f"{name}-{run.rank}.json", "w") as file:
        json.dump([os.getppid(), random.random(), numpy.random.random()], file)
    built_in(run)
"""


# No image is read for mean and standard deviation, and another seed holds out no others.
OPTIONS = "--epochs 2 --cache memory --mean 0.5 0.5 0.5 --std 0.3 0.3 0.3 --test-data images"


FORKS = "raytrain.backends.ray.fork_server"


class Machine:
    """Runs commands in ``folder`` with a home of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
        self._environment = {name: value for name, value in os.environ.items() if name not in names}
        self._environment |= {"HOME": str(folder), "RAY_TMPDIR": str(folder)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "raytrain", *words],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def command(self, *words: str) -> tuple[int, str, str]:
        with self.start(*words) as process:
            out, errors = process.communicate(timeout=300)
        return process.returncode, out, errors

    def train(self, name: str, *more: str) -> tuple[int, str, str]:
        return self.command(*self.train_words(name), *more)

    def train_words(self, name: str) -> list[str]:
        (self.folder / "folder-of-the-command.txt").write_text(name)
        options = f"{OPTIONS} --data images --workers 2 --model own:network --batch-size 20 --loop own.py:loop --json"
        return ["train", "custom", "--name", name, "--device", "cpu", *options.split()]


@pytest.fixture
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("m")
    (folder / "images").mkdir()
    make_images(folder / "images", 60)
    (folder / "own.py").write_text(LOOP)
    machine = Machine(folder)
    yield machine
    machine.command("down", "--yes")


def test_driver_and_workers_are_forked_and_draw_different_numbers(machine: Machine) -> None:
    code, out, errors = machine.command("up", "--json")
    assert code == 0, errors
    kept = json.loads(out)
    servers = {child.pid for child in psutil.Process(kept["pid"]).children(recursive=True) if FORKS in child.cmdline()}
    for name in ("first", "second"):
        assert result(machine.train(name))["status"] == "finished"
        workers = [json.loads(file.read_text()) for file in machine.folder.glob(f"{name}-?.json")]
        assert {parent for parent, *_ in workers} == servers
        assert len({number for _, *drawn in workers for number in drawn}) == 4
    parents = [set(json.loads(file.read_text())) for file in machine.folder.glob("[0-9]*.txt")]
    assert len(parents) == 2 * (1 + 2)
    assert all(servers & of_one for of_one in parents)
    code, out, errors = machine.command("down")
    assert (code, out.strip()) == (0, "Ray has ended."), errors
    assert not [pid for pid in (kept["pid"], *servers) if psutil.pid_exists(pid)]


def spoil(folder: Path) -> None:
    """Make every image unreadable, as a listing does not show."""
    for file in filter(Path.is_file, folder.rglob("*")):
        before = file.stat()
        file.write_bytes(bytes(before.st_size))
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_next_run_on_the_same_images_reads_none_of_them(machine: Machine) -> None:
    undisturbed = result(machine.train("undisturbed", "--seed", "1", "--backend", "local"))
    assert machine.command("up")[0] == 0
    first = result(machine.train("first"))
    spoil(machine.folder / "images")
    second = result(machine.train("second", "--seed", "1"))
    assert second["test_loss"] == pytest.approx(undisturbed["test_loss"])
    assert second["test_loss"] != pytest.approx(first["test_loss"])
    code, _, errors = machine.train("other", "--image-size", "40", "40")
    assert (code, "cannot be used" in errors) == (1, True), errors


def test_down_stops_the_run_that_uses_it_with_a_checkpoint(machine: Machine) -> None:
    assert machine.command("up")[0] == 0
    with machine.start(*machine.train_words("long"), "--epochs", "100000") as process:
        assert process.stdout is not None
        while "training on 2 workers" not in process.stdout.readline():
            assert process.poll() is None
        code, out, errors = machine.command("down", "--yes")
        assert (code, out.strip()) == (0, "Ray has ended."), errors
        rest, errors = process.communicate(timeout=60)
    stopped = result((process.returncode, rest, errors))
    assert stopped["status"] == "stopped"
    assert stopped["stop_reason"].startswith("raytrain down")
    assert Path(stopped["checkpoint"]).is_file()


def result(ended: tuple[int, str, str]) -> dict[str, Any]:
    code, out, errors = ended
    assert code == 0, errors
    return json.loads(out.splitlines()[-1])
