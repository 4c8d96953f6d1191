"""Checkpoints: whole files in the run's storage, written beside the training and found again after anything."""

from __future__ import annotations

import copy
import io
import json
import pickle
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch

from raytrain.errors import RaytrainError, UsageError
from raytrain.runs import records
from raytrain.runs.layout import CHECKPOINTS
from raytrain.storage.base import Store

_PARTS = {"state", "progress", "identity"}


@dataclass(frozen=True)
class Progress:
    """How far a run is, and how well it does. With the seed and the plan, ``step`` says which sample comes next."""

    step: int = 0
    samples_seen: int = 0
    test_accuracy: float | None = None
    test_loss: float | None = None
    evaluated_step: int | None = None


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to; a run only goes on from one that agrees with it."""

    model: str
    classes: tuple[str, ...]
    manifest_digest: str
    batch_size: int
    seed: int

    def check(self, other: Identity, path: str) -> None:
        """Raise :class:`UsageError` that names the first difference."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if theirs != mine:
                raise UsageError(
                    f"{path} was made with {_difference(name, theirs, mine)}: go on with what the checkpoint was made with, or start a new "
                    f"run under another --name."
                )


class Checkpoints:
    """The checkpoints of one run. ``save`` returns at once; a thread writes, keeps the newest and the best, deletes the rest."""

    def __init__(self, store: Store, identity: Identity, keep: int, on_saved: Callable[[str], None] = lambda path: None) -> None:
        self.store = store
        self._identity = identity
        self._keep = keep
        self._on_saved = on_saved
        self._jobs: queue.Queue[tuple[dict[str, Any], Progress, Callable[[], None]] | None] = queue.Queue(maxsize=1)
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def save(self, state: dict[str, Any], progress: Progress, first: Callable[[], None] = lambda: None) -> None:
        """Write ``state`` (of state_dicts) in the background, once ``first`` has returned; raises what an earlier write met."""
        self._raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, daemon=True, name="checkpoints")
            self._thread.start()
        self._jobs.put((to_cpu(state), progress, first))

    def close(self) -> None:
        """Wait until everything is written; raises what a write met."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._raise_error()

    def newest(self) -> str | None:
        """Path of the newest checkpoint, relative to the run."""
        return max((found.path for found in records.list_checkpoints(self.store)), default=None)

    def newest_whole(self, tell: Callable[[str], None]) -> str | None:
        """Path of the newest checkpoint that can be read; ``tell`` hears of newer ones, which a crash or a copy may have damaged.

        Raises UsageError where there are checkpoints and none can be read.
        """
        paths = [found.path for found in records.list_checkpoints(self.store)]
        damage = ""
        for path in reversed(paths):
            try:
                _content(self.store.get(path))
            except ValueError as error:
                damage = damage or str(error)
                tell(f"{path} is not a whole checkpoint ({error}); going on from the one before")
            else:
                return path
        if paths:
            raise UsageError(
                f"None of the checkpoints in {self.store.url}/{CHECKPOINTS} can be read ({damage}); put a whole one there, or start a new "
                f"run under another --name."
            )
        return None

    def load(self, path: str) -> tuple[dict[str, Any], Progress]:
        """State and progress of a checkpoint; refuses one of another model, classes, data, batch size or seed."""
        content = read_checkpoint(self.store, path)
        self._identity.check(identity_of(content), path)
        return content["state"], Progress(**content["progress"])

    def _write_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._write(*job)
            except Exception as error:  # told at the next save or close: the training must not die in mid-step
                self._error = error

    def _write(self, state: dict[str, Any], progress: Progress, first: Callable[[], None]) -> None:
        first()
        path = f"{CHECKPOINTS}step-{progress.step:09d}.pt"
        content = {"state": state, "progress": asdict(progress), "identity": _plain(self._identity)}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        self.store.put(path, buffer.getvalue())
        evaluated = progress.evaluated_step == progress.step
        note = {"step": progress.step, "test_accuracy": progress.test_accuracy if evaluated else None}
        self.store.put(path + ".json", json.dumps(note).encode())
        self._delete_old(path)
        self._on_saved(path)

    def _delete_old(self, newest: str) -> None:
        paths = [found.path for found in records.list_checkpoints(self.store)]
        self._delete(path for path in paths if path > newest)  # damaged: the run went on from one before them
        paths = [path for path in paths if path <= newest]
        self._delete(set(paths) - {*paths[-self._keep :], records.best_checkpoint(self.store)})

    def _delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.store.delete(path)
            self.store.delete(path + ".json")

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            if isinstance(error, RaytrainError):
                raise error
            raise RaytrainError(
                f"A checkpoint could not be written to {self.store.url} ({error}); free space or mend --storage, then go on with --resume."
            )


def read_checkpoint(store: Store, path: str) -> dict[str, Any]:
    """The content of a checkpoint file, loaded without running any code that stands in it."""
    try:
        return _content(store.get(path))
    except ValueError as error:
        raise UsageError(f"{store.url}/{path} is not a whole checkpoint ({error}); delete it to go on from the one before.") from None


def _content(data: bytes) -> dict[str, Any]:
    """What :func:`Checkpoints.save` wrote; raises ValueError with the reason where ``data`` is something else."""
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError("it is something else, or holds code, which is never run") from None
    except Exception as error:  # torch says in many ways that a file is broken
        raise ValueError(str(error).partition("\n")[0].rstrip(".") or type(error).__name__) from None
    missing = _PARTS - content.keys() if isinstance(content, dict) else _PARTS
    if missing:
        raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    return content


def identity_of(content: dict[str, Any]) -> Identity:
    """What a checkpoint belongs to."""
    values = dict(content["identity"])
    return Identity(**{**values, "classes": tuple(values["classes"])})


def to_cpu(state: Any) -> Any:
    """A copy of nested state_dicts that later steps do not change, with every tensor on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: to_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(to_cpu(value) for value in state)
    return copy.copy(state)


def _difference(name: str, theirs: Any, mine: Any) -> str:
    if name == "classes":
        pairs = enumerate(zip_longest(theirs, mine, fillvalue="none"))
        place, their, my = next((place, *pair) for place, pair in pairs if pair[0] != pair[1])
        return f"{len(theirs):,} classes, and this run has {len(mine):,}, of which number {place} is {their} there and {my} here"
    if name == "manifest_digest":
        return f"other images (manifest {theirs[:8]}…), and this run has those of manifest {mine[:8]}…"
    return f"{name.replace('_', ' ')} {theirs}, and this run has {mine}"


def _plain(identity: Identity) -> dict[str, Any]:
    return {**asdict(identity), "classes": list(identity.classes)}
