"""Checkpoints of a run: their content, when one is due, how they are written, and how the newest whole one is found.

Only worker 0 writes. Training waits while the state is copied to the CPU, and goes on while a thread writes it. Slow
storage must neither stop training nor fill the memory with copies: of the copies that wait for the thread, only the
newest and the best so far are kept.

A file appears whole or not at all, since stores put objects atomically. Later damage is found when a file is read: the
newest checkpoint that can be read is used, and damaged ones are reported. Only worker 0 reads, too, because N workers
at one bucket would take N times as long; it sends the bytes to the other workers, which check their CRCs again.
"""

from __future__ import annotations

import io
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from raytrain.config import TrainConfig
from raytrain.errors import NoWholeCheckpoint, RaytrainError, UsageError
from raytrain.monitor.events import CheckpointDamaged, CheckpointSkipped, CheckpointWritten, Event
from raytrain.runs.documents import CHECKPOINTS, read_json
from raytrain.runs.outcome import DIVERGED_HINT, Progress
from raytrain.runs.stored_checkpoints import (
    Identity,
    best_checkpoint,
    checkpoint_path,
    list_checkpoints,
    step_and_takeover,
)
from raytrain.storage.store import Store
from raytrain.training.checkpoint_state import StateDict, check_readable, to_cpu
from raytrain.training.weights_source import ZIP, check_archive

_LATE = "storage has not taken the one before yet"
_SENT_AT_ONCE_BYTES = 64 << 20  # few enough to fit into the memory of a GPU beside a network


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint file; ``state`` has the state_dict of each object that the loop prepared, by name."""

    state: dict[str, StateDict]
    progress: Progress
    identity: Identity

    @property
    def weights(self) -> StateDict | None:
        """Weights of the network that was evaluated; before any evaluation, of the average or the first network."""
        weights = self.state.get(self.progress.network or "average", self.state.get("model")) or {}
        if "n_averaged" not in weights:
            return weights or None
        # torch's AveragedModel has the network as its attribute `module`.
        return {name.removeprefix("module."): value for name, value in weights.items() if name != "n_averaged"}


class CheckpointSchedule:
    """Keeps the step of the newest checkpoint, ``saved_step``, and decides whether the next one is due.

    ``saved_step`` is None without a checkpoint. :meth:`note_checkpoint` is called for each checkpoint.
    """

    def __init__(self, config: TrainConfig, steps_per_epoch: int, saved_step: int | None) -> None:
        self.saved_step = saved_step
        # If the last checkpoint was left out, its step, and the name of the weight that is not finite.
        self._diverged: tuple[int, str] | None = None
        every = config.checkpoint_intervals
        self._every_steps = (every.steps, every.epochs * steps_per_epoch)
        self._every_s = every.seconds
        self._saved_at = time.monotonic()

    def due_at(self, step: int) -> bool:
        """Return whether the options ask for a checkpoint after ``step`` completed steps."""
        return any(every > 0 and step % every == 0 for every in self._every_steps)  # 0: not by steps, or epochs

    def due_by_time(self) -> bool:
        """Return whether the last checkpoint, or the start of this attempt, is too many seconds ago."""
        return self._every_s > 0 and time.monotonic() - self._saved_at >= self._every_s

    def due_at_end(self, step: int) -> bool:
        """Return whether a run that ends after ``step`` completed steps still needs its last checkpoint.

        It does not after step 0, nor if the checkpoint of this step was written, or left out.
        """
        left_out_step = self._diverged[0] if self._diverged is not None else None
        return step not in (0, self.saved_step, left_out_step)

    def note_checkpoint(self, step: int, not_finite: str | None = None) -> None:
        """Note that a checkpoint after ``step`` completed steps is being written, or left out.

        It is left out if a weight is not finite; ``not_finite`` is the name of that weight. One that is left out counts
        as the last checkpoint, too.
        """
        if not_finite is None:
            self.saved_step, self._diverged = step, None
        else:
            self._diverged = step, not_finite
        self._saved_at = time.monotonic()

    def forget_checkpoint(self) -> None:
        """Note that the newest checkpoint lacks something, so that another one is due at the end."""
        self.saved_step = self._diverged = None

    @property
    def divergence(self) -> str | None:
        """Why the last checkpoint that was due was left out; None if it was written."""
        if self._diverged is None:
            return None
        step, name = self._diverged
        return f"the weight {name} is not finite after step {step:,}; {DIVERGED_HINT}"


class StoredFile(NamedTuple):
    """A checkpoint file: its path in the store and its content."""

    path: str
    data: bytes


class _Job(NamedTuple):
    """A checkpoint that the thread should write, and a function that it calls before."""

    checkpoint: Checkpoint
    before: Callable[[], None]

    def is_best(self, best_score: float | None) -> bool:
        """Return whether this checkpoint was evaluated, and with the best score so far (None before any)."""
        progress = self.checkpoint.progress
        is_evaluated = progress.evaluated_step == progress.step
        return is_evaluated and best_score is not None and progress.score == best_score


class Checkpoints:
    """The checkpoints in the ``store`` of a run, of which the ``keep`` newest ones and the best are kept.

    Args:
        identity: what a run must have in common with a checkpoint to resume from it; written into each.
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
        self._changed = threading.Condition()  # notified when the jobs change
        self._is_stuck = False  # training has already waited for storage in vain
        self._error: Exception | None = None  # of a write in the thread, raised by the next call
        self._is_first = True  # no checkpoint was written in this attempt
        self._thread: threading.Thread | None = None

    def save(self, state: dict[str, StateDict], progress: Progress, before: Callable[[], None] = lambda: None) -> None:
        """Copy ``state`` to the CPU, and write it in the background after ``before()``.

        If storage is slow, this waits up to ``patience_s``, then gives up the earlier checkpoints that still wait, but
        for the best, and reports them. Raises the error of an earlier write.
        """
        self._raise_error()
        job = _Job(Checkpoint(to_cpu(state), progress, self._identity), before)
        with self._changed:
            # Wait some seconds for the thread; if that was in vain, later calls do not wait until storage works again.
            patience_s = 0.0 if self._is_stuck else self._patience_s
            self._is_stuck = not self._changed.wait_for(lambda: len(self._jobs) < 2, patience_s)
            # This checkpoint replaces those that still wait, except for the best.
            waiting = self._jobs[1:]
            best = [earlier for earlier in waiting if earlier.is_best(progress.best_score)]
            skipped = [earlier for earlier in waiting if not earlier.is_best(progress.best_score)]
            self._jobs[1:] = [*best, job]
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_jobs, daemon=True, name="checkpoints")
                self._thread.start()
        for earlier in skipped:
            self._report(CheckpointSkipped(earlier.checkpoint.progress.step, _LATE))

    def _write_jobs(self) -> None:
        """Write one job after the other until there is none; runs in a thread."""
        while True:
            try:
                self._write(*self._jobs[0])
            except Exception as error:  # kept for the next save, so that training does not end within a step
                self._error = error
            with self._changed:
                del self._jobs[0]
                self._is_stuck = False
                self._changed.notify_all()
                if not self._jobs:
                    self._thread = None
                    return

    def _write(self, checkpoint: Checkpoint, before: Callable[[], None]) -> None:
        """Call ``before``, write a checkpoint and its note, delete the checkpoints that it replaces, and report it.

        The note is a small JSON file beside it, so that its score is known without reading the checkpoint.
        """
        before()
        progress = checkpoint.progress
        path = checkpoint_path(progress.step, self._takeover)
        if self._is_first:  # the later ones have the same kinds of state, and the check takes a copy of it
            check_readable(checkpoint.state)
            self._is_first = False
        self.store.put(path, _encode(checkpoint))
        self.store.put(path + ".json", _note(progress))

        # Delete checkpoints of later steps first, which are damaged or of an earlier owner, because the run has resumed
        # from the newest whole one. Then delete all but the newest ones and the best.
        steps = {stored.path: step_and_takeover(stored.path)[0] for stored in list_checkpoints(self.store)}
        self._delete(stored for stored, step in steps.items() if step > progress.step)
        up_to_now = [stored for stored, step in steps.items() if step <= progress.step]
        self._delete(set(up_to_now) - {*up_to_now[-self._keep :], best_checkpoint(self.store)})
        self.newest = path
        self._report(CheckpointWritten(path, progress.step))

    def _delete(self, paths: Iterable[str]) -> None:
        """Delete checkpoints and their notes."""
        for path in paths:
            self.store.delete(path)
            self.store.delete(path + ".json")

    def wait(self, timeout_s: float) -> None:
        """Wait until everything is written, for at most ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def close(self) -> None:
        """Wait until everything is written; raises the error of a write."""
        if (thread := self._thread) is not None:
            thread.join()
        self._raise_error()

    def read_newest(self) -> StoredFile | None:
        """Return the newest checkpoint file that can be read; None if there are none. Damaged ones are reported.

        Its note is written if it is not there, because its writer was killed before: without its score, a checkpoint is
        not the best, and would be deleted for later ones.

        Raises NoWholeCheckpoint if there are checkpoints, but none can be read: the run must not silently begin anew.
        """
        paths = [checkpoint.path for checkpoint in list_checkpoints(self.store)]
        damage = ""  # of the newest one, for the sentence of the error
        for path in reversed(paths):
            try:
                checkpoint = _parse(data := self.store.get(path))
            except ValueError as error:
                damage = damage or str(error)
                self._report(CheckpointDamaged(path, str(error)))
                continue
            note = _note(checkpoint.progress)
            if read_json(self.store, f"{path}.json") != json.loads(note):
                self.store.put(f"{path}.json", note)
            return StoredFile(path, data)
        if not paths:
            return None
        raise NoWholeCheckpoint(
            f"None of the checkpoints in {self.store.url}/{CHECKPOINTS} can be read ({damage}); put a whole one there, "
            "or start a new run under another --name."
        )

    def load_newest(self, device: torch.device) -> Checkpoint | None:
        """Return, on every worker, the newest checkpoint that worker 0 can read; None if there are none.

        The workers get it by collectives on ``device``, so each of them calls this. Raises UsageError if none can be
        read, or if the newest is of another model, other classes or images, or another batch size or seed.
        """
        file = _from_first(self.read_newest, device)
        if file is None:
            return None
        checkpoint = _parse_whole(f"{self.store.url}/{file.path}", file.data)
        self._identity.check(checkpoint.identity, file.path)
        self.newest = file.path
        return checkpoint

    def load_best(self, device: torch.device, step: int) -> Checkpoint | None:
        """Return the best checkpoint on every worker, by collectives; None if there is none, or it is that of ``step``.

        Each worker calls it, after :meth:`close`. Raises UsageError if the file is damaged.
        """

        def read_best() -> StoredFile | None:
            path = best_checkpoint(self.store)
            if path is None or step_and_takeover(path)[0] == step:
                return None
            return StoredFile(path, self.store.get(path))

        file = _from_first(read_best, device)
        return None if file is None else _parse_whole(f"{self.store.url}/{file.path}", file.data)

    def _raise_error(self) -> None:
        """Raise the error of the writing thread, if there is one: a RaytrainError as it is, others as a sentence."""
        error, self._error = self._error, None
        if isinstance(error, RaytrainError):
            raise error
        if error is not None:
            raise RaytrainError(
                f"A checkpoint could not be written to {self.store.url} ({error}); free space or choose another "
                "--storage, then continue with --resume."
            )


def _from_first(read: Callable[[], StoredFile | None], device: torch.device) -> StoredFile | None:
    """Have worker 0 ``read`` a file, and return it on every worker, by collectives on ``device``.

    An exception of worker 0 is raised on all workers, which would wait for ever otherwise. If it is no RaytrainError,
    the others raise a RaytrainError in its place.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return read()

    # First send the path and the size, or the error.
    is_first, file = dist.get_rank() == 0, None
    message: list[Any] = [None]
    failure: Exception | None = None
    try:
        if is_first and (file := read()) is not None:
            message = [(file.path, len(file.data))]
    except Exception as error:
        failure = error
        message = [
            error if isinstance(error, RaytrainError) else RaytrainError(f"Worker 0 cannot read a checkpoint: {error}")
        ]
    dist.broadcast_object_list(message, src=0, device=device)
    if failure is not None or isinstance(message[0], RaytrainError):
        raise failure or message[0]
    if message[0] is None:
        return None

    # Then send the content, in parts that fit into the device's memory.
    path, num_bytes = message[0]
    content = torch.empty(num_bytes, dtype=torch.uint8)
    if file is not None:
        content = torch.frombuffer(bytearray(file.data), dtype=torch.uint8)
    for part in content.split(_SENT_AT_ONCE_BYTES):
        part_on_device = part.to(device)
        dist.broadcast(part_on_device, src=0)
        part.copy_(part_on_device)
    return StoredFile(path, content.numpy().tobytes())


def read_checkpoint(store: Store, path: str) -> Checkpoint:
    """Read a checkpoint file; code in it is never run. Raises UsageError if it is no whole checkpoint.

    Example: ``weights = read_checkpoint(store, "checkpoints/step-000001000.pt").weights``
    """
    return _parse_whole(f"{store.url}/{path}", store.get(path))


def _parse_whole(url: str, data: bytes) -> Checkpoint:
    """Return the checkpoint in ``data``, the content of the file ``url``. Raises UsageError if it is no whole one."""
    try:
        return _parse(data)
    except ValueError as error:
        raise UsageError(
            f"{url} is not a whole checkpoint ({error}); delete it to resume from the one before."
        ) from None


def _note(progress: Progress) -> bytes:
    """Return the note beside the checkpoint of a run that is so far: its score if it was evaluated, and thresholds."""
    score = progress.score if progress.evaluated_step == progress.step else None
    thresholds = progress.thresholds and list(progress.thresholds)
    return json.dumps({"step": progress.step, "score": score, "thresholds": thresholds}).encode()


def _encode(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint file, which contains nothing but tensors and plain values."""
    identity = {**asdict(checkpoint.identity), "classes": list(checkpoint.identity.classes)}
    buffer = io.BytesIO()
    torch.serialization.set_crc32_options(True)  # a loop may have turned CRCs off, but readers check them
    torch.save({"state": checkpoint.state, "progress": asdict(checkpoint.progress), "identity": identity}, buffer)
    return buffer.getvalue()


def _parse(data: bytes) -> Checkpoint:
    """Return the checkpoint in bytes that :func:`_encode` has made; raise ValueError with a reason for other bytes."""
    if not data.startswith(ZIP):  # torch would try its older formats, which have no CRCs
        raise ValueError("it is no archive as torch.save writes them")
    check_archive(data)
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError("it is something else, or holds code, which is never run") from None
    except Exception as error:  # torch raises many kinds for broken files
        raise ValueError(str(error).partition("\n")[0].rstrip(".") or type(error).__name__) from None
    if (checkpoint := checkpoint_in(content)) is None:
        raise ValueError("it lacks a run's state, progress or identity")
    return checkpoint


def checkpoint_in(content: Any) -> Checkpoint | None:
    """Return the checkpoint in the unpickled ``content`` of a file; None if it is something else.

    Example: ``checkpoint_in(torch.load("step-000001000.pt", weights_only=True))``
    """
    try:
        identity = {**content["identity"], "classes": tuple(content["identity"]["classes"])}
        return Checkpoint(content["state"], Progress(**content["progress"]), Identity(**identity))
    except (KeyError, TypeError, IndexError):
        return None
