"""`raytrain up` and `down`, with a stand-in for Ray: what is kept, who uses it, and when it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raytrain.backends.ray import warm_cluster, warm_end
from raytrain.backends.ray.warm_cluster import WarmCluster, WarmRay, keep_warm, running
from raytrain.cli.main import main
from raytrain.runs.stop_request import StopRequest

RAY = {
    "__init__": "__version__ = '0'",
    "_private/node": """
class Node:
    gcs_address = "127.0.0.1:1"
    def __init__(self, *args, **options): pass
""",
    "_private/parameter": "RayParams = dict",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home, and a folder with a stand-in for Ray."""
    for name, text in RAY.items():
        file = tmp_path / "packages" / "ray" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name, value in {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path / "packages"),
        "TMPDIR": str(temporary),
        "RAY_TMPDIR": str(temporary),
    }.items():
        monkeypatch.setenv(name, value)
    yield tmp_path / "packages"
    main(["down", "--yes"])


def test_up_again_says_what_there_is_and_down_ends_it(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up"]) == 0
    before = capsys.readouterr().out
    kept = running()
    assert main(["up", "--idle-minutes", "5"]) == 0
    assert capsys.readouterr().out == before
    assert kept is not None
    assert running() == kept
    assert main(["down"]) == 0
    assert "Ray has ended." in capsys.readouterr().out
    assert not psutil.pid_exists(kept.pid)
    assert main(["down"]) == 0
    assert "No Ray is kept ready" in capsys.readouterr().out


def test_it_ends_when_nobody_has_used_it_for_a_while(packages: Path) -> None:
    kept = keep_warm(1 / 60)
    psutil.Process(kept.pid).wait(20)
    assert running() is None


def test_down_does_not_end_a_run_without_a_question(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = keep_warm(60)
    used = WarmCluster.take()
    assert used is not None
    assert used.address() == kept.address
    assert WarmCluster.take() is None, "a second command starts a cluster of its own"
    assert main(["down"]) == 2
    assert "A command uses the Ray of `raytrain up`. Stop its run, and end Ray? Nobody can be asked here; add" in (
        capsys.readouterr().err
    )
    assert running() == kept
    used.close()
    assert main(["down"]) == 0


def test_down_ends_it_once_the_run_that_uses_it_has_stopped(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep_warm(60)
    used = WarmCluster.take()
    assert used is not None
    asked: list[WarmRay] = []

    def stop_runs(found: WarmRay, request: StopRequest) -> None:
        asked.append(found)
        threading.Thread(target=leave).start()

    def leave() -> None:
        assert running() == kept
        used.close()

    monkeypatch.setattr(warm_end, "stop_runs", stop_runs)
    assert main(["down", "--yes"]) == 0
    assert asked == [kept]
    assert not psutil.pid_exists(kept.pid)


def test_it_is_not_idle_while_a_command_uses_it(packages: Path) -> None:
    kept = keep_warm(1 / 60)
    used = WarmCluster.take()
    assert used is not None
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(kept.pid).wait(2.5)
    used.close()
    psutil.Process(kept.pid).wait(20)


def test_one_of_another_version_is_started_anew(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = keep_warm(60)
    note = Path.home() / ".ray" / next(name for name in os.listdir(Path.home() / ".ray") if name.endswith(".json"))
    note.write_text(json.dumps({"pid": old.pid, "address": old.address, "version": "0", "idle_minutes": 7}))
    used = WarmCluster.take()
    assert used is not None
    new = running()
    assert new is not None
    assert (new.version, new.idle_minutes) == (warm_cluster.this_version(), 7)
    assert new.pid != old.pid
    assert not psutil.pid_exists(old.pid)
    used.close()


def test_it_is_not_used_for_other_gpus_nor_if_it_was_killed(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep_warm(60)
    with monkeypatch.context() as context:
        context.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert WarmCluster.take() is None
    keeper = psutil.Process(kept.pid)
    keeper.kill()
    keeper.wait(20)
    assert running() is None
    assert WarmCluster.take() is None


def test_what_keeps_ray_from_starting_is_said(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (packages / "ray" / "_private" / "node.py").write_text("raise OSError('no space left')")
    assert main(["up"]) == 2
    assert "Ray could not start a cluster on this machine (OSError: no space left)" in capsys.readouterr().err


def test_the_idle_time_must_be_one(packages: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--idle-minutes", "0"]) == 2
    assert "--idle-minutes is 0; give a number above 0" in capsys.readouterr().err


def test_a_cluster_of_ray_start_comes_first(
    packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_cluster, "ray_start_address", lambda: "10.0.0.1:6379")
    assert main(["up"]) == 2
    assert "`ray start` answers at 10.0.0.1:6379" in capsys.readouterr().err


def test_the_command_that_keeps_it_outlives_up(packages: Path) -> None:
    subprocess.run([sys.executable, "-m", "raytrain", "up"], check=True, capture_output=True, timeout=60)
    kept = running()
    assert isinstance(kept, WarmRay)
    assert psutil.Process(kept.pid).ppid() != os.getpid()
