"""A run whose coordinator is killed restarts by itself; its status stays active, and stop requests still work."""

from __future__ import annotations

import dataclasses
import json
import os
import pkgutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import raytrain
from raytrain import UsageError
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import request_stop
from raytrain.runs.documents import open_run
from raytrain.runs.outcome import StopReason, stop_reason_of
from raytrain.runs.status import read_status
from raytrain.storage.open import open_store
from tests.helpers.faulty_runs import command, read_steps
from tests.helpers.small_runs import assert_same_weights, config, put_images
from tests.helpers.waiting import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

KILL_THE_COORDINATOR = """
import os
import time
import psutil
from pathlib import Path
from raytrain.runs.outcome import StopReason
from raytrain.monitor.stop_request import request_stop
from tests.helpers.small_runs import loop_with
from tests.helpers.waiting import wait_for

FOLDER, STOP = Path({folder!r}), {stop!r}

def ask(run):
    request_stop(str(FOLDER), "run", StopReason("caller", "enough"))

def kill(run, batch):
    killed = FOLDER / "killed"
    if (run.rank, batch.step) == (0, 12) and not killed.exists():
        killed.write_text(str(os.getpid()))
        driver = psutil.Process().parent().parent()
        [victim] = [each for each in driver.children(recursive=True) if {victim!r} in each.cmdline()[0]]
        victim.kill()
        if {victim!r} == "gcs_server":
            time.sleep(300)  # without a head, the run could go on to its end
        if STOP == "before":
            ask(run)
    elif (run.rank, batch.step) == (0, 12) and STOP == "after" and killed.read_text() != str(os.getpid()):
        ask(run)
        wait_for(run.reporter.stop_requested)

def loop(run):
    loop_with(run, before_step=kill)
"""


def train_and_kill_coordinator(
    images: Path, storage: Path, stop: str = "", victim: str = "RayCoordinator"
) -> raytrain.TrainResult:
    """Train in a process whose coordinator, or another ``victim`` of its Ray's processes, is killed in step 13.

    A stop is requested ``before`` the driver notices, ``meanwhile`` (without a cluster), or ``after`` the restart.
    """
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    (storage / "loop.py").write_text(KILL_THE_COORDINATOR.format(folder=str(storage), stop=stop, victim=victim))
    options = [
        "--epochs",
        "4",
        "--trace",
        "--checkpoint-every",
        "5st",
        "--loop",
        str(storage / "loop.py") + ":loop",
    ]
    words = command(images, storage, *options, "--address", "local", "--json")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        seen = watch_status(driver, storage, ask=stop == "meanwhile")
        output, errors = driver.communicate(timeout=DEADLINE_S)
    assert driver.returncode == 0, errors
    assert (storage / "killed").exists()
    assert seen <= {"starting", "running", "stopped", "finished"}, "the run looks active until it ends"
    summary = json.loads(output.splitlines()[-1])
    fields = {field.name: summary[field.name] for field in dataclasses.fields(raytrain.TrainResult)}
    return raytrain.TrainResult(**{**fields, "stop_reason": stop_reason_of(summary)})


def watch_status(driver: subprocess.Popen[str], storage: Path, ask: bool) -> set[str]:
    """Return every status that storage shows until the run ends; if ``ask``, request a stop while it has no cluster."""
    seen: set[str] = set()
    while driver.poll() is None:
        with suppress(UsageError):  # The run does not exist yet.
            seen.add(read_status(open_run(str(storage), "run")).status)
            if ask and (storage / "killed").exists() and not has_cluster(driver):
                request_stop(str(storage), "run", StopReason("caller", "enough"))
                ask = False
        with suppress(subprocess.TimeoutExpired):
            driver.wait(0.05)
    assert not ask
    return seen


def has_cluster(driver: subprocess.Popen[str]) -> bool:
    return any(child.name() == "gcs_server" for child in psutil.Process(driver.pid).children())


@pytest.mark.parametrize("victim", ["RayCoordinator", "gcs_server"])
def test_a_run_whose_coordinator_or_own_head_was_killed_continues(
    victim: str, undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    result = train_and_kill_coordinator(images, tmp_path, victim=victim)
    assert (result.status, result.samples_seen) == ("finished", 324)
    assert_same_weights(result, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
    assert read_steps(tmp_path) == list(range(1, 21))


def test_a_coordinator_that_dies_while_the_workers_start_leaves_nothing_reserved(
    undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    import ray

    killed: list[str] = []
    reserved_before = ray.util.placement_group_table().keys()

    def reserved() -> list[str]:
        groups = ray.util.placement_group_table()
        return [group["state"] for name, group in groups.items() if name not in reserved_before]

    def kill(snapshot: Snapshot) -> None:
        if not killed and snapshot.status == "starting" and "CREATED" in reserved():
            named: Any = ray.util.list_named_actors(all_namespaces=True)
            [actor] = [each for each in named if each["name"].startswith("run:")]
            killed.append(actor["name"])
            ray.kill(ray.get_actor(**actor))

    result = raytrain.train(config(images, tmp_path, trace=True), view=kill)
    assert killed
    assert_same_weights(result, undisturbed)
    assert reserved() and set(reserved()) == {"REMOVED"}


@pytest.mark.parametrize(
    "stage", ["coordinator:lend_credentials", "feed.data_feed:DataFeed.connect", "ray_launch:TrainerThread"]
)
def test_a_coordinator_that_dies_while_the_driver_starts_is_started_again(
    stage: str, images: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages are patched, since only so is it sure that the coordinator dies in each of them."""
    import ray

    put_images(images, open_store(f"{s3_url}/images"))
    carry_out = pkgutil.resolve_name(f"raytrain.launch.ray.{stage}")
    killed: list[str] = []

    def kill_before(*arguments: Any, **named_arguments: Any) -> Any:
        if not killed:
            named: Any = ray.util.list_named_actors(all_namespaces=True)
            [actor] = [each for each in named if each["name"].startswith("run:")]
            killed.append(actor["name"])
            ray.kill(ray.get_actor(**actor))
        return carry_out(*arguments, **named_arguments)

    monkeypatch.setattr(f"raytrain.launch.ray.{stage.replace(':', '.')}", kill_before)
    result = raytrain.train(config(f"{s3_url}/images", f"{s3_url}/runs", epochs=1, trace=True))
    assert killed
    assert result.status == "finished"
    assert raytrain.audit("run", storage=f"{s3_url}/runs").clean


@pytest.mark.parametrize(
    ("stop", "last_steps"), [("before", range(10, 19)), ("meanwhile", range(10, 19)), ("after", range(13, 15))]
)
def test_a_run_whose_coordinator_was_killed_can_be_stopped(
    stop: str, last_steps: range, undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    stopped = train_and_kill_coordinator(images, tmp_path, stop)
    assert (stopped.status, stopped.stop_reason) == ("stopped", StopReason("caller", "enough"))
    assert stopped.steps in last_steps  # from 10, of which the last checkpoint is: it may end before it starts again
    assert stopped.samples_seen > 160
    resumed = raytrain.train(config(images, tmp_path, resume=True, trace=True))
    assert_same_weights(resumed, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
    assert read_steps(tmp_path) == list(range(1, 21))
