"""Training with --backend local: on this machine, without Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import raytrain
from raytrain.datasets.upload import upload
from raytrain.demo.demo import render_digits
from raytrain.demo.s3_server import S3Server
from raytrain.errors import UsageError
from raytrain.monitor.snapshot import Snapshot
from raytrain.recipes import digits
from raytrain.runs.logs import DRIVER, LogReader, worker_log
from raytrain.runs.outcome import StopReason
from raytrain.runs.records import read_run
from raytrain.storage.open import open_store
from raytrain.training.batches.batch import Batch
from raytrain.training.checkpoint import read_checkpoint
from raytrain.training.run import Run
from tests.helpers.waiting import wait_for


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render_digits(tmp_path_factory.mktemp("digits"), num_images=200)


def options(data: Path, storage: Path, **overrides: object) -> raytrain.TrainConfig:
    return digits(
        **{
            "data": str(data / "train"),
            "test_data": str(data / "test"),
            "storage": str(storage),
            "name": "run",
            "backend": "local",
            "workers": 2,
            "device": "cpu",
            "batch_size": 64,
            "epochs": 3,
            "log_every": 1,
            "batch_norm": "sync",
            "precision": "float64",
            **overrides,
        }
    )


def weights(result: raytrain.TrainResult) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint."""
    assert result.checkpoint is not None
    return read_checkpoint(open_store(result.run_dir), f"checkpoints/{Path(result.checkpoint).name}").state["model"]


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("bfloat16", 1e-5)])
def test_a_run_is_evaluated_in_the_precision_in_which_it_has_measured_itself_and_predicts_as_its_network_does(
    precision: str, tolerance: float, data: Path, tmp_path: Path
) -> None:
    run = raytrain.train(options(data, tmp_path, workers=1, precision=precision, epochs=1))
    found = raytrain.evaluate("run", storage=str(tmp_path))
    assert found.summary()["loss"] == pytest.approx(run.validation_loss, abs=tolerance)
    photo = next(data.rglob("*.png"))
    [predicted] = raytrain.predict("run", str(photo), storage=str(tmp_path)).table["score"].to_pylist()
    _, score = raytrain.load("run", storage=str(tmp_path)).classify(photo)
    assert predicted == pytest.approx(score, abs=1e-6)


def once(action: Callable[[Snapshot], None], ready: Callable[[Snapshot], bool]) -> Callable[[Snapshot], None]:
    """A view that acts on the first snapshot that is ready."""
    done = threading.Event()

    def view(snapshot: Snapshot) -> None:
        if not done.is_set() and ready(snapshot):
            done.set()
            action(snapshot)

    return view


FOUR_EPOCHS: dict[str, Any] = {"epochs": 4, "batch_size": 16, "checkpoint_every": ("1ep", "10st")}


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> raytrain.TrainResult:
    """Four epochs to which nothing happens."""
    return raytrain.train(options(data, tmp_path_factory.mktemp("whole"), **FOUR_EPOCHS))


@pytest.mark.slow
def test_a_run_that_stopped_in_an_epoch_resumes_on_another_number_of_workers(
    whole: raytrain.TrainResult, data: Path, tmp_path: Path
) -> None:
    assert (whole.status, whole.num_workers, whole.samples_seen) == ("finished", 2, 4 * 180)
    stopped = raytrain.train(options(data, tmp_path, **FOUR_EPOCHS, max_steps=16))  # in the middle of the second epoch
    assert stopped.steps == 16
    resumed = raytrain.train(options(data, tmp_path, **FOUR_EPOCHS, workers=1, resume=True))
    assert (resumed.status, resumed.samples_seen) == ("finished", 4 * 180)
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=1e-10)


def processes() -> list[psutil.Process]:
    """All that this process has started."""
    return psutil.Process().children(recursive=True)


def test_a_killed_worker_costs_a_restart_and_nothing_else(
    whole: raytrain.TrainResult, data: Path, tmp_path: Path
) -> None:
    before = processes()  # those of other tests, and the one that agents are forked from

    def kill(snapshot: Snapshot) -> None:
        workers = [each for each in processes() if each not in before and not each.children()]
        workers[-1].kill()

    lines: list[str] = []

    def view(snapshot: Snapshot) -> None:
        kill_once(snapshot)
        lines.extend(str(event) for _, _, event in snapshot.events)

    kill_once = once(kill, lambda snapshot: snapshot.step > 0)
    result = raytrain.train(options(data, tmp_path, **FOUR_EPOCHS), view=view)
    assert (result.status, result.samples_seen) == ("finished", 4 * 180)
    torch.testing.assert_close(weights(result), weights(whole), rtol=0, atol=1e-10)
    assert any(" was killed by SIGKILL" in line for line in lines)
    assert [each for each in processes() if each not in before] == []


def test_a_killed_agent_costs_a_restart_and_nothing_else(
    whole: raytrain.TrainResult, data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = processes()

    def kill(snapshot: Snapshot) -> None:
        started = [each for each in processes() if each not in before]
        (agent,) = (each for each in started if each.parent() not in started and each.children())
        agent.kill()

    result = raytrain.train(
        options(data, tmp_path, **FOUR_EPOCHS), view=once(kill, lambda snapshot: snapshot.step > 12)
    )
    assert (result.status, result.samples_seen) == ("finished", 4 * 180)
    torch.testing.assert_close(weights(result), weights(whole), rtol=0, atol=1e-10)
    assert "the process that starts the workers was killed by SIGKILL" in Path(tmp_path, "run/events.jsonl").read_text()
    assert "has lost the process that coordinates it or starts its workers; it restarts" in caplog.text
    assert [each for each in processes() if each not in before] == []


def killing_its_agent(run: Run, after: int = 0, sent: signal.Signals = signal.SIGKILL) -> None:
    """Kill the agent once, in the step after ``after`` others."""
    killed = Path(run.config.storage) / "killed"
    for number, _ in enumerate(train_on(run)):
        if run.rank == 0 and number == after and not killed.exists():
            killed.touch()
            if after:  # a run is known some steps after it has begun
                wait_for((Path(run.config.storage) / run.config.name / "config.json").exists)
            print("kills its agent")
            os.kill(os.getppid(), sent)
            time.sleep(60)  # cut short: a worker ends with its agent


def test_an_agent_that_is_killed_in_the_first_step_is_no_mistake_of_the_loop(data: Path, tmp_path: Path) -> None:
    result = raytrain.train(options(data, tmp_path, epochs=2), loop=killing_its_agent)
    assert (result.status, result.samples_seen) == ("finished", 2 * 180)


@pytest.mark.usefixtures("new_agents")
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGINT], ids=str)
def test_an_agent_that_is_killed_too_often_fails_the_run(
    sent: signal.Signals, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = rf"the process that starts the workers was killed by {sent.name}\."
    with pytest.raises(raytrain.TrainingFailed, match=rf"{killed} .* checkpoint is kept: resume with .*resume=True"):
        raytrain.train(options(data, tmp_path, max_failures=0), loop=partial(killing_its_agent, after=4, sent=sent))
    out, err = capfd.readouterr()
    assert "[worker0]:kills its agent" in out
    assert "Traceback" not in err and "death signal" not in err
    assert read_run(str(tmp_path), "run").status.status == "failed"


def failing(run: Run, after: int = 1, kind: type[BaseException] = RuntimeError) -> None:
    print(f"worker {run.rank} of {run.world_size}")
    for number, batch in enumerate(train_on(run)):
        if number == after:
            raise kind(f"this loop never works\nwith batch {batch.step}")


def speaking(run: Run) -> None:
    assert gc.isenabled(), "the process that it is forked from imports without"
    print("here I am")
    for _ in train_on(run):
        pass


@pytest.mark.usefixtures("new_agents")
def test_a_worker_of_a_short_run_collects_garbage_and_what_it_prints_is_kept_however_long_the_path_of_its_folder(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setenv("TMPDIR", str(long))
    assert raytrain.train(options(data, tmp_path, max_steps=1), loop=speaking).status == "finished"
    logs = LogReader(open_store(f"{tmp_path}/run"), worker_log(0)).read()
    assert [log.text for log in logs if log.stream == "out"] == ["here I am\n"]
    assert list(long.glob("raytrain-*")) == []


def train_on(run: Run) -> Iterator[Batch]:
    """The batches of a run, on each of which its network has been trained when the next one is asked for."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs():
        for batch in epoch:
            yield batch
            optimizer.zero_grad()
            run.loss(model(batch.images), batch.targets).backward()
            optimizer.step()


def test_a_loop_that_fails_twice_in_the_same_way_ends_the_run_with_its_own_words(data: Path, tmp_path: Path) -> None:
    expected = (
        r"failed after step 1: RuntimeError: this loop never works \(test_local_backend.py, line \d+: `raise kind"
    )
    with pytest.raises(raytrain.TrainingFailed, match=expected):
        raytrain.train(options(data, tmp_path, max_failures=3), loop=failing)
    assert read_run(str(tmp_path), "run").status.status == "failed"
    logs = [log for log in LogReader(open_store(f"{tmp_path}/run"), worker_log(1)).read() if log.stream == "out"]
    assert [log.text for log in logs] == ["worker 1 of 2\n"] * 2, "one for each start"
    [driver] = LogReader(open_store(f"{tmp_path}/run"), DRIVER).read()
    assert "worker_failed reason=its loop failed after step 1: RuntimeError: this loop never works" in driver.text
    assert "TrainingFailed: Run 'run' failed: its loop" in driver.text


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError])
def test_a_mistake_in_the_first_step_of_a_loop_costs_one_start(
    kind: type[BaseException], data: Path, tmp_path: Path
) -> None:
    name = kind.__name__
    expected = rf"its loop failed in its first step: {name}: this loop never works \(test_local_backend.py, line \d+"
    with pytest.raises(raytrain.TrainingFailed, match=rf"{expected}.*It has made no step"):
        raytrain.train(options(data, tmp_path, max_failures=3), loop=partial(failing, after=0, kind=kind))
    [driver] = LogReader(open_store(f"{tmp_path}/run"), DRIVER).read()
    assert "worker_failed" not in driver.text, "nothing was started again"


def gathering(run: Run) -> None:
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs():
        for batch in epoch:
            logits = model(batch.images)
            of_each = [torch.zeros_like(logits) for _ in range(run.world_size)]
            torch.distributed.all_gather(of_each, logits.detach())
            optimizer.zero_grad()
            run.loss(logits, batch.targets).backward()
            optimizer.step()


def test_a_collective_of_the_loops_own_with_other_shapes_on_a_worker_is_told_with_its_line(
    data: Path, tmp_path: Path
) -> None:
    expected = r"\(shapes \[1[56], 10\] and \[1[56], 10\]; test_local_backend.py, .*: `torch.distributed.all_gather"
    with pytest.raises(raytrain.TrainingFailed, match=expected):
        raytrain.train(options(data, tmp_path, batch_size=31), loop=gathering)
    [driver] = LogReader(open_store(f"{tmp_path}/run"), DRIVER).read()
    assert driver.text.count("worker_failed") == 1, "the second start said it"


@pytest.mark.parametrize("sent", [b"", pickle.dumps("/") + pickle.dumps(["a spec"])[:-3]], ids=["nothing", "a part"])
def test_an_agent_whose_driver_is_killed_before_the_run_begins_says_nothing(sent: bytes) -> None:
    agent = subprocess.run([sys.executable, "-m", "raytrain.launch.local.agent"], input=sent, capture_output=True)
    assert (agent.returncode, agent.stdout, agent.stderr) == (0, b"", b"")


@pytest.mark.slow  # a command of its own
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="it mounts a small /dev/shm")
def test_workers_that_cannot_be_started_are_one_sentence(data: Path, tmp_path: Path) -> None:
    mount_and_run = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"'
    command = [sys.executable, "-m", "raytrain", "train", "digits", "--data", str(data), "--storage", str(tmp_path)]
    options = ["--backend", "local", "--workers", "1", "--epochs", "1"]
    ended = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount_and_run, "", *command, *options], capture_output=True, text=True
    )
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip("this container mounts nothing")
    assert ended.returncode == 2, ended
    assert (
        "The workers cannot be started: OSError: [Errno 28] No space left on device; check that /dev/shm"
        in ended.stderr
    )
    assert "Traceback" not in ended.stderr and list(tmp_path.iterdir()) == []


def killed(run: Run) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leaving(run: Run, code: int, num_workers: int) -> None:
    if run.rank < num_workers:
        os._exit(code)
    for _ in train_on(run):
        pass


@pytest.mark.usefixtures("new_agents")
def test_nothing_but_the_sentence_is_printed_if_a_worker_is_killed(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(raytrain.TrainingFailed, match="was killed by SIGKILL"):
        raytrain.train(options(data, tmp_path, max_failures=0), loop=killed)
    assert "leak" not in capfd.readouterr().err, "the process that starts workers has torn down what they need"


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (partial(leaving, code=0, num_workers=2), "worker [01] exited with code 0 before its loop had returned"),
        (partial(leaving, code=1, num_workers=1), "worker 0 exited with code 1 before its loop had returned"),
    ],
)
def test_nothing_but_the_sentence_is_printed_if_workers_leave(
    loop: Callable[[Run], None], expected: str, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(raytrain.TrainingFailed, match=expected):
        raytrain.train(options(data, tmp_path, max_failures=0), loop=loop)
    assert "leak" not in capfd.readouterr().err, "the process that starts workers has torn down what they need"


def test_sigterm_stops_with_a_checkpoint(data: Path, tmp_path: Path) -> None:
    view = once(lambda _: os.kill(os.getpid(), signal.SIGTERM), lambda snapshot: snapshot.step > 0)
    result = raytrain.train(options(data, tmp_path, epochs=100_000), view=view)
    assert (result.status, result.stop_reason) == ("stopped", StopReason("signal", "SIGTERM"))
    assert result.checkpoint is not None
    assert Path(result.checkpoint).is_file()


def test_a_network_that_does_not_exist_is_refused_and_leaves_no_run(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="resnet81"):
        raytrain.train(options(data, tmp_path, model="resnet81"))
    assert not (tmp_path / "run").exists()


_OWN_TRANSFORMS = """
import random

import numpy as np
import torch


def moved(image):
    return image.roll(random.randrange(3) + np.random.randint(3) + int(torch.randint(3, ())), 2)


def own():
    return [moved, lambda image: image | random.randrange(64)]
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("own", [None, _OWN_TRANSFORMS], ids=["", "transforms"])
def test_a_run_moves_between_the_backends_and_keeps_its_weights(data: Path, tmp_path: Path, own: str | None) -> None:
    chosen: dict[str, Any] = {}
    if own is not None:
        (tmp_path / "mine.py").write_text(own)
        chosen = {"transforms": f"{tmp_path}/mine.py:own", "auto_augment": "randaugment"}
    whole = raytrain.train(options(data, tmp_path / "whole", **chosen))
    begun = raytrain.train(
        options(data, tmp_path / "parts", max_steps=2, **chosen)
    )  # each part ends in the middle of an epoch
    moved = raytrain.train(options(data, tmp_path / "parts", max_steps=5, resume=True, backend="ray", **chosen))
    back = raytrain.train(options(data, tmp_path / "parts", resume=True, **chosen))
    assert [begun.steps, moved.steps, back.steps] == [2, 5, whole.steps]
    assert (back.status, back.samples_seen) == ("finished", 3 * 180)
    torch.testing.assert_close(weights(back), weights(whole), rtol=0, atol=1e-10)


_READS_WHEN_IMPORTED = """
from raytrain.storage.open import open_store
from raytrain.training.loop import train as loop

store = open_store({url!r})
found = [each.path for each in store.list("")]
assert len(store.get_many(found[:5])) == 5
"""


def test_the_file_of_a_loop_may_read_the_bucket_when_it_is_imported(data: Path, tmp_path: Path, s3: S3Server) -> None:
    url = "s3://tests/read-when-imported"
    upload(str(data / "train"), url)
    (tmp_path / "reads.py").write_text(_READS_WHEN_IMPORTED.format(url=url))
    loop = f"{tmp_path / 'reads.py'}:loop"
    for cache in ("none", "memory"):
        config = options(data, tmp_path, epochs=1, workers=1, cache=cache, loop=loop, name=cache)
        assert raytrain.train(replace(config, data=url)).status == "finished"
