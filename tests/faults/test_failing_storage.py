"""Runs with a failing disk or network end with the weights of a healthy run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import TrainingFailed
from raytrain.demo.s3_server import S3Server
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.documents import EVENTS, open_run, read_config
from raytrain.runs.outcome import StopReason
from raytrain.runs.records import read_run
from raytrain.storage.open import open_store
from raytrain.storage.retries_and_hedges import MAX_THREADS
from tests.helpers.faulty_runs import Ballast, whole_steps
from tests.helpers.faulty_s3 import FAULTS, faulty_s3
from tests.helpers.small_runs import NUM_IMAGES, assert_same_weights, config, loop_with, put_images
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.slow

NUM_READING_TASKS = 2
"""Data tasks that run at the same time, with two workers on two CPUs."""
AWAY_S = 60.0


# Data behind a failing network.


@pytest.mark.parametrize(
    ("backend", "fraction", "seed", "silent_s", "max_requests_per_read"),
    # Clients give up a silent request after 30 s. If half of all requests fail, the run would do little but wait for
    # that, so the proxy is the one that gives up.
    [("local", 0.05, 0, 120.0, 1.2), ("ray", 0.05, 0, 120.0, 1.2), ("ray", 0.5, 5, 2.0, 3.0)],
    indirect=["backend"],
)
def test_failed_s3_requests_are_retried_and_counted(
    backend: str,
    fraction: float,
    seed: int,
    silent_s: float,
    max_requests_per_read: float,
    undisturbed: raytrain.TrainResult,
    images: Path,
    s3: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = f"s3://tests/failing-{fraction}"
    put_images(images, open_store(data))
    measured = read_config(open_store(undisturbed.run_dir))
    options = config(
        data,
        tmp_path,
        backend=backend,
        cache="none",
        evaluate_every=0,
        trace=True,
        mean=measured.mean,
        std=measured.std,
    )
    with faulty_s3(s3.endpoint_url, fraction, seed=seed, silent_s=silent_s) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        result = raytrain.train(options)
    assert all(proxy.outcomes[fault] for fault in FAULTS)
    assert (result.status, result.samples_seen, result.num_skipped) == ("finished", 324, 0)
    assert_same_weights(result, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
    # Each training image in 4 epochs, each validation image once, and 32 images that are looked at for black ones.
    num_reads = 324 + NUM_IMAGES - 81 + 32
    num_more = proxy.num_requests_for(".png") - num_reads  # also for answers that are slow, which is no retry
    assert 0 < result.num_retries <= num_more
    assert proxy.num_requests_for(".png") <= max_requests_per_read * num_reads
    assert backend == "local" or proxy.max_at_once <= NUM_READING_TASKS * MAX_THREADS


# A failing disk.


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A working disk of 2 MB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "raytrain-test", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(1024)):
                pass
        except OSError:
            pass


def make_read_only(disk: Path) -> None:
    while subprocess.run(["mount", "-o", "remount,ro", disk]).returncode:
        pass  # Another process is writing to it at this moment.


def free(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    (disk / "filler").unlink(missing_ok=True)
    (disk / "runs/run/status.json").unlink()  # It still says "running", because the failed run could not update it.


def hurt_disk(run: raytrain.Run, batch: raytrain.Batch, disk: Path, hurt: Any) -> None:
    if (run.rank, batch.step) == (0, 7):
        wait_for((disk / "runs/run/config.json").exists)  # the driver writes it meanwhile
        hurt(disk)


@pytest.mark.parametrize(
    ("hurt", "sentence"),
    [
        (fill, "The disk of {} is full; free space or choose another place"),
        (make_read_only, "{} is on a read-only disk; choose another place"),
    ],
)
def test_a_run_on_a_full_or_read_only_disk_keeps_its_last_checkpoint(
    backend: str, hurt: Any, sentence: str, undisturbed: raytrain.TrainResult, images: Path, disk: Path
) -> None:
    options = config(images, disk / "runs", backend=backend, checkpoint_every=("1ep", "3st"), trace=True)
    loop = partial(loop_with, before_step=partial(hurt_disk, disk=disk, hurt=hurt))  # pyright: ignore
    with pytest.raises(TrainingFailed) as raised:
        raytrain.train(options, loop=loop)
    said = str(raised.value)
    before, after = sentence.split("{}")
    assert said.startswith(f"Run 'run' failed: {before}{disk}/runs/run/") and after in said and "\n" not in said
    assert said.endswith(
        "Its last checkpoint is kept: resume with raytrain.train, the same loop, name='run' and resume=True"
    )
    assert max(whole_steps(options.storage)) in (5, 6)  # The disk fails while the checkpoint of step 6 is written.
    free(disk)
    resumed = raytrain.train(dataclasses.replace(options, resume=True))
    assert (resumed.status, resumed.samples_seen) == ("finished", 324)
    assert_same_weights(resumed, undisturbed)
    assert raytrain.audit("run", storage=options.storage).clean


# Storage behind a failing network.


class Away:
    """Resets or never answers requests, from the run's signal until it has trained on, for ``AWAY_S`` at least."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._since: float | None = None
        self.num_refused = 0

    def interfere(self, request: BaseHTTPRequestHandler, body: bytes) -> str | None:
        if not (self._folder / "go away").exists() or self.over:
            return None
        self._since = self._since or time.monotonic()
        self.num_refused += 1
        return ("reset", "stall")[self.num_refused % 2]

    @property
    def over(self) -> bool:
        lasted = self._since is not None and time.monotonic() - self._since > AWAY_S
        return lasted and (self._folder / "trained on").exists()


def train_on_without_storage(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    for step, note in ((6, "go away"), (19, "trained on")):
        if (run.rank, batch.step) == (0, step):
            (folder / note).touch()


def test_a_run_continues_while_its_storage_is_down_and_writes_its_checkpoints_later(
    backend: str,
    undisturbed: raytrain.TrainResult,
    images: Path,
    s3: S3Server,
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    away = Away(tmp_path)
    with faulty_s3(s3.endpoint_url, interfere=away.interfere) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        hook = partial(train_on_without_storage, folder=tmp_path)
        options = config(images, s3_url, backend=backend, checkpoint_every=("4st",))
        result = raytrain.train(options, loop=partial(loop_with, before_step=hook))  # pyright: ignore
        assert (result.status, result.steps) == ("finished", 20)
        assert away.over and away.num_refused
        assert result.seconds > AWAY_S
        assert_same_weights(result, undisturbed)
        assert whole_steps(s3_url)[-1] == 20
        events = [json.loads(line) for line in open_run(s3_url, "run").get(EVENTS).splitlines()]
        written = [event["step"] for event in events if event["kind"] == "checkpoint_written"]
        skipped = [event["step"] for event in events if event["kind"] == "checkpoint_skipped"]
        assert sorted([*written, *skipped]) == [4, 8, 12, 16, 20] and skipped[-2:] == [12, 16]
        steps = [row.step for row in read_run(s3_url, "run").metrics if row.kind == "step"]
        assert steps == list(range(1, 21))


class Hanging:
    """Answers no request from the run's signal on, until the run has stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_unanswered = 0

    def interfere(self, request: BaseHTTPRequestHandler, body: bytes) -> str | None:
        if not (self._folder / "hang").exists() or (self._folder / "landed").exists():
            return None
        self.num_unanswered += 1
        return "stall"


def hang_and_wait_for_the_stop(run: raytrain.Run, folder: Path) -> None:
    """From step 7 on, storage hangs; step 10 waits for the stop, without which the run is over after step 20."""

    def before_step(run: raytrain.Run, batch: raytrain.Batch) -> None:
        if batch.step == 7:
            (folder / "hang").touch()
        if (run.rank, batch.step) == (0, 10):
            wait_for(run.reporter.stop_requested)

    loop_with(run, before_step)
    (folder / "landed").touch()


def test_a_stop_lands_while_storage_hangs_and_its_checkpoint_is_written_later(
    backend: str, images: Path, s3: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, signals = Hanging(tmp_path), StopSignals()

    def stop(snapshot: Snapshot) -> None:
        if hanging.num_unanswered:
            signals.request_stop(StopReason("caller", "enough"))

    with faulty_s3(s3.endpoint_url, interfere=hanging.interfere) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        loop = partial(hang_and_wait_for_the_stop, folder=tmp_path)  # pyright: ignore
        options = config(images, s3_url, backend=backend, checkpoint_every=(), evaluate_every=0)
        stopped = raytrain.train(options, loop=loop, view=stop, signals=signals)
        assert (stopped.status, stopped.stop_reason) == (
            "stopped",
            StopReason("caller", "enough"),
        ) and 7 < stopped.steps < 20
        assert whole_steps(s3_url)[-1] == stopped.steps


def heavy_loop(run: raytrain.Run, folder: Path) -> None:
    if run.rank == 0:
        (folder / "pid").write_text(str(os.getpid()))
    run.prepare(Ballast())
    loop_with(run)


def test_a_worker_killed_during_a_checkpoint_upload_leaves_the_previous_checkpoint(
    backend: str,
    undisturbed: raytrain.TrainResult,
    images: Path,
    s3: S3Server,
    s3_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed = threading.Event()

    def kill(request: BaseHTTPRequestHandler, body: bytes) -> str | None:
        if request.command == "PUT" and "step-000000010.pt?partNumber=2" in request.path and not killed.is_set():
            killed.set()
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            return "reset"
        return None

    with faulty_s3(s3.endpoint_url, interfere=kill) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        loop = partial(heavy_loop, folder=tmp_path)  # pyright: ignore
        result = raytrain.train(config(images, s3_url, backend=backend, trace=True), loop=loop)
        assert killed.is_set() and (result.status, result.samples_seen) == ("finished", 324)
        assert_same_weights(result, undisturbed)
        assert whole_steps(s3_url)[-2:] == [15, 20]
        assert raytrain.audit("run", storage=s3_url).clean
