"""Checkpoints: everything they hold, written and found whole.

Only worker 0 writes. Training waits while the state is copied to the CPU, and goes on while a thread writes it. A slow
or hanging storage must neither stop training nor fill the memory with copies: of those that wait for the thread, only
the newest and the best so far are kept.

A file appears whole or not at all, since stores put objects at once. What was damaged later is found out when it is
read: the newest one that can be read is taken, and the others are reported.
"""

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
from raytrain.training.weights_source import ZIP, check_archive

_LATE = "storage has not taken the one before yet"


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file; ``state`` has a state_dict for everything that the loop prepared, by name."""

    state: dict[str, StateDict]
    progress: Progress
    identity: Identity

    @property
    def weights(self) -> StateDict | None:
        """Weights of the network that the run has measured; before that of the first one, averaged if it is."""
        weights = self.state.get(self.progress.network or "average", self.state.get("model")) or {}
        if "n_averaged" not in weights:
            return weights or None
        # Those in torch's AveragedModel have the names of a network inside of it.
        return {name.removeprefix("module."): value for name, value in weights.items() if name != "n_averaged"}


class _Job(NamedTuple):
    checkpoint: Checkpoint
    before: Callable[[], None]

    def is_best(self, best_score: float | None) -> bool:
        progress = self.checkpoint.progress
        return progress.evaluated_step == progress.step and progress.score == best_score is not None


class Checkpoints:
    """The checkpoints in the ``store`` of a run, of which the ``keep`` newest ones and the best are kept.

    Args:
        report: called, in any thread, with an event for each checkpoint that was written or left out, or is damaged.
        patience_s: how long training waits for a checkpoint to be written before it leaves one out.

    Example::

        checkpoints = Checkpoints(store, identity, keep=2)
        restored = checkpoints.load_newest(device)
        checkpoints.save({"model": model.state_dict()}, progress)
        checkpoints.close()
    """

    def __init__(
        self,
        store: Store,
        identity: Identity,
        keep: int,
        report: Callable[[Event], None] = lambda event: None,
        *,
        patience_s: float = 5.0,
    ) -> None:
        self.store = store
        self.newest: str | None = None
        """Path of the checkpoint that was loaded or written last."""
        self._takeover = store.guard.takeover if store.guard else 0
        self._identity = identity
        self._keep = keep
        self._report = report
        self._patience_s = patience_s
        self._jobs: list[_Job] = []  # the first of them is being written
        self._changed = threading.Condition()  # of the jobs
        self._is_stuck = False  # training has waited for storage in vain
        self._error: Exception | None = None  # of a write, for the next call
        self._is_first = True  # nothing was written in this attempt
        self._thread: threading.Thread | None = None

    def save(self, state: dict[str, StateDict], progress: Progress, before: Callable[[], None] = lambda: None) -> None:
        """Copy ``state``, and write it in the background after ``before()``; raises the error of an earlier write."""
        self._raise_error()
        job = _Job(Checkpoint(to_cpu(state), progress, self._identity), before)
        with self._changed:
            # Wait a while for the thread, once: as long as storage hangs, later calls don't wait again.
            patience_s = 0.0 if self._is_stuck else self._patience_s
            self._is_stuck = not self._changed.wait_for(lambda: len(self._jobs) < 2, patience_s)
            # This one takes the place of those that still wait, except for the best.
            waiting = self._jobs[1:]
            skipped = [other for other in waiting if not other.is_best(progress.best_score)]
            self._jobs[1:] = [*(other for other in waiting if other.is_best(progress.best_score)), job]
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_jobs, daemon=True, name="checkpoints")
                self._thread.start()
        for other in skipped:
            self._report(CheckpointSkipped(other.checkpoint.progress.step, _LATE))

    def _write_jobs(self) -> None:
        """Write one job after the other until there is none; runs in a thread."""
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
        # Checkpoints of later steps are damaged or another owner's: a run continues from the newest one that is whole.
        # They go first, so that the best one is chosen among the others.
        steps = {other.path: step_and_takeover(other.path)[0] for other in list_checkpoints(self.store)}
        self._delete(other for other, step in steps.items() if step > progress.step)
        earlier = [other for other, step in steps.items() if step <= progress.step]
        self._delete(set(earlier) - {*earlier[-self._keep :], best_checkpoint(self.store)})
        self.newest = path
        self._report(CheckpointWritten(path, progress.step))

    def _delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.store.delete(path)
            self.store.delete(path + ".json")

    def wait(self, timeout_s: float) -> None:
        """Wait until everything is written, for at most ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """Wait until everything is written; raises the error of a write."""
        if (thread := self._thread) is not None:
            thread.join()
        self._raise_error()

    def newest_readable(self) -> str | None:
        """Return the path of the newest checkpoint that can be read, if any; damaged ones are reported.

        Raises UsageError if there are checkpoints, and none can be read: the run would silently begin anew.
        """
        paths = [checkpoint.path for checkpoint in list_checkpoints(self.store)]
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
        """Load the newest checkpoint that worker 0 can read on every worker, by a collective on ``device``."""
        path = _from_first(self.newest_readable, device)
        return None if path is None else self.load(path)

    def load_best(self, device: torch.device, step: int) -> Checkpoint | None:
        """Load the best checkpoint on every worker, by a collective; None if it is that of ``step``, or there is none.

        Call it after :meth:`close`.
        """
        path = _from_first(lambda: best_checkpoint(self.store), device)
        if path is None or step_and_takeover(path)[0] == step:
            return None
        return read_checkpoint(self.store, path)

    def load(self, path: str) -> Checkpoint:
        """Read a checkpoint. Raises UsageError if its model, classes, data, batch size or seed are others."""
        checkpoint = read_checkpoint(self.store, path)
        self._identity.check(checkpoint.identity, path)
        self.newest = path
        return checkpoint

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, RaytrainError):
            raise error
        if error is not None:
            raise RaytrainError(
                f"A checkpoint could not be written to {self.store.url} ({error}); free space or choose another "
                "--storage, then continue with --resume."
            )


def _from_first(find: Callable[[], str | None], device: torch.device) -> str | None:
    """Return what worker 0 finds, on every worker."""
    distributed = dist.is_initialized()
    found = [None if distributed and dist.get_rank() > 0 else find()]
    if distributed and dist.get_world_size() > 1:
        dist.broadcast_object_list(found, src=0, device=device)
    return found[0]


def read_checkpoint(store: Store, path: str) -> Checkpoint:
    """Read a checkpoint file without running code that it may hold. Raises UsageError if it is no whole checkpoint.

    Example::

        weights = read_checkpoint(store, "checkpoints/step-000001000.pt").weights
    """
    try:
        return _parse(store.get(path))
    except ValueError as error:
        raise UsageError(
            f"{store.url}/{path} is not a whole checkpoint ({error}); delete it to resume from the one before."
        ) from None


def _encode(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint file, which hold nothing but tensors and plain values."""
    identity = {**asdict(checkpoint.identity), "classes": list(checkpoint.identity.classes)}
    buffer = io.BytesIO()
    torch.serialization.set_crc32_options(True)  # a loop may have turned them off, and they are checked when it is read
    torch.save({"state": checkpoint.state, "progress": asdict(checkpoint.progress), "identity": identity}, buffer)
    return buffer.getvalue()


def _parse(data: bytes) -> Checkpoint:
    """Return the checkpoint that :func:`_encode` made ``data`` of. Raises ValueError with a reason if it made none."""
    if not data.startswith(ZIP):  # torch would try its older formats, which have no CRCs
        raise ValueError("it is no archive as torch.save writes them")
    check_archive(data)
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
    """Return the checkpoint in the unpickled ``content`` of a file; None if it is something else."""
    try:
        identity = {**content["identity"], "classes": tuple(content["identity"]["classes"])}
        return Checkpoint(content["state"], Progress(**content["progress"]), Identity(**identity))
    except (KeyError, TypeError, IndexError):
        return None
