"""A checkpoint is read by one worker, which sends it to the others, or ends them all with its sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.errors import RaytrainError
from raytrain.runs.outcome import Progress
from raytrain.runs.stored_checkpoints import Identity
from raytrain.storage.folder import FolderStore
from raytrain.training.checkpoint import Checkpoints
from tests.helpers.gloo_processes import run_in_processes

IDENTITY = Identity(model="net", classes=("a", "b"), manifest_digest="", batch_size=8, seed=0)
CPU = torch.device("cpu")
BEST, NEWEST = "checkpoints/step-000000001.pt", "checkpoints/step-000000003.pt"


@dataclass(frozen=True)
class CountingStore(FolderStore):
    """Notes the checkpoints that it reads, which fails if ``is_gone``."""

    read: list[str] = field(default_factory=list)
    is_gone: bool = False

    def get(self, path: str, etag: str = "") -> bytes:
        if path.endswith(".pt"):
            self.read.append(path)
            if self.is_gone:
                raise OSError("the disk is gone")
        return super().get(path, etag)


def checkpoints(folder: str, *, is_gone: bool = False) -> tuple[list[str], Checkpoints]:
    store = CountingStore(folder, is_gone=is_gone)
    return store.read, Checkpoints(store, IDENTITY, keep=3)


def save(folder: Path, *steps: int) -> None:
    saved = checkpoints(str(folder))[1]
    for step in steps:
        weights = {"weight": torch.full((1000,), float(step))}
        saved.save({"model": weights}, Progress(step=step, evaluated_step=step, score=1 / step))
    saved.close()


def load(folder: str) -> tuple[list[float], list[str]]:
    """Return a weight of the newest and of the best checkpoint on this worker, and the files that it has read."""
    read, of_run = checkpoints(folder)
    newest, best = of_run.load_newest(CPU), of_run.load_best(CPU, step=3)
    assert newest is not None and best is not None and of_run.newest == NEWEST
    return [each.state["model"]["weight"].mean().item() for each in (newest, best)], read


def test_each_file_is_read_once_whatever_the_number_of_workers(tmp_path: Path) -> None:
    save(tmp_path, 1, 3)
    first, *others = run_in_processes(3, load, str(tmp_path))
    assert first == ([3.0, 1.0], [NEWEST, BEST])
    assert others == [([3.0, 1.0], [])] * 2


def failure(folder: str, is_gone: bool) -> str:
    _, of_run = checkpoints(folder, is_gone=is_gone)
    try:
        of_run.load_newest(CPU)
    except (RaytrainError, OSError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("is_gone", "sentence"), [(False, "None of the checkpoints in"), (True, "the disk is gone")])
def test_what_ends_the_reading_worker_ends_all_of_them(is_gone: bool, sentence: str, tmp_path: Path) -> None:
    save(tmp_path, 1)
    if not is_gone:
        (tmp_path / BEST).write_bytes((tmp_path / BEST).read_bytes()[:-200])
    sentences: list[Any] = run_in_processes(2, failure, str(tmp_path), is_gone)
    assert all(sentence in each for each in sentences)
