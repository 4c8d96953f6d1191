"""Runs in storage: names, documents, the list of runs, and stop requests."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.config import TrainConfig
from raytrain.errors import UsageError, shell_command
from raytrain.monitor.stop_request import read_stop_request, request_stop
from raytrain.runs import ownership
from raytrain.runs import status as status_module
from raytrain.runs.documents import (
    CLAIM,
    STATUS,
    SUMMARY,
    check_name,
    new_name,
    read_config,
    read_json,
    run_store,
    write_config,
    write_json,
)
from raytrain.runs.outcome import StopReason
from raytrain.runs.ownership import claim_run, machine_id
from raytrain.runs.records import list_runs
from raytrain.runs.status import RunStatus, read_status, write_status
from raytrain.runs.stored_checkpoints import list_checkpoints, newest_step
from raytrain.storage.store import Store
from tests.helpers.snapshots import train_result


@pytest.fixture
def storage(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def make_run(storage: str, name: str, status: str = "running", **more: Any) -> Store:
    store = run_store(storage, name)
    write_config(store, TrainConfig(recipe="digits", batch_size=8, learning_rate=0.1))
    write_status(store, RunStatus(status=status, **more))
    return store


def fall_silent(store: Store, for_s: float) -> None:
    then = datetime.now(timezone.utc) - timedelta(seconds=for_s)
    write_json(store, STATUS, {**read_json(store, STATUS), "heartbeat_at": then.isoformat()})


@pytest.mark.parametrize("name", ["first", "1", "a.b_c-D", "x" * 100])
def test_valid_names_are_accepted(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "-flag", "über", "a b", "x" * 101, "first\n"])
def test_a_name_that_cannot_be_a_folder_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"letters, digits.+ a to z"):
        check_name(name)


@pytest.mark.parametrize("call", [raytrain.load, raytrain.evaluate, raytrain.history, raytrain.stop])
def test_a_result_in_place_of_the_name_of_a_run_is_refused(call: Any) -> None:
    with pytest.raises(UsageError, match=r"of type TrainResult; give text, such as .* result\.name\.$"):
        call(train_result())


def test_a_generated_name_is_valid_and_contains_the_recipe() -> None:
    assert check_name(new_name("digits")).startswith("digits-20")


def test_an_empty_storage_is_the_current_folder_for_a_run_as_for_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Such as --storage "$RUNS" without this variable: the run was looked for in, and written to, /first.
    monkeypatch.chdir(tmp_path)
    store = run_store("", "first")
    assert store.url == str(tmp_path / "first")
    store.put("config.json", b"{}")
    assert [run.name for run in list_runs("")] == ["first"]


def test_documents_are_read_as_they_were_written(storage: str) -> None:
    store = make_run(storage, "first", step=12, num_steps=100, epoch=2, num_epochs=9, num_workers=3)
    assert read_config(store) == TrainConfig(recipe="digits", batch_size=8, learning_rate=0.1)
    status = read_status(store)
    assert (status.step, status.num_steps, status.epoch, status.num_epochs, status.num_workers) == (12, 100, 2, 9, 3)
    assert status.active
    assert read_json(store, SUMMARY) == {}
    write_json(store, SUMMARY, {"steps": 12})
    assert read_json(store, SUMMARY) == {"steps": 12}


def test_a_run_without_recent_status_updates_is_interrupted(storage: str) -> None:
    store = make_run(storage, "first", step=5)
    fall_silent(store, for_s=30)
    assert read_status(store).status == "running"
    fall_silent(store, for_s=90)
    assert read_status(store).status == "interrupted"
    assert read_status(store).step == 5


@pytest.mark.not_quick
def test_a_run_whose_process_has_ended_is_interrupted(storage: str) -> None:
    store = make_run(storage, "first", step=5)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    # A container may have the name of its host, but its processes have other numbers.
    for machine, status in ((machine_id(), "interrupted"), ("another container", "running")):
        write_json(store, STATUS, {**read_json(store, STATUS), "machine": machine, "pid": gone.pid})
        assert read_status(store).status == status


def test_a_run_that_has_ended_needs_no_status_updates(storage: str) -> None:
    store = make_run(storage, "first", "stopped")
    fall_silent(store, for_s=1e6)
    assert read_status(store).status == "stopped"


def test_all_runs_are_listed_newest_first(storage: str) -> None:
    old = make_run(storage, "old", "finished", step=100)
    write_json(old, SUMMARY, {"validation_accuracy": 0.875})
    fall_silent(old, for_s=1000)
    make_run(storage, "new", step=7)
    killed = run_store(storage, "killed-at-once")
    write_config(killed, TrainConfig(recipe="digits", batch_size=8, learning_rate=0.1))
    Path(storage, "no-run").mkdir()
    Path(storage, "no-run", "notes.txt").write_text("mine")
    listed = list_runs(storage)
    assert [run.name for run in listed] == ["new", "old", "killed-at-once"]
    assert [run.status.status for run in listed] == ["running", "finished", "interrupted"]
    assert [run.validation_accuracy for run in listed] == [None, 0.875, None]
    assert {run.recipe for run in listed} == {"digits"}


def test_a_folder_that_does_not_exist_is_refused_and_an_empty_one_has_no_runs(storage: str) -> None:
    with pytest.raises(UsageError, match=f"There is no folder {storage} to look for runs in; check --storage"):
        list_runs(storage)
    with pytest.raises(UsageError, match=f"There is no folder {storage} to look for runs in; check --storage"):
        request_stop(storage, "first", StopReason("caller", ""))
    Path(storage).mkdir()
    assert list_runs(storage) == []


def test_a_stop_request_can_be_read(storage: str) -> None:
    store = make_run(storage, "first")
    assert read_stop_request(store) is None
    request_stop(storage, "first", StopReason("caller", "enough seen"))
    assert read_stop_request(store) == StopReason("caller", "enough seen")


def test_an_unknown_run_is_refused_with_similar_names(storage: str) -> None:
    Path(storage).mkdir()
    with pytest.raises(UsageError, match="there are no runs yet"):
        request_stop(storage, "frist", StopReason("caller", ""))
    make_run(storage, "first")
    make_run(storage, "other")
    with pytest.raises(UsageError, match=r"There is no run 'frist' in .* \(did you mean first\?\)"):
        request_stop(storage, "frist", StopReason("caller", ""))
    with pytest.raises(UsageError, match=f"`{shell_command('runs', storage=storage)}` lists the runs"):
        request_stop(storage, "zzz", StopReason("caller", ""))
    assert not Path(storage, "frist").exists()


@pytest.mark.parametrize(
    ("status", "hint"), [("finished", "is finished at step 1,000."), ("stopped", "resume it with --resume")]
)
def test_a_run_that_has_ended_cannot_be_stopped(storage: str, status: str, hint: str) -> None:
    store = make_run(storage, "first", status, step=1000)
    with pytest.raises(UsageError, match=hint):
        request_stop(storage, "first", StopReason("caller", ""))
    assert read_stop_request(store) is None


def test_a_resume_that_is_starting_its_workers_can_be_stopped(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "RENEW_EVERY_S", 0.5)
    store = make_run(storage, "first", "stopped", step=1000)
    with claim_run(store, "first"):
        request_stop(storage, "first", StopReason("caller", "enough seen"))
        assert read_stop_request(store) == StopReason("caller", "enough seen")
    with pytest.raises(UsageError, match="it is stopped at step 1,000; resume it with --resume"):
        request_stop(storage, "first", StopReason("caller", ""))


def test_an_interrupted_run_cannot_be_stopped(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "WATCH_S", 1.0)  # a real run is watched for 15 s
    fall_silent(make_run(storage, "first"), for_s=90)
    with pytest.raises(UsageError, match=r"it is interrupted at step 0, and has written nothing for .* --resume\.$"):
        request_stop(storage, "first", StopReason("caller", ""))


def test_a_run_whose_process_has_ended_is_not_watched_before_a_stop_is_refused(storage: str) -> None:
    store = make_run(storage, "first", step=5)
    write_json(store, STATUS, {**read_json(store, STATUS), "pid": 0})
    fall_silent(store, for_s=90)
    started_s = time.monotonic()
    with pytest.raises(UsageError, match="it is interrupted at step 5; resume it with --resume"):
        request_stop(storage, "first", StopReason("caller", ""))
    assert time.monotonic() - started_s < 5 and read_stop_request(store) is None


@pytest.mark.parametrize("document", [STATUS, CLAIM])
@pytest.mark.parametrize("ahead_s", [90, 1e6])
def test_a_run_whose_clock_is_behind_is_stopped(storage: str, document: str, ahead_s: float) -> None:
    store = make_run(storage, "first", step=5)
    fall_silent(store, for_s=ahead_s)
    heartbeat = threading.Timer(1.0, lambda: write_json(store, document, {**read_json(store, document), "renewed": 2}))
    heartbeat.start()
    request_stop(storage, "first", StopReason("caller", "enough seen"))
    heartbeat.join()
    assert read_stop_request(store) == StopReason("caller", "enough seen")


def test_a_run_in_a_container_with_the_name_of_this_host_is_stopped(storage: str) -> None:
    store = make_run(storage, "first", step=5)
    write_json(store, STATUS, {**read_json(store, STATUS), "machine": "another container", "pid": 2**22 + 1})
    request_stop(storage, "first", StopReason("caller", "enough seen"))
    assert read_stop_request(store) == StopReason("caller", "enough seen")


def test_checkpoints_are_listed_oldest_first(storage: str) -> None:
    store = make_run(storage, "first")
    assert list_checkpoints(store) == []
    assert newest_step(store) == 0
    for step in (20, 3):
        store.put(f"checkpoints/step-{step:09}.pt", bytes(step))
        store.put(f"checkpoints/step-{step:09}.pt.json", b"{}")
    assert newest_step(store) == 20
    assert [(c.path, c.size_bytes) for c in list_checkpoints(store)] == [
        ("checkpoints/step-000000003.pt", 3),
        ("checkpoints/step-000000020.pt", 20),
    ]
