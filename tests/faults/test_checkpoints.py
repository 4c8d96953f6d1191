"""A run resumes from its last readable checkpoint whatever happened to its storage, or reports why it cannot."""

from __future__ import annotations

import io
import os
import pickle
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.errors import RaytrainError, StorageError, UsageError
from raytrain.monitor.events import CheckpointDamaged, CheckpointSkipped, CheckpointWritten, Event
from raytrain.runs.outcome import Progress
from raytrain.runs.stored_checkpoints import Identity, best_scored_checkpoint
from raytrain.storage.folder import FolderStore
from raytrain.storage.open import open_store
from raytrain.storage.store import Store
from raytrain.training.checkpoint import Checkpoints, read_checkpoint

IDENTITY = Identity(model="resnet18", classes=("cat", "dog", "owl"), manifest_digest="0a" * 32, batch_size=8, seed=0)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path) if request.param == "folder" else request.getfixturevalue("s3_url"))


def open_checkpoints(store: Store, keep: int = 2) -> Checkpoints:
    return Checkpoints(store, IDENTITY, keep)


def save(store: Store, *steps: int, keep: int = 2) -> None:
    checkpoints = open_checkpoints(store, keep)
    for step in steps:
        checkpoints.save({"model": {"weight": torch.full((100,), float(step))}}, Progress(step=step))
    checkpoints.close()


def path_of(step: int) -> str:
    return f"checkpoints/step-{step:09d}.pt"


def restored(store: Store, **identity: Any) -> tuple[int, list[Event]]:
    """Return the step from which a run would resume and the events that it reports; check the weights."""
    events: list[Event] = []
    checkpoints = Checkpoints(store, replace(IDENTITY, **identity), 2, events.append)
    checkpoint = checkpoints.load_newest(torch.device("cpu"))
    assert checkpoint is not None
    step = checkpoint.progress.step
    assert (checkpoint.state["model"]["weight"] == step).all()
    return step, events


class Malice:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def malicious(file: Path) -> bytes:
    data = io.BytesIO()
    torch.save({"state": Malice(file), "progress": {"step": 20}, "identity": {}}, data)
    return data.getvalue()


def foreign() -> bytes:
    data = io.BytesIO()
    torch.save({"weight": torch.zeros(3)}, data)
    return data.getvalue()


def archive() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("a.txt", "words")
    return data.getvalue()


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_newest_checkpoint_is_skipped(store: Store, kept: float) -> None:
    save(store, 10, 20)
    whole = store.get(path_of(20))
    store.put(path_of(20), whole[: int(kept * len(whole)) if kept < 1 else int(kept)])
    step, (event,) = restored(store)
    assert step == 10 and isinstance(event, CheckpointDamaged) and event.path == path_of(20)


@pytest.mark.parametrize("bit", range(8))
def test_a_newest_checkpoint_with_a_flipped_bit_is_skipped_and_reported(store: Store, bit: int) -> None:
    save(store, 10, 20)
    damaged = bytearray(store.get(path_of(20)))
    weights = torch.full((100,), 20.0).numpy().tobytes()
    damaged[damaged.index(weights) + 7] ^= 1 << bit
    store.put(path_of(20), bytes(damaged))
    step, (event,) = restored(store)
    assert step == 10 and isinstance(event, CheckpointDamaged) and event.path == path_of(20)
    assert "data/0 is not what was written" in event.reason
    with pytest.raises(UsageError, match=r"is not a whole checkpoint \(it is a damaged archive"):
        read_checkpoint(store, path_of(20))


def test_checkpoints_are_whole_though_a_loop_has_torch_leave_out_crcs(store: Store) -> None:
    checkpoints, state = open_checkpoints(store), {"model": {"weight": torch.full((100,), 10.0)}}
    try:
        # In the thread that writes: some versions of torch keep the option for each thread.
        checkpoints.save(state, Progress(step=10), lambda: torch.serialization.set_crc32_options(False))
        checkpoints.close()
    finally:
        torch.serialization.set_crc32_options(True)
    assert restored(store) == (10, [])


@pytest.mark.parametrize(
    "damage", [lambda: b"words\n", foreign, archive, lambda: pickle.dumps({"state": 1}), lambda: bytes(1000)]
)
def test_a_file_that_is_no_checkpoint_is_skipped_and_refused_by_name(store: Store, damage: Callable[[], bytes]) -> None:
    save(store, 10)
    store.put(path_of(20), damage())
    assert restored(store)[0] == 10
    sentence = rf"{path_of(20)} is not a whole checkpoint \(.+\); delete it to resume from the one before\.$"
    with pytest.raises(UsageError, match=sentence) as raised:
        read_checkpoint(store, path_of(20))
    assert "\n" not in str(raised.value) and "\x1b" not in str(raised.value)


def test_a_malicious_checkpoint_runs_no_code(tmp_path: Path) -> None:
    store, made = open_store(str(tmp_path / "run")), tmp_path / "made"
    save(store, 10)
    store.put(path_of(20), malicious(made))
    assert restored(store)[0] == 10
    with pytest.raises(UsageError, match="is something else, or holds code, which is never run"):
        read_checkpoint(store, path_of(20))
    assert not made.exists()
    torch.load(io.BytesIO(malicious(made)), weights_only=False)
    assert made.exists()  # The file is indeed malicious.


def test_if_no_checkpoint_can_be_read_the_error_says_what_to_do(store: Store) -> None:
    nothing_there = Checkpoints(store, IDENTITY, 2, lambda event: pytest.fail(str(event)))
    assert nothing_there.read_newest() is None
    save(store, 10, 20)
    for step in (10, 20):
        store.put(path_of(step), b"")
    with pytest.raises(
        UsageError, match=f"None of the checkpoints in {store.url}/checkpoints/ can be read .*put a whole one there"
    ):
        open_checkpoints(store).read_newest()


def test_checkpoints_saved_after_a_damaged_one_was_skipped_are_kept(store: Store) -> None:
    save(store, 10, 20)
    store.put(path_of(20), b"")
    save(store, 15, keep=1)
    assert restored(store) == (15, [])
    assert not store.exists(path_of(20)) and not store.exists(path_of(20) + ".json")


@pytest.mark.parametrize(
    ("identity", "difference"),
    [
        ({"model": "resnet50"}, "was made with model resnet18, and this run has resnet50"),
        ({"batch_size": 16}, "was made with batch size 8, and this run has 16"),
        ({"seed": 1}, "was made with seed 0, and this run has 1"),
        (
            {"classes": ("cat", "eel", "owl")},
            "3 classes, and this run has 3, of which number 1 is dog there and eel here",
        ),
        ({"classes": ("cat", "dog")}, "3 classes, and this run has 2, of which number 2 is owl there and missing here"),
        (
            {"classes": ("cat", "dog", "owl", "none")},
            "3 classes, and this run has 4, of which number 3 is missing there and none here",
        ),
        (
            {"manifest_digest": "1b" * 32},
            "other images .manifest 0a0a0a0a…., and this run has those of manifest 1b1b1b1b…",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_difference(
    tmp_path: Path, identity: dict[str, Any], difference: str
) -> None:
    store = open_store(str(tmp_path))
    save(store, 10)
    with pytest.raises(
        UsageError, match=f"{path_of(10)} was made with .*: resume with the options that it was made with"
    ) as raised:
        restored(store, **identity)
    assert raised.match(difference)


# Storage that cannot be written.


def failing_put(monkeypatch: pytest.MonkeyPatch, after_bytes: int, error: BaseException) -> None:
    """Make each file write fail after ``after_bytes`` bytes."""

    def fail(descriptor: int) -> None:
        os.ftruncate(descriptor, after_bytes)
        raise error

    monkeypatch.setattr(os, "fsync", fail)


def test_a_full_disk_is_reported_and_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path))
    save(store, 10)
    with monkeypatch.context() as full:
        failing_put(full, 500, OSError(28, "No space left on device"))
        with pytest.raises(
            StorageError, match=f"The disk of {tmp_path}/{path_of(20)} is full; free space or choose another place"
        ):
            save(store, 20)
    assert restored(store) == (10, []) and sorted(os.listdir(tmp_path / "checkpoints")) == [
        f"step-{10:09d}.pt",
        f"step-{10:09d}.pt.json",
    ]
    save(store, 20)
    assert restored(store) == (20, [])


def save_until_error(checkpoints: Checkpoints) -> None:
    for step in range(1, 100):
        checkpoints.save({"model": {"weight": torch.zeros(1)}}, Progress(step=step))


def test_a_failed_checkpoint_write_is_reported_at_a_later_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = open_checkpoints(open_store(str(tmp_path)))
    failing_put(monkeypatch, 0, OSError(30, "Read-only file system"))
    with pytest.raises(StorageError, match="is on a read-only disk; choose another place"):
        save_until_error(checkpoints)
    with suppress(StorageError):  # The last write may have failed too.
        checkpoints.close()


def test_a_checkpoint_is_written_after_the_metrics_of_its_steps(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    checkpoints = open_checkpoints(store)
    seen: list[bool] = []
    checkpoints.save({}, Progress(step=1), before=lambda: seen.append(store.exists(path_of(1))))
    checkpoints.close()
    assert seen == [False] and store.exists(path_of(1))

    def lost() -> None:
        raise ConnectionError("the rows were lost")

    checkpoints.save({}, Progress(step=2), before=lost)
    with pytest.raises(RaytrainError, match="the rows were lost"):
        checkpoints.close()
    assert not store.exists(path_of(2))


def test_training_goes_on_while_storage_hangs_and_the_newest_and_the_best_checkpoint_are_written_later(
    tmp_path: Path,
) -> None:
    store, hang, events = open_store(str(tmp_path)), threading.Event(), list[Event]()
    checkpoints = Checkpoints(store, IDENTITY, 10, events.append, patience_s=0.1)
    for step in range(1, 7):
        best = {"evaluated_step": 3, "score": 0.9, "best_score": 0.9} if step >= 3 else {}
        checkpoints.save({}, Progress(step=step, **best), before=hang.wait)  # pyright: ignore
    assert events == [CheckpointSkipped(step, "storage has not taken the one before yet") for step in (2, 4, 5)]
    hang.set()
    checkpoints.close()
    assert events[3:] == [CheckpointWritten(path_of(step), step) for step in (1, 3, 6)]
    assert all(thread.name != "checkpoints" for thread in threading.enumerate()), "its thread ends with its work"
    assert all(store.exists(path_of(step)) for step in (1, 3, 6))


def test_a_writer_killed_during_a_write_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(str(tmp_path))
    save(store, 10)
    with monkeypatch.context() as killed:
        failing_put(killed, 500, SystemExit())
        killed.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # A killed process deletes nothing.
        with pytest.raises(SystemExit):
            FolderStore(str(tmp_path)).put(path_of(20), bytes(1000))
    assert any(name.endswith(".part") for name in os.listdir(tmp_path / "checkpoints"))
    assert restored(store) == (10, [])


@pytest.mark.parametrize("note_before", [None, b'{"step": 10, "score": null, "thresholds": null}'])
def test_the_best_checkpoint_stays_so_if_its_writer_was_killed_before_its_note(
    store: Store, note_before: bytes | None
) -> None:
    """Before the first evaluation of a loop's own, the same step has a checkpoint, and a note, without a score."""
    checkpoints = open_checkpoints(store)
    state = {"model": {"weight": torch.full((100,), 10.0)}}
    checkpoints.save(state, Progress(step=10, evaluated_step=10, score=0.9, best_score=0.9))
    checkpoints.close()
    store.delete(f"{path_of(10)}.json")
    if note_before is not None:
        store.put(f"{path_of(10)}.json", note_before)
    assert restored(store) == (10, [])
    save(store, 20, keep=1)
    assert best_scored_checkpoint(store) == (0.9, path_of(10))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_missing_write_permission_is_reported(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="no permission for"):
        save(open_store(str(tmp_path)), 10)
