"""The cluster that raytrain starts on this machine, with a stand-in for Ray."""

import errno
import os
import secrets
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from raytrain.errors import UsageError
from raytrain.launch.ray import cluster_watch
from raytrain.launch.ray.cluster_watch import LogRoomCheck
from raytrain.launch.ray.own_cluster import LocalCluster

pytestmark = pytest.mark.not_quick

NODE = """
import pathlib
tries = pathlib.Path(__file__).with_name("tries")
errors = {errors!r}

class Node:
    def __init__(self, *args, **options):
        n = int(tries.read_text()) if tries.exists() else 0
        tries.write_text(str(n + 1))
        if n < len(errors):
            raise Exception(errors[n])
        self.gcs_address = f"127.0.0.1:{{n}}"
"""
TOO_SLOW = "The current node timed out during startup. This could happen because the GCS has become overloaded."

NODE_OF = """
import subprocess

class Node:
    def __init__(self, *args, **options):
        self.processes = [subprocess.Popen([program, "20"]) for program in {programs!r}]
        self.gcs_address = " ".join(str(process.pid) for process in self.processes)
"""
ENDS_SILENTLY = """
import os, signal, sys
from raytrain.launch.ray.own_cluster import LocalCluster

cluster = LocalCluster({"PYTHONPATH": sys.argv[1]})
for process in cluster.address().split():
    if sys.argv[2] != "driver":
        os.kill(int(process), signal.SIGKILL)
if sys.argv[2] == "told":
    cluster.close()
os._exit(1)  # as Ray does when a call does not reach the raylet
"""


def put_stand_in(folder: Path, node: str) -> None:
    """Put a Ray with this code of its node into ``folder``."""
    private = folder / "ray" / "_private"
    private.mkdir(parents=True)
    (private.parent / "__init__.py").touch()
    (private / "parameter.py").write_text("RayParams = dict")
    (private / "node.py").write_text(node)


def start(folder: Path, *errors: str) -> str:
    """The address of a cluster whose Ray raises ``errors`` at its first tries."""
    put_stand_in(folder, NODE.format(errors=list(errors)))
    before = dict(os.environ)
    cluster = LocalCluster({"PYTHONPATH": str(folder)})
    try:
        return cluster.address()
    finally:
        cluster.close()
        assert dict(os.environ) == before, "a cluster that is closed leaves no variable behind"


def test_a_cluster_that_was_too_slow_is_started_again(tmp_path: Path) -> None:
    assert start(tmp_path, TOO_SLOW, TOO_SLOW) == "127.0.0.1:2"


@pytest.mark.parametrize(
    ("error", "load", "tries", "sentence"),
    [
        (TOO_SLOW, 1e4, 3, r"in 3 tries of 30 s, while some 10000 processes shared its \d+ cores?; .* --backend local"),
        (TOO_SLOW, 0.0, 3, r"its \d+ cores? are not busy, so its disk may be slow; set RAY_TMPDIR, .* --backend local"),
        ("no space left on device", 0.0, 1, r"a cluster on this machine \(.*no space left on device\)"),
    ],
)
def test_a_cluster_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, load: float, tries: int, sentence: str
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    with pytest.raises(UsageError, match=sentence):
        start(tmp_path, *[error] * tries)
    assert int((tmp_path / "ray" / "_private" / "tries").read_text()) == tries


@pytest.mark.parametrize(
    ("killed", "names", "sentence"),
    [
        ("raylet", ["raylet"], "raytrain: Ray's process on this machine, the raylet, has died, "),
        ("head", ["raylet", "gcs_server"], "raytrain: Ray's head on this machine, the gcs_server, has died, "),
        ("told", ["raylet"], ""),  # a driver that ends by itself has said why
        ("driver", ["raylet"], ""),
    ],
)
def test_a_driver_that_ray_ends_without_a_word_gets_a_sentence(
    tmp_path: Path, killed: str, names: list[str], sentence: str
) -> None:
    for name in names:
        os.symlink(shutil.which("sleep") or "", tmp_path / name)
    put_stand_in(tmp_path, NODE_OF.format(programs=[str(tmp_path / name) for name in names]))
    driver = [sys.executable, "-c", ENDS_SILENTLY, str(tmp_path), killed]
    done = subprocess.run(driver, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.stderr.startswith(sentence) and len(done.stderr.splitlines()) == bool(sentence), done.stderr


def test_a_run_that_stands_still_while_the_disk_is_full_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.0, 0.0, 300.0, 301.0, 302.0, 500.0])
    monkeypatch.setattr(cluster_watch.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2_000))  # pyright: ignore
    check = LogRoomCheck(str(tmp_path))
    for step in (0, 1, 2, 2):
        check.check(step)
    with pytest.raises(UsageError, match=rf"The disk of {tmp_path} has 0\.0 MB free, and Ray needs .* RAY_TMPDIR"):
        check.check(2)


def test_a_full_disk_is_named_before_a_process_of_ray_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=200_000))  # pyright: ignore
    before = dict(os.environ)
    with pytest.raises(
        UsageError, match=rf"The disk of {tmp_path} has 0.2 MB free, and Ray needs 10 MB there .* RAY_TMPDIR"
    ):
        LocalCluster({})
    assert dict(os.environ) == before


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.write_text("a file, in which nobody can make a folder")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(UsageError, match=r"auth_token \(Not a directory\); set RAY_AUTH_TOKEN"):
        LocalCluster({})


def test_a_home_that_cannot_be_looked_into_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/" + "long" * 99)  # also root gets an error
    with pytest.raises(UsageError, match=r"auth_token \(File name too long\); set RAY_AUTH_TOKEN"):
        LocalCluster({})


def test_the_token_of_a_process_that_was_faster_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(num_bytes: int) -> str:
        (tmp_path / ".ray" / "auth_token").write_text("of the other process")
        return "ours"

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(secrets, "token_hex", slowly)
    LocalCluster({}).close()
    (token,) = (tmp_path / ".ray").iterdir()
    assert token.read_text() == "of the other process"


def test_a_token_is_there_in_full_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(num_bytes: int) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(secrets, "token_hex", fail)
        with pytest.raises(UsageError, match=r"auth_token \(No space left on device\)"):
            LocalCluster({})
    assert not list((tmp_path / ".ray").iterdir()), "Ray starts no head with an empty token"
    LocalCluster({}).close()
    (token,) = (tmp_path / ".ray").iterdir()
    assert len(token.read_text()) == 64 and stat.S_IMODE(token.stat().st_mode) == 0o600
