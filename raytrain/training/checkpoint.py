"""Checkpoints: everything they hold, written and found whole."""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from raytrain.errors import RaytrainError, UsageError
from raytrain.monitor.events import CheckpointDamaged, CheckpointSkipped, CheckpointWritten, Event
from raytrain.runs.checkpoint_files import (
    Identity,
    best_checkpoint,
    checkpoint_path,
    list_checkpoints,
    step_and_takeover,
)
from raytrain.runs.documents import CHECKPOINTS
from raytrain.runs.outcome import Progress
from raytrain.storage.store import Store
from raytrain.training.checkpoint_state import StateDict, check_readable, to_cpu
from raytrain.training.weights_source import check_unpacked_size

_LATE = "storage has not taken the one before yet"
_PATIENCE_S = 5.0  # that training waits for a checkpoint to be written before it leaves one out


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file. ``state`` holds a state_dict for everything that the loop prepared, by name."""

    state: dict[str, StateDict]
    progress: Progress
    identity: Identity

    @property
    def weights(self) -> StateDict | None:
        """Those of the network that the run has measured; until then of the first, averaged if it keeps an average."""
        weights = self.state.get(self.progress.network or "average", self.state.get("model")) or {}
        if "n_averaged" not in weights:
            return weights or None
        return {name.removeprefix("module."): each for name, each in weights.items() if name != "n_averaged"}


class _Job(NamedTuple):
    checkpoint: Checkpoint
    before: Callable[[], None]

    def is_best(self, now: Progress) -> bool:
        progress = self.checkpoint.progress
        return progress.evaluated_step == progress.step and progress.score == now.best_score is not None


class Checkpoints:
    """The checkpoints in the ``store`` of a run. A thread writes them, and keeps the ``keep`` newest ones and the best.

    If storage hangs, training goes on: of the checkpoints that wait for it, only the newest and the best are written.
    ``report`` is called, in any thread, with an event for each checkpoint that was written or left out, or is damaged.
    """

    def __init__(
        self, store: Store, identity: Identity, keep: int, report: Callable[[Event], None] = lambda event: None
    ) -> None:
        self.store = store
        self.newest: str | None = None
        """Path of the last one that was loaded or written."""
        self._takeover = store.guard.takeover if store.guard else 0
        self._identity = identity
        self._keep = keep
        self._report = report
        self._jobs: list[_Job] = []  # the first of them is being written
        self._changed = threading.Condition()
        self._is_stuck = False  # training has waited for storage in vain
        self._error: Exception | None = None
        self._is_first = True  # of this start
        self._thread: threading.Thread | None = None

    def save(self, state: dict[str, StateDict], progress: Progress, before: Callable[[], None] = lambda: None) -> None:
        """Copy ``state``, and write it in the background after ``before()``; raises the error of an earlier write."""
        self._raise_error()
        job = _Job(Checkpoint(to_cpu(state), progress, self._identity), before)
        with self._changed:
            patience_s = 0.0 if self._is_stuck else _PATIENCE_S
            self._is_stuck = not self._changed.wait_for(lambda: len(self._jobs) < 2, patience_s)
            waiting = self._jobs[1:]
            self._jobs[1:] = [*(each for each in waiting if each.is_best(progress)), job]
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, daemon=True, name="checkpoints")
                self._thread.start()
        for each in waiting:
            if not each.is_best(progress):
                self._report(CheckpointSkipped(each.checkpoint.progress.step, _LATE))

    def wait(self, timeout_s: float) -> None:
        """Wait until everything is written, at most so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """Wait until everything is written; raises the error of a write."""
        if (thread := self._thread) is not None:
            thread.join()
        self._raise_error()

    def newest_readable(self) -> str | None:
        """The newest checkpoint that can be read, if any; damaged ones are reported."""
        paths = [found.path for found in list_checkpoints(self.store)]
        damage = ""
        for path in reversed(paths):
            try:
                _parse(self.store.get(path))
                return path
            except ValueError as error:
                damage = damage or str(error)
                self._report(CheckpointDamaged(path, str(error)))
        if not paths:
            return None
        raise UsageError(
            f"None of the checkpoints in {self.store.url}/{CHECKPOINTS} can be read ({damage}); put a whole one there, "
            "or start a new run under another --name."
        )

    def load_newest(self, device: torch.device) -> Checkpoint | None:
        """The newest checkpoint that worker 0 can read, loaded on every worker, by collectives on ``device``."""
        distributed = dist.is_initialized()
        path = [None if distributed and dist.get_rank() > 0 else self.newest_readable()]
        if distributed and dist.get_world_size() > 1:
            dist.broadcast_object_list(path, src=0, device=device)
        return None if path[0] is None else self.load(path[0])

    def load(self, path: str) -> Checkpoint:
        """Read a checkpoint; raises UsageError if it is of another model, other classes, data, batch size or seed."""
        checkpoint = read_checkpoint(self.store, path)
        self._identity.check(checkpoint.identity, path)
        self.newest = path
        return checkpoint

    def _write_all(self) -> None:
        while True:
            try:
                self._write(*self._jobs[0])
            except Exception as error:  # raised at the next save: training must not die in the middle of a step
                self._error = error
            with self._changed:
                del self._jobs[0]
                self._is_stuck = False
                self._changed.notify_all()
                if not self._jobs:
                    self._thread = None
                    return

    def _write(self, checkpoint: Checkpoint, before: Callable[[], None]) -> None:
        before()
        progress = checkpoint.progress
        path = checkpoint_path(progress.step, self._takeover)
        if self._is_first:
            check_readable(checkpoint.state)
            self._is_first = False
        self.store.put(path, _encode(checkpoint))
        score = progress.score if progress.evaluated_step == progress.step else None
        note = {"step": progress.step, "score": score, "thresholds": progress.thresholds}
        self.store.put(path + ".json", json.dumps(note).encode())
        self._delete_old(path)
        self.newest = path
        self._report(CheckpointWritten(path, progress.step))

    def _delete_old(self, newest: str) -> None:
        """Delete those of later steps, which are damaged or another owner's, and of the others all but a few."""
        step, _ = step_and_takeover(newest)
        paths = [found.path for found in list_checkpoints(self.store)]
        self._delete(path for path in paths if step_and_takeover(path)[0] > step)
        paths = [path for path in paths if step_and_takeover(path)[0] <= step]
        self._delete(set(paths) - {*paths[-self._keep :], best_checkpoint(self.store)})

    def _delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.store.delete(path)
            self.store.delete(path + ".json")

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, RaytrainError):
            raise error
        if error is not None:
            raise RaytrainError(
                f"A checkpoint could not be written to {self.store.url} ({error}); free space or choose another "
                "--storage, then continue with --resume."
            )


def read_checkpoint(store: Store, path: str) -> Checkpoint:
    """Read a checkpoint file without running code that it may hold; raises UsageError if it is no whole checkpoint."""
    try:
        return _parse(store.get(path))
    except ValueError as error:
        raise UsageError(
            f"{store.url}/{path} is not a whole checkpoint ({error}); delete it to resume from the one before."
        ) from None


def _encode(checkpoint: Checkpoint) -> bytes:
    """The bytes of a checkpoint file, which hold nothing but tensors and plain values."""
    identity = {**asdict(checkpoint.identity), "classes": list(checkpoint.identity.classes)}
    buffer = io.BytesIO()
    torch.save({"state": checkpoint.state, "progress": asdict(checkpoint.progress), "identity": identity}, buffer)
    return buffer.getvalue()


def _parse(data: bytes) -> Checkpoint:
    """The inverse of :func:`_encode`; raises ValueError with the reason if ``data`` is something else."""
    check_unpacked_size(data)
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError("it is something else, or holds code, which is never run") from None
    except Exception as error:  # torch says in many ways that a file is broken
        raise ValueError(str(error).partition("\n")[0].rstrip(".") or type(error).__name__) from None
    if (checkpoint := checkpoint_in(content)) is None:
        raise ValueError("it lacks a run's state, progress or identity")
    return checkpoint


def checkpoint_in(content: Any) -> Checkpoint | None:
    """The checkpoint in the unpickled ``content`` of a file; None if it is something else."""
    try:
        identity = {**content["identity"], "classes": tuple(content["identity"]["classes"])}
        return Checkpoint(content["state"], Progress(**content["progress"]), Identity(**identity))
    except (KeyError, TypeError, IndexError):
        return None
