"""A run with killed processes ends with the weights of an undisturbed run, and uses each sample once an epoch."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import raytrain
from raytrain import UsageError
from raytrain.monitor.stop_request import request_stop
from raytrain.runs.outcome import StopReason
from raytrain.runs.records import read_run
from raytrain.storage.folder import FolderStore
from tests.helpers.faulty_runs import command, read_steps, summary_of
from tests.helpers.small_runs import assert_same_weights, config, loop_with
from tests.helpers.waiting import DEADLINE_S, wait_for

pytestmark = pytest.mark.slow

LAUNCH = {"ray": ("--address", "local"), "local": ("--backend", "local")}

Hurt = Callable[[raytrain.Run, raytrain.Batch, Path], None]


def once(marker: Path) -> bool:
    """Return True for the first caller only, over all processes and restarts of the run."""
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def two_deaths_in_a_row(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    for rank, step in ((0, 6), (1, 7)):
        if (run.rank, batch.step) == (rank, step) and once(folder / f"died-{rank}"):
            die()


def a_death_in_every_step(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    # On Ray, each start takes half a minute on a busy machine.
    num_deaths = 10 if run.config.backend == "local" else 3
    if batch.step < num_deaths and run.rank == batch.step % run.world_size and once(folder / f"died-{batch.step}"):
        die()


def an_exception(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    if run.rank == 1 and batch.step == 11 and once(folder / "raised"):
        raise RuntimeError("something broke")


def death_during_a_checkpoint(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    if run.rank == 0 and batch.step == 9:
        put = FolderStore.put

        def put_or_die(self: FolderStore, path: str, data: bytes) -> None:
            if path.endswith(".pt") and once(folder / "died"):
                put(self, path + ".half", data[: len(data) // 2])
                die()
            put(self, path, data)

        FolderStore.put = put_or_die


@pytest.mark.parametrize(
    ("hurt", "options"),
    [
        (two_deaths_in_a_row, {"checkpoint_every": ("1ep", "3st")}),
        (a_death_in_every_step, {"checkpoint_every": ("1ep", "1st"), "max_failures": 20}),
        (an_exception, {}),
        (death_during_a_checkpoint, {}),
    ],
)
def test_a_killed_worker_or_an_exception_does_not_change_the_weights(
    backend: str, hurt: Hurt, options: dict[str, Any], undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    loop = partial(loop_with, before_step=partial(hurt, folder=tmp_path))  # pyright: ignore
    result = raytrain.train(config(images, tmp_path, backend=backend, trace=True, **options), loop=loop)
    assert (result.status, result.samples_seen) == ("finished", 324)
    assert_same_weights(result, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
    steps = [row.step for row in read_run(str(tmp_path), "run").metrics if row.kind == "step"]
    assert steps == list(range(1, 21))


def kill_the_coordinator(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    import ray

    if (run.rank, batch.step) == (0, 6) and once(folder / "killed"):
        ray.kill(run.reporter._coordinator)  # pyright: ignore


@pytest.mark.usefixtures("ray_cluster")
def test_a_killed_coordinator_leaves_no_cpus_reserved(
    undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    loop = partial(loop_with, before_step=partial(kill_the_coordinator, folder=tmp_path))  # pyright: ignore
    result = raytrain.train(config(images, tmp_path, trace=True), loop=loop)  # its second start needs all CPUs
    assert_same_weights(result, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean


def test_a_preemption_notice_makes_a_checkpoint_before_the_node_is_removed(
    undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    summary = summary_of("tests.helpers.draining_cluster", images, tmp_path)
    assert (summary["status"], summary["samples_seen"]) == ("finished", 324)
    events = [text for text in summary["events"] if "taken away" in text or text.startswith("training on")]
    assert events == [
        "training on 2 workers",
        "a node of the workers will be taken away: writing a checkpoint now",
        "training on 1 worker, resuming after step 8",
    ]
    assert_same_weights(raytrain.TrainResult(**{name: summary[name] for name in undisturbed.summary()}), undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
    assert read_steps(tmp_path) == list(range(1, 21))


def test_a_stop_request_before_the_first_step_ends_the_run_which_can_be_resumed(
    backend: str, undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    options = config(images, tmp_path, backend=backend)
    handle = raytrain.start(options)
    handle.stop("too early")
    handle.stop("and again")
    stopped = handle.result(DEADLINE_S)
    assert (stopped.status, stopped.stop_reason) == ("stopped", StopReason("caller", "too early"))
    assert stopped.steps < 20
    with pytest.raises(UsageError, match="'run' is not training: it is stopped"):
        raytrain.stop("run", storage=str(tmp_path))
    resumed = raytrain.train(dataclasses.replace(options, resume=True))
    assert_same_weights(resumed, undisturbed)


def evaluate_until_asked_to_stop(run: raytrain.Run) -> None:
    """A loop whose first evaluation waits for a stop request."""

    def evaluate() -> dict[str, float]:
        if run.rank == 0 and run.progress.step == 5:
            wait_for(run.reporter.stop_requested)
        return {"accuracy": 0.0}

    loop_with(run, evaluate=evaluate)


def test_a_stop_request_during_an_evaluation_takes_effect_in_the_next_step(
    backend: str, images: Path, tmp_path: Path
) -> None:
    handle = raytrain.start(config(images, tmp_path, backend=backend), loop=evaluate_until_asked_to_stop)
    wait_for(lambda: handle.snapshot is not None and handle.snapshot.step >= 4)
    handle.stop("during the evaluation")
    stopped = handle.result(DEADLINE_S)
    assert (stopped.status, stopped.steps) == ("stopped", 6)


def with_own_evaluation(run: raytrain.Run, *, fails: bool) -> None:
    loop_with(run, evaluate=lambda: {"share": 1 / (not fails)})


def test_an_evaluation_of_the_loops_own_that_fails_loses_no_step(
    backend: str, undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    options = config(images, tmp_path, backend=backend, checkpoint_every=("none",))
    with pytest.raises(raytrain.TrainingFailed, match=r"ZeroDivisionError.*Its last checkpoint is kept"):
        raytrain.train(options, loop=partial(with_own_evaluation, fails=True))
    trained = max(row.step for row in read_run(str(tmp_path), "run").metrics)
    mended = raytrain.train(dataclasses.replace(options, resume=True), loop=partial(with_own_evaluation, fails=False))
    measured = [row.step for row in read_run(str(tmp_path), "run").metrics if row.kind == "evaluation"]
    assert measured[0] == trained, "the evaluation that had failed is made up for"
    assert_same_weights(mended, undisturbed)


class DiesAfterEvaluation:
    """State that ends its process, once, when it is saved after an evaluation."""

    def __init__(self, marker: Path) -> None:
        self.marker, self.has_evaluated = marker, False

    def evaluate(self) -> dict[str, float]:
        self.has_evaluated = True
        return {"accuracy": 0.5}

    def state_dict(self) -> dict[str, int]:
        if self.has_evaluated and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def with_dying_state(run: raytrain.Run, *, marker: Path) -> None:
    state = run.prepare(DiesAfterEvaluation(marker))
    loop_with(run, evaluate=state.evaluate)


def test_a_worker_that_is_killed_between_an_evaluation_and_its_checkpoint_leaves_one_row_of_it(
    backend: str, images: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "killed"
    options = config(images, tmp_path / "runs", backend=backend, epochs=2)
    assert raytrain.train(options, loop=partial(with_dying_state, marker=marker)).status == "finished"
    rows = read_run(str(tmp_path / "runs"), "run").metrics
    assert marker.exists() and [row.step for row in rows if row.kind == "evaluation"] == [5, 10]


def test_a_run_whose_raylet_was_killed_says_so_and_keeps_its_checkpoint(images: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    endless = command(images, tmp_path, "--epochs", "1000", *LAUNCH["ray"])
    driver = subprocess.Popen(endless, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(list((tmp_path / "run" / "checkpoints").glob("*.pt.json"))) > 1 and is_known(tmp_path))
    [raylet] = [each for each in psutil.Process(driver.pid).children(recursive=True) if each.name() == "raylet"]
    raylet.kill()
    _, errors = driver.communicate(timeout=DEADLINE_S)
    *_, sentence = errors.splitlines()
    assert re.match(
        r"raytrain: Run 'run' failed: Ray's process on this machine, the raylet, has died, .+\. "
        r"Its last checkpoint is kept: resume with raytrain train --name run .+ --resume",
        sentence,
    ), errors
    assert driver.returncode == 1
    assert read_run(str(tmp_path), "run").status.status == "failed"
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt.json"))


def test_workers_that_outlive_their_driver_leave_no_temporary_file(images: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(temporary)}
    endless = command(images, tmp_path, "--epochs", "1000", *LAUNCH["local"])
    driver = subprocess.Popen(endless, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: is_known(tmp_path))
    [agent] = [
        each for each in psutil.Process(driver.pid).children() if "raytrain.launch.local.agent" in each.cmdline()
    ]
    workers = agent.children()
    agent.suspend()  # it would end the workers before they notice
    driver.kill()
    driver.wait()
    wait_for(lambda: all(worker.status() == psutil.STATUS_ZOMBIE for worker in workers))
    agent.resume()
    wait_for(lambda: not agent.is_running())
    assert not list(temporary.glob("pytorch-*"))


def test_a_run_whose_driver_was_killed_can_be_resumed(
    backend: str, undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    endless = command(images, tmp_path, "--epochs", "1000", "--trace", *LAUNCH[backend])
    driver = subprocess.Popen(endless, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list((tmp_path / "run" / "checkpoints").glob("*.pt.json"))) > 1 and is_known(tmp_path))
    driver.kill()
    driver.wait()
    assert read_run(str(tmp_path), "run").status.status == "interrupted"
    done = len(read_steps(tmp_path))
    ended = raytrain.train(
        config(images, tmp_path, backend=backend, resume=True, trace=True, epochs=1000, max_steps=max(done, 20) + 5)
    )
    assert ended.status == "finished" and ended.steps == max(done, 20) + 5
    assert raytrain.audit("run", storage=str(tmp_path)).clean
    assert read_steps(tmp_path) == list(range(1, ended.steps + 1))


def is_known(folder: Path) -> bool:
    with suppress(UsageError):
        read_run(str(folder), "run")
        return True
    return False


def ask_for_a_stop(run: raytrain.Run, folder: Path) -> None:
    """Request a stop, once the run is in storage, and return when the request has arrived at this worker."""
    wait_for(partial(is_known, folder))
    request_stop(str(folder), "run", StopReason("caller", "enough"))
    wait_for(run.reporter.stop_requested)


def stop_in(run: raytrain.Run, batch: raytrain.Batch, folder: Path, step: int) -> None:
    (folder / f"rank-{run.rank}").write_text(str(batch.step + 1))
    if (run.rank, batch.step + 1) == (0, step):
        ask_for_a_stop(run, folder)


# Until the first step has ended, a run ends at once. An epoch has five: the stop comes within it, at its end, and after
# the first step of the next one.
@pytest.mark.parametrize("step", [2, 4, 5])
def test_a_stop_request_in_any_step_stops_all_workers_after_the_same_step(
    backend: str, step: int, undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    loop = partial(loop_with, before_step=partial(stop_in, folder=tmp_path, step=step))  # pyright: ignore
    stopped = raytrain.train(config(images, tmp_path, backend=backend, trace=True), loop=loop)
    assert (stopped.status, stopped.stop_reason, stopped.steps) == ("stopped", StopReason("caller", "enough"), step + 1)
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)] == [str(step + 1)] * 2
    resumed = raytrain.train(config(images, tmp_path, backend=backend, trace=True, resume=True, workers=1))
    assert_same_weights(resumed, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
    assert read_steps(tmp_path) == list(range(1, 21))


def stop_during_a_checkpoint(run: raytrain.Run, batch: raytrain.Batch, folder: Path) -> None:
    if (run.rank, batch.step) == (0, 2):
        put = FolderStore.put

        def ask_and_put(self: FolderStore, path: str, data: bytes) -> None:
            if path.endswith(".pt") and once(folder / "asked"):
                ask_for_a_stop(run, folder)
            put(self, path, data)

        FolderStore.put = ask_and_put
    if (run.rank, batch.step) == (0, 3):
        wait_for(run.reporter.stop_requested)


def test_a_stop_request_during_a_checkpoint_is_obeyed(
    backend: str, undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    loop = partial(loop_with, before_step=partial(stop_during_a_checkpoint, folder=tmp_path))  # pyright: ignore
    stopped = raytrain.train(
        config(images, tmp_path, backend=backend, trace=True, checkpoint_every=("1ep", "3st")), loop=loop
    )
    assert (stopped.status, stopped.steps) == ("stopped", 5)
    resumed = raytrain.train(config(images, tmp_path, backend=backend, trace=True, resume=True))
    assert_same_weights(resumed, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean


@pytest.mark.usefixtures("ray_cluster")
def test_the_stop_command_finds_a_run_by_its_cluster_from_any_folder(images: Path, tmp_path: Path) -> None:
    import ray

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = [sys.executable, "-m", "raytrain", "stop", "run", "--address", ray.get_runtime_context().gcs_address]
    words += ["--storage", str(tmp_path)]
    asking = partial(
        subprocess.run,
        words,
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
    )
    handle = raytrain.start(config(images, tmp_path, epochs=1000))
    wait_for(lambda: handle.done or (handle.snapshot is not None and handle.snapshot.step > 2))
    asked = asking()
    assert asked.returncode == 0, asked.stderr
    stopped = handle.result(DEADLINE_S)
    assert stopped.status == "stopped" and stopped.stop_reason == StopReason("command", socket.gethostname())
    again = asking()
    assert again.returncode == 2 and "No run called 'run' is training in the cluster" in again.stderr


def refuse(run: raytrain.Run, batch: raytrain.Batch) -> None:
    raise UsageError("This loop wants another learning rate.")


@pytest.mark.usefixtures("ray_cluster")
def test_a_failed_run_releases_its_resources_in_the_cluster(images: Path, tmp_path: Path) -> None:
    import ray

    with pytest.raises(raytrain.TrainingFailed, match=r"^Run 'run' failed: This loop wants another learning rate\. "):
        raytrain.train(config(images, tmp_path), loop=partial(loop_with, before_step=refuse))
    groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
    assert {group["state"] for group in groups.values()} == {"REMOVED"}


@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_cannot_be_scheduled_are_reported_within_a_minute(images: Path, tmp_path: Path) -> None:
    import ray

    @ray.remote(num_cpus=1.5)
    class Other:
        def ready(self) -> None: ...

    other = Other.remote()
    ray.get(other.ready.remote())  # pyright: ignore
    started = threading.Event()
    try:
        with pytest.raises(UsageError, match=r"no room for 2 workers of 0.5 CPUs each: the cluster has 0.5 CPUs free"):
            raytrain.train(config(images, tmp_path), view=lambda snapshot: started.set() if snapshot.step else None)
    finally:
        ray.kill(other)  # pyright: ignore
    assert not started.is_set()


def test_data_tasks_that_find_no_room_are_reported_and_the_run_goes_on_when_there_is_some(
    undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    summary = summary_of("tests.helpers.busy_cluster", images, tmp_path)
    (sentence,) = summary["waits"]
    assert re.search("a task that reads them takes 0.5, and the cluster has 0 of . free, while", sentence), sentence
    assert summary["status"] == "finished"
    assert_same_weights(raytrain.TrainResult(**{name: summary[name] for name in undisturbed.summary()}), undisturbed)


def test_an_elastic_run_gains_and_loses_workers_with_their_nodes(
    undisturbed: raytrain.TrainResult, images: Path, tmp_path: Path
) -> None:
    summary = summary_of("tests.helpers.elastic_cluster", images, tmp_path)
    assert (summary["status"], summary["samples_seen"]) == ("finished", 324)
    assert [number for number in summary["num_workers_seen"] if number] == [1, 2, 1]
    assert_same_weights(raytrain.TrainResult(**{name: summary[name] for name in undisturbed.summary()}), undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
