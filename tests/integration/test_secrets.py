"""Secrets never appear: all commands run with credentials, which are then searched for in every place."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from raytrain.demo.demo import render_digits
from raytrain.demo.s3_server import S3Server
from tests.helpers.ray_head import RAY, Head, started_head
from tests.helpers.waiting import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

RAYTRAIN = [sys.executable, "-m", "raytrain"]
LISTINGS = ("actors", "tasks", "jobs", "nodes", "workers", "objects", "runtime_envs", "placement_groups")
PAGES = [
    *(f"/api/v0/{each}?detail=1&limit=10000" for each in LISTINGS),
    "/api/jobs/",
    "/logical/actors",
    "/nodes?view=summary",
    "/api/train/v2/runs/v1",
]
LOOP = """
def fail(run):
    keys = dict(run.config.__dict__)
    for epoch in run.epochs():
        raise RuntimeError("the loop is broken")
"""


class Commands:
    """Runs commands, and records their output and the command lines of all processes meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.printed: list[str] = []
        self.command_lines: set[str] = set()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._keep_command_lines)

    def __enter__(self) -> Commands:
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watch.join()

    def run(self, environment: Mapping[str, str], *words: str, fails: bool = False) -> str:
        done = subprocess.run(
            [*words], env=environment, cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        self.printed += [done.stdout, done.stderr]
        return done.stdout + done.stderr

    def _keep_command_lines(self) -> None:
        while not self._over.wait(0.2):
            for process in psutil.process_iter(["cmdline"]):
                self.command_lines.add(" ".join(process.info["cmdline"] or []))


class Searched:
    """The places to search, the secrets, and a decoy secret.

    The decoy was shown to the cluster on purpose: a search that does not find it proves nothing.
    """

    def __init__(self, head: Head, storages: list[Path], commands: Commands, keys: list[str], decoy: str) -> None:
        self.head = head
        self.storages = storages
        self.commands = commands
        self.decoy = decoy.encode()
        self.needles = [text for key in keys for text in _as_written(key)]

    def found_in(self, content: bytes) -> list[str]:
        return [needle.decode() for needle in self.needles if needle in content]


def _as_written(key: str) -> set[bytes]:
    # Base64 text depends on the position of the key modulo 3.
    in_base64 = {base64.b64encode(bytes(before) + key.encode())[4:-4] for before in range(3)}
    return {key.encode(), key.encode("utf-16-le"), *in_base64}


@pytest.fixture(scope="module")
def searched(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Searched]:
    """Run all commands, with credentials in the environment (and a session token), in a profile, and wrong ones."""
    folder = tmp_path_factory.mktemp("secrets")
    (folder / "loop.py").write_text(LOOP)
    render_digits(folder / "digits", num_images=200)
    for part in ("train", "test"):
        (folder / "digits" / part).rename(s3_server.directory / f"secret-{part}")
    (s3_server.directory / "secret-runs").mkdir()
    with pytest.MonkeyPatch.context() as without_keys:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            without_keys.delenv(name)
        with started_head(folder) as head, Commands(folder) as commands:
            keys = _use_everything(head, commands, s3_server, folder)
            yield Searched(head, [folder / "runs", s3_server.directory], commands, keys, _show_decoy(head, commands))


def _use_everything(head: Head, commands: Commands, server: S3Server, folder: Path) -> list[str]:
    known, token, wrong = server.environment(), secrets.token_hex(24), secrets.token_hex(20)
    keys = {**head.environment, **known, "AWS_SESSION_TOKEN": token}
    profile = {**head.environment, **_profile(folder, known)}
    train = [
        *RAYTRAIN,
        "train",
        "digits",
        "--data",
        "s3://secret-train",
        "--test-data",
        "s3://secret-test",
        "--workers",
        "2",
        "--epochs",
        "1",
    ]
    in_s3 = ("--storage", "s3://secret-runs")
    commands.run(profile, *RAYTRAIN, "doctor", "--data", "s3://secret-train")
    commands.run(keys, *train, *in_s3, "--name", "one", "--max-steps", "1")
    commands.run(profile, *train, *in_s3, "--name", "one", "--resume", "--cache", "none")
    commands.run(keys, *RAYTRAIN, "evaluate", "one", *in_s3, "--data", "s3://secret-test")
    commands.run(keys, *RAYTRAIN, "predict", "one", *in_s3, "--data", "s3://secret-test", "--output", "predictions.csv")
    broken = commands.run(
        keys, *train, "--name", "broken", "--loop", "loop.py:fail", "--max-failures", "0", "--debug", fails=True
    )
    assert "the loop is broken" in broken and "Traceback" in broken
    commands.run({**keys, "AWS_SECRET_ACCESS_KEY": wrong}, *train, "--name", "wrong", fails=True)
    with_profile = ["env", *(f"{name}={value}" for name, value in _profile(folder, known).items())]
    job = [*RAY, "job", "submit", "--address", head.dashboard, "--", *with_profile, *train]
    commands.run(head.environment, *job, "--name", "job", "--storage", str(folder / "runs"))
    return [known["AWS_SECRET_ACCESS_KEY"], token, wrong]


def _show_decoy(head: Head, commands: Commands) -> str:
    """Put a decoy into a job's runtime environment and print it, which raytrain never does with a secret."""
    decoy = secrets.token_hex(20)
    environment = json.dumps({"env_vars": {"DECOY": decoy}})
    job = [*RAY, "job", "submit", "--address", head.dashboard, "--runtime-env-json", environment, "--"]
    commands.run(head.environment, *job, "printenv", "DECOY")
    return decoy


def _profile(folder: Path, known: Mapping[str, str]) -> dict[str, str]:
    """Write a profile with the credentials, and return the variables that name it, which contain no secret."""
    keys = [f"{name.lower()} = {known[name]}" for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")]
    place = [f"region = {known['AWS_REGION']}", f"endpoint_url = {known['AWS_ENDPOINT_URL']}"]
    (folder / "credentials").write_text("\n".join(["[secret]", *keys]))
    (folder / "config").write_text("\n".join(["[profile secret]", *place]))
    return {
        "AWS_PROFILE": "secret",
        "AWS_SHARED_CREDENTIALS_FILE": str(folder / "credentials"),
        "AWS_CONFIG_FILE": str(folder / "config"),
    }


def session_folder(searched: Searched) -> Iterator[tuple[str, bytes]]:
    lines = (
        " ".join(process.cmdline()) for process in psutil.Process(searched.head.process.pid).children(recursive=True)
    )
    found = next(filter(None, (re.search(r"--session.dir=(\S+)", line) for line in lines)))
    return _files(Path(found[1]))


def storage(searched: Searched) -> Iterator[tuple[str, bytes]]:
    for folder in searched.storages:
        yield from _files(folder)


def dashboard(searched: Searched) -> Iterator[tuple[str, bytes]]:
    token = os.environ.get("RAY_AUTH_TOKEN") or (Path.home() / ".ray" / "auth_token").read_text().strip()
    for page in PAGES:
        request = urllib.request.Request(searched.head.dashboard + page, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            yield page, answer.read()


def printed(searched: Searched) -> Iterator[tuple[str, bytes]]:
    return ((text[:60], text.encode()) for text in searched.commands.printed)


def command_lines(searched: Searched) -> Iterator[tuple[str, bytes]]:
    return ((line[:60], line.encode()) for line in searched.commands.command_lines)


def memory_of_rays_servers(searched: Searched) -> Iterator[tuple[str, bytes]]:
    """Memory of the GCS, raylet and dashboard: they answer queries from it, and log parts of it in a crash."""
    for process in psutil.Process(searched.head.process.pid).children(recursive=True):
        if any(
            name in " ".join(process.cmdline())
            for name in ("gcs_server", "raylet/raylet ", "dashboard/dashboard.py", "agent.py")
        ):
            yield from ((f"{process.name()} {place}", content) for place, content in _memory(process.pid))


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    return ((str(path), path.read_bytes()) for path in sorted(folder.rglob("*")) if path.is_file())


def _memory(pid: int) -> Iterator[tuple[str, bytes]]:
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in maps:
            place, rights, *_ = line.split()
            start, stop = (int(each, 16) for each in place.split("-"))
            if rights.startswith("rw"):
                try:
                    memory.seek(start)
                    yield place, memory.read(stop - start)
                except OSError:
                    continue  # Some mappings cannot be read, such as devices.


@pytest.mark.parametrize("places", [session_folder, dashboard, printed, command_lines, memory_of_rays_servers])
def test_secrets_do_not_appear(places: Callable[[Searched], Iterator[tuple[str, bytes]]], searched: Searched) -> None:
    hits, is_decoy_found = [], False
    for name, content in places(searched):
        hits += [(name, each) for each in searched.found_in(content)]
        is_decoy_found = is_decoy_found or searched.decoy in content
    assert not hits
    assert is_decoy_found


def test_secrets_are_in_no_document_of_a_run(searched: Searched) -> None:
    names = set()
    for name, content in storage(searched):
        assert not searched.found_in(content), name
        names.add(Path(name).name)
    assert {"manifest.parquet", "config.json", "status.json", "summary.json", "metrics.jsonl"} <= names
    assert any(name.endswith(".pt") for name in names)


def test_a_submitted_job_finishes(searched: Searched) -> None:
    assert json.loads((searched.storages[0] / "job" / "summary.json").read_text())["status"] == "finished"
