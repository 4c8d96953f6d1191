"""`raytrain up` and `down`, with a stand-in for Ray: what is kept, who uses it, and when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from raytrain.backends.ray import warm_cluster
from raytrain.backends.ray.warm_cluster import WarmCluster, WarmRay, keep_warm, running
from raytrain.cli.main import main
from raytrain.errors import UsageError

RAY = {
    "__init__": "__version__ = '0'",
    "_private/node": """
class Node:
    gcs_address = "127.0.0.1:1"
    def __init__(self, *args, **options): pass
""",
    "_private/parameter": "RayParams = dict",
    "_raylet": """
class GcsClient:
    def __init__(self, address): pass
    def get_all_node_info(self):
        import types
        return {1: types.SimpleNamespace(node_manager_address="127.0.0.1", node_manager_port=1)}
""",
    "core/generated/node_manager_pb2": """
import types
def PrestartWorkersRequest(**fields):
    return types.SimpleNamespace(**fields, runtime_env_info=types.SimpleNamespace())
""",
    # Each process is named as Ray names those without work, and is ready at once.
    "core/generated/node_manager_pb2_grpc": """
import os, pathlib, subprocess
class NodeManagerServiceStub:
    def __init__(self, channel): pass
    def PrestartWorkers(self, request, **options):
        assert request.runtime_env_info.serialized_runtime_env == os.environ["EXPECTED_VARIABLES"]
        for _ in range(request.num_workers):
            waiting = subprocess.Popen(["ray::IDLE", "600"], executable=os.environ["SLEEP"])
            pathlib.Path(os.environ["FOLDER_OF_TEST"], str(waiting.pid)).touch()
            ready = next(pathlib.Path(os.environ["TMPDIR"]).glob("raytrain-warm-*"))
            pathlib.Path(ready, str(waiting.pid)).touch()
""",
    "_private/authentication/grpc_authentication_client_interceptor": """
def _get_authentication_metadata_tuple():
    return ()
""",
}
VARIABLES = (
    '{"env_vars":{"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER":"0","RAY_TRAIN_METRICS_ENABLED":"0",'
    '"RAY_USAGE_STATS_ENABLED":"0","RAY_WARN_BLOCKING_GET_INSIDE_ASYNC":"0"}}'
)


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home and a stand-in for Ray; the files of the folder name the processes that it started."""
    for name, text in RAY.items():
        file = tmp_path / "packages" / "ray" / f"{name}.py"
        for folder in [file.parent, *file.parent.parents]:
            folder.mkdir(parents=True, exist_ok=True)
            if folder.name in ("packages", ""):
                break
            (folder / "__init__.py").touch()
        file.write_text(text)
    started = tmp_path / "started"
    temporary = tmp_path / "tmp"
    for folder in (started, temporary):
        folder.mkdir()
    for name, value in {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path / "packages"),
        "TMPDIR": str(temporary),
        "RAY_TMPDIR": str(temporary),
        "FOLDER_OF_TEST": str(started),
        "EXPECTED_VARIABLES": VARIABLES,
        "SLEEP": shutil.which("sleep") or "",
    }.items():
        monkeypatch.setenv(name, value)
    yield started
    main(["down", "--yes"])
    for process in started.iterdir():
        with suppress(ProcessLookupError):
            os.kill(int(process.name), signal.SIGKILL)


def test_up_keeps_processes_ready_and_starts_others_for_those_that_were_used(
    processes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--json"]) == 0
    kept = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert kept["address"] == "127.0.0.1:1"
    first = set(os.listdir(processes))
    assert len(first) == kept["num_processes"] > 1
    used = min(first)
    psutil.Process(int(used)).kill()
    while set(os.listdir(processes)) == first:  # the test's time limit ends this
        running()
    assert len(os.listdir(processes)) == len(first) + 1


def test_up_again_says_what_there_is_and_down_ends_it(processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_it_ends_when_nobody_has_used_it_for_a_while(processes: Path) -> None:
    kept = keep_warm(1 / 60)
    psutil.Process(kept.pid).wait(20)
    assert running() is None


def test_down_does_not_end_a_run_without_a_question(processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = keep_warm(60)
    used = WarmCluster.take()
    assert used is not None
    assert used.address() == kept.address
    assert WarmCluster.take() is None, "a second command starts a cluster of its own"
    assert main(["down"]) == 2
    assert "A command uses the Ray of `raytrain up`. End both? Nobody can be asked here; add --yes" in (
        capsys.readouterr().err
    )
    assert running() == kept
    used.close()
    assert main(["down"]) == 0


def test_it_is_not_idle_while_a_command_uses_it(processes: Path) -> None:
    kept = keep_warm(1 / 60)
    used = WarmCluster.take()
    assert used is not None
    with pytest.raises(psutil.TimeoutExpired):
        psutil.Process(kept.pid).wait(2.5)
    used.close()
    psutil.Process(kept.pid).wait(20)


def test_one_of_another_version_is_started_anew(processes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_it_is_not_used_for_other_gpus_nor_if_it_was_killed(processes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = keep_warm(60)
    with monkeypatch.context() as context:
        context.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert WarmCluster.take() is None
    keeper = psutil.Process(kept.pid)
    keeper.kill()
    keeper.wait(20)
    assert running() is None
    assert WarmCluster.take() is None


def test_what_keeps_ray_from_starting_is_said(processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (processes.parent / "packages" / "ray" / "_private" / "node.py").write_text("raise OSError('no space left')")
    assert main(["up"]) == 2
    assert "Ray could not start a cluster on this machine (OSError: no space left)" in capsys.readouterr().err


def test_processes_that_never_get_ready_are_not_waited_for_without_end(
    processes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raytrain.backends.ray import warm_keeper

    monkeypatch.setattr(warm_keeper, "start_processes", lambda *_: None)
    monkeypatch.setattr(warm_keeper, "_READY_WITHIN_S", 0.0)
    pool = warm_keeper.Pool("127.0.0.1:1", 2, processes)
    assert not pool.fill()
    with pytest.raises(UsageError, match="were not ready after 0 seconds"):
        pool.fill()


def test_the_idle_time_must_be_one(processes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--idle-minutes", "0"]) == 2
    assert "--idle-minutes is 0; give a number above 0" in capsys.readouterr().err


def test_a_cluster_of_ray_start_comes_first(
    processes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_cluster, "ray_start_address", lambda: "10.0.0.1:6379")
    assert main(["up"]) == 2
    assert "`ray start` answers at 10.0.0.1:6379" in capsys.readouterr().err


def test_the_command_that_keeps_it_outlives_up(processes: Path) -> None:
    subprocess.run([sys.executable, "-m", "raytrain", "up"], check=True, capture_output=True, timeout=60)
    kept = running()
    assert isinstance(kept, WarmRay)
    assert psutil.Process(kept.pid).ppid() != os.getpid()
