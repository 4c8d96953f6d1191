"""Where the runs of the soak train: in a Ray cluster that outlives them, or on this machine without Ray."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import psutil

from tests.helpers.ray_head import Head, started_head
from tests.helpers.waiting import wait_for

FEW_RECORDS = {"RAY_task_events_max_num_task_in_gcs": "1000", "RAY_maximum_gcs_destroyed_actor_cached_count": "100"}
"""Records of ended tasks and actors that Ray keeps. Its default is 100,000 each, which would look like a leak."""


class Machines(Protocol):
    """Where runs train. ``launch`` are the options that say so, ``environment`` is that of their commands."""

    launch: Sequence[str]
    environment: Mapping[str, str]

    def find(self, kind: str) -> list[psutil.Process]:
        """The processes of a kind: worker, reader, coordinator or agent."""
        ...

    def working(self) -> Counter[str]:
        """How many processes of the runs there are, by name, without idle ones."""
        ...

    def lasting(self) -> list[psutil.Process]:
        """The processes that outlive every run."""
        ...


@contextmanager
def machines(backend: str, folder: Path) -> Iterator[Machines]:
    """The machines of a backend, as long as the ``with`` block runs; ``folder`` is for what they write."""
    if backend == "local":
        yield ThisMachine(folder)
        return
    os.environ.update(FEW_RECORDS)
    with ExitStack() as opened:
        while not _has_started(head := opened.enter_context(started_head(folder)), folder):
            opened.close()
        yield Cluster(head)


def _has_started(head: Head, folder: Path) -> bool:
    """Wait until Ray says that it runs, or gives up: it allows itself half a minute, however busy the machine is."""
    log = folder / "head.log"
    wait_for(lambda: head.process.poll() is not None or "Ray runtime started" in log.read_text())
    return head.process.poll() is None


class Cluster:
    """A Ray cluster."""

    _TITLES: Mapping[str, Sequence[str]] = {
        "worker": ("RayTrainWorker",),
        "reader": ("read_block", "MapBatches"),
        "coordinator": ("Coordinator",),
    }

    def __init__(self, head: Head) -> None:
        self._head = head
        self.launch: Sequence[str] = ("--address", head.address)
        self.environment: Mapping[str, str] = head.environment

    def find(self, kind: str) -> list[psutil.Process]:
        return [each for each in self._processes() if any(part in _command(each)[0] for part in self._TITLES[kind])]

    def working(self) -> Counter[str]:
        titles = [_command(each)[0].partition(".")[0] for each in self._processes()]
        return Counter(title for title in titles if "ray::" in title and not any(word in title for word in _STAY))

    def lasting(self) -> list[psutil.Process]:
        return [each for each in self._processes() if Path(_command(each)[0]).name in ("raylet", "gcs_server")]

    def _processes(self) -> list[psutil.Process]:
        """All that the head has started, and those that a fork server has, whose output is in the head's folder."""
        started = psutil.Process(self._head.process.pid).children(recursive=True)
        forked = [each for each in psutil.process_iter() if "ray::" in _command(each)[0] and each not in started]
        return [*started, *(each for each in forked if _has_open(each, f"_{self._head.process.pid}/logs/"))]


_STAY = "IDLE", "SPILL", "RESTORE"
"""Processes of Ray that no run has to end, as parts of their titles."""


class ThisMachine:
    """This machine without Ray: drivers, their agents, and the workers that these fork."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.launch: Sequence[str] = ("--backend", "local")
        self.environment: Mapping[str, str] = {**os.environ, "PYTHONPATH": os.getcwd()}

    def find(self, kind: str) -> list[psutil.Process]:
        return [each for each in self._processes() if _role(each) == kind]

    def working(self) -> Counter[str]:
        return Counter(_role(each) for each in self._processes())

    def lasting(self) -> list[psutil.Process]:
        return []

    def _processes(self) -> list[psutil.Process]:
        """All that have the temporary folder of the soak's runs, whoever their parents are by now."""
        return [each for each in psutil.process_iter() if _variable(each, "TMPDIR") == str(self._folder / "tmp")]


def _role(process: psutil.Process) -> str:
    agent = "raytrain.launch.local.agent"
    if agent not in _command(process):
        return "driver"
    with suppress(psutil.Error):
        parent = process.parent()
        return "worker" if parent is None or "train" not in _command(parent) else "agent"
    return "worker"


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):  # it has just ended
        return process.cmdline() or [""]
    return [""]


def _has_open(process: psutil.Process, part: str) -> bool:
    with suppress(psutil.Error, OSError):
        return any(part in file.path for file in process.open_files())
    return False


def _variable(process: psutil.Process, name: str) -> str | None:
    with suppress(psutil.Error, OSError):
        return process.environ().get(name)
    return None
