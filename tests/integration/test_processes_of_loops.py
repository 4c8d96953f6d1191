"""Processes and threads that a loop leaves do not keep its run from ending, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import raytrain
from raytrain.errors import TrainingFailed
from tests.helpers.small_runs import config, local_config, loop_with
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.timeout(180)
LEFT: list[Any] = []  # so that nothing is collected, and ended, when the loop returns


def wait_for_ever() -> None:
    threading.Event().wait()


def leave(kind: str) -> None:
    if kind == "thread":
        threading.Thread(target=wait_for_ever).start()
    elif kind == "command":
        LEFT.append(subprocess.Popen(["sleep", "1000"]))
    elif kind == "fork":
        LEFT.append(multiprocessing.get_context("fork").Process(target=wait_for_ever))
        LEFT[-1].start()
    else:
        loader = DataLoader(range(64), 4, num_workers=2, persistent_workers=True, multiprocessing_context="fork")  # type: ignore[arg-type]
        LEFT.append(iter(loader))
        next(LEFT[-1])


def fail(run: raytrain.Run, batch: raytrain.Batch) -> None:
    if batch.step == 3:
        raise KeyError("broken")


def leaving(run: raytrain.Run, kind: str, fails: bool, folder: Path) -> None:
    """Train, and note the processes that are left, besides the worker itself."""
    before = children()
    leave(kind)
    Path(folder, f"left-{run.rank}-{os.getpid()}").write_text(" ".join(children() - before | {str(os.getpid())}))
    loop_with(run, fail if fails else lambda run, batch: None)


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())


def is_over(pid: str) -> bool:
    """Return True if there is no such process, or only its exit code, which nobody has asked for yet."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def backend(request: pytest.FixtureRequest) -> str:
    """Each of the backends, with a Ray cluster if it needs one."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        ("fork", True),
        ("loader", False),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("fork", False), ("loader", True))),
        *(
            pytest.param(kind, fails, marks=pytest.mark.slow)
            for kind in ("thread", "command")
            for fails in (False, True)
        ),
    ],
)
def test_a_run_ends_with_all_that_its_loop_has_left(
    kind: str, fails: bool, backend: str, images: Path, tmp_path: Path
) -> None:
    options = config(images, tmp_path / "runs", backend=backend, epochs=1, max_failures=0)
    loop = partial(leaving, kind=kind, fails=fails, folder=tmp_path)
    if fails:
        with pytest.raises(TrainingFailed, match="KeyError: 'broken'"):
            raytrain.train(options, loop=loop)
    else:
        assert raytrain.train(options, loop=loop).status == "finished"
    pids = [pid for path in tmp_path.glob("left-*") for pid in path.read_text().split()]
    assert len(pids) == {"thread": 2, "command": 4, "fork": 4, "loader": 6}[kind]
    wait_for(lambda: all(map(is_over, pids)))


def leaving_a_service(run: raytrain.Run, fails: bool, folder: Path) -> None:
    if run.rank == 1:
        service = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        (folder / "service").write_text(str(service.pid))
    loop_with(run, fail if fails else lambda run, batch: None)


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_process_in_a_session_of_its_own_is_named_and_runs_on(
    fails: bool, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = local_config(images, tmp_path / "runs", epochs=1, max_failures=0)
    with pytest.raises(TrainingFailed) if fails else nullcontext():
        raytrain.train(options, loop=partial(leaving_a_service, fails=fails, folder=tmp_path))
    pid = (tmp_path / "service").read_text()
    try:
        assert not is_over(pid)
        out = capsys.readouterr().out
        assert f"the loop has started sleep (process {pid}) in a session of its own, which runs on" in out
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_a_run_that_leaves_nothing_names_nothing(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raytrain.train(local_config(images, tmp_path, epochs=1))
    assert "session of its own" not in capsys.readouterr().out
