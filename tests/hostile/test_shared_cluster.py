"""A cluster that others use, too: who gets keys, whose run is stopped, and what an error leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import UsageError
from raytrain.monitor.document_writer import DocumentWriter
from raytrain.monitor.snapshot import START, Snapshot
from raytrain.runs.outcome import StopReason
from raytrain.storage.open import open_store
from tests.helpers.small_runs import config, put_images
from tests.helpers.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


class Thief:
    """A view that asks every actor with a name for credentials, as anybody in the cluster can."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.stolen: list[Any] = []

    def __call__(self, snapshot: object) -> None:
        import ray

        found: Any = ray.util.list_named_actors(all_namespaces=True)  # pyright: ignore
        for named in found:
            actor: Any = ray.get_actor(named["name"], namespace=named["namespace"])
            for words in ([], ["guess"]):
                self._ask(actor, words)

    def _ask(self, actor: Any, words: list[str]) -> None:
        import ray
        from ray.exceptions import RayError

        try:
            self.stolen.append(ray.get(actor.credentials.remote(*words)))
        except (TypeError, AttributeError, RayError):
            self.num_asked += 1


def test_a_run_in_folders_lends_no_keys(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE1234")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    thief = Thief()
    assert raytrain.train(config(images, tmp_path, epochs=1), view=thief).status == "finished"
    assert (thief.stolen, thief.num_asked > 0) == ([], True)


def test_keys_of_a_run_in_s3_go_to_its_own_processes_only(images: Path, s3_url: str) -> None:
    put_images(images, open_store(f"{s3_url}/images"))
    thief = Thief()
    result = raytrain.train(config(f"{s3_url}/images", f"{s3_url}/runs", epochs=1, cache="none"), view=thief)
    assert result.status == "finished"
    assert (thief.stolen, thief.num_asked > 0) == ([], True)


def test_runs_of_the_same_name_in_different_storages_do_not_meet(tmp_path: Path) -> None:
    import ray

    from raytrain.launch.ray.coordinator import request_stop_in_cluster, start_coordinator, stop_coordinator

    def start(storage: str) -> Any:
        store = open_store(str(tmp_path / storage / "first"))
        return start_coordinator("first", store, num_steps=10, steps_per_epoch=5, num_workers=1)

    def stop_request(coordinator: Any) -> StopReason | None:
        snapshot: Snapshot = ray.get(coordinator.snapshot.remote(START))
        return snapshot.stop_request

    mine, other = start("mine"), start("other")
    try:
        with pytest.raises(UsageError, match=r"^Run 'first' is training in this cluster already; "):
            start("mine")
        request_stop_in_cluster("first", str(tmp_path / "mine"), "here", StopReason("caller", "enough"))
        assert stop_request(mine) == StopReason("caller", "enough")
        assert stop_request(other) is None
        with pytest.raises(
            UsageError, match=r"No run called 'first' is training in the cluster at here with --storage"
        ):
            request_stop_in_cluster("first", str(tmp_path / "third"), "here", StopReason("caller", "enough"))
    finally:
        stop_coordinator(mine)
        stop_coordinator(other)


class Injected(Exception):
    """The error that a test puts into the opening of a run."""


def fail(*_: object, **__: object) -> None:
    raise Injected


# What opens a run or a sweep. Nothing outside fails exactly there, so the tests replace these by their names.
RUN_STAGES = [
    "raytrain.launch.ray.coordinator.lend_credentials",
    "raytrain.launch.ray.feed.data_feed.DataFeed.connect",
    "raytrain.launch.ray.ray_launch.TrainerThread",
    "raytrain.launch.ray.feed.data_feed.CacheFiller",
    "raytrain.data.dataset.Dataset.write",
    "raytrain.monitor.document_writer.DocumentWriter.begin",
]
SWEEP_STAGES = [
    "raytrain.launch.ray.coordinator.lend_credentials",
    "raytrain.launch.ray.feed.data_feed.DataFeed.connect",
    "raytrain.launch.ray.feed.data_feed.CacheFiller",
    "raytrain.experiments.sweep_session.ThreadPoolExecutor",
]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Afterwards no actor with a name, no reserved CPU and no thread of a run is left, at once."""
    import ray

    yield
    wait_for(lambda: not left_behind() and ray.available_resources().get("CPU") == 2, "something is left", 10)


def left_behind() -> list[str]:
    import ray

    groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
    actors: Any = ray.util.list_named_actors(all_namespaces=True)  # pyright: ignore
    threads = [each.name for each in threading.enumerate()]
    return [
        *(str(named) for named in actors if named["namespace"] == "raytrain"),  # Ray keeps some of its own
        *(f"placement group {each['state']}" for each in groups.values() if each["state"] != "REMOVED"),
        *(each for each in threads if each.startswith(("stream", "cache", "trainer", "trial"))),
    ]


@pytest.mark.parametrize("stage", RUN_STAGES, ids=lambda stage: stage.rpartition(".")[2])
def test_an_error_while_a_run_is_opened_leaves_nothing(
    stage: str, nothing_left: None, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import raytrain.launch.ray.ray_launch  # pyright: ignore[reportUnusedImport] ; so that its names can be replaced

    monkeypatch.setattr(stage, fail)
    with pytest.raises(Injected):
        raytrain.train(config(images, tmp_path, cache="none", epochs=1000))


def test_feeders_end_with_a_start_that_fails_after_theirs(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no names, and live as long as somebody, such as a notebook, keeps the error."""
    from raytrain.launch.ray.feed import data_feed

    ended: list[object] = []
    stop_feeders = data_feed.stop_feeders
    monkeypatch.setattr(data_feed, "stop_feeders", lambda feeders: stop_feeders(ended.extend(feeders) or feeders))
    monkeypatch.setattr("raytrain.launch.ray.ray_launch.TrainerThread", fail)
    with pytest.raises(Injected):
        raytrain.train(config(images, tmp_path, cache="none", epochs=1000))
    assert len(ended) == 1


@pytest.mark.parametrize("stage", SWEEP_STAGES, ids=lambda stage: stage.rpartition(".")[2])
def test_an_error_while_a_sweep_is_opened_leaves_nothing(
    stage: str, nothing_left: None, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import raytrain.launch.ray.feed.data_feed  # pyright: ignore[reportUnusedImport] ; see above

    monkeypatch.setattr(stage, fail)
    with pytest.raises(Injected):
        raytrain.sweep(config(images, tmp_path, workers="auto"), vary=["learning-rate=0.01,0.1"])


def test_the_next_try_of_a_run_that_could_not_be_opened_succeeds(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import raytrain.launch.ray.ray_launch  # pyright: ignore[reportUnusedImport] ; see above

    with monkeypatch.context() as broken:
        # No file or storage fails exactly here, when the cluster is joined and nothing is written.
        broken.setattr(DocumentWriter, "begin", fail)
        with pytest.raises(Injected):
            raytrain.train(config(images, tmp_path, epochs=1))
    assert raytrain.train(config(images, tmp_path, epochs=1)).status == "finished"


LOCAL_RUN = """
import sys
import psutil
import raytrain
from tests.helpers.small_runs import config

def listening(process):
    try:
        name = process.name()
        return {(each.laddr.ip, name) for each in process.net_connections() if each.status == psutil.CONN_LISTEN}
    except psutil.Error:
        return set()

seen = set()

def look(snapshot):
    if snapshot.step:
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            seen.update(listening(process))

raytrain.train(config(*sys.argv[1:], address="local", epochs=30), view=look)
print(sorted(seen))
"""


def test_a_cluster_of_a_runs_own_is_reached_from_this_machine_only(images: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", LOCAL_RUN, str(images), str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": os.getcwd(), "PYTHONHASHSEED": "1"}  # a fork server of its own, for its own children
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen: list[tuple[str, str]] = eval(done.stdout.splitlines()[-1])
    assert {process for _, process in seen} >= {"gcs_server", "raylet"}
    others = [each for each in seen if each[0].removeprefix("::ffff:") not in ("127.0.0.1", "::1")]
    # torch's rendezvous of the workers, which it binds everywhere; a worker's name is what it does.
    assert {address for address, _ in others} == {"::"}
    assert {process.partition(".")[0] for _, process in others} <= {"ray::RayTrainWorker", "ray::execute"}
