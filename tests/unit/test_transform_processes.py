"""A user's transforms run in several processes beside the one that trains, and give what one process gives."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.blocks import LocalBatch
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.batch_plan import GlobalBatch
from raytrain.errors import UsageError
from raytrain.loader import decoder_processes, transform_processes
from raytrain.loader.transform_processes import TransformedBatches, transformed
from raytrain.training.batches.user_transforms import UserTransforms

pytestmark = pytest.mark.not_quick
_SIZES = (11, 0, 70, 3)


def config(**options: Any) -> ResolvedConfig:
    chosen = {
        "name": "run",
        "device": "cpu",
        "batch_size": 8,
        "learning_rate": 0.1,
        "transforms": "mine.py:own",
        "precision": "float32",
    }
    return ResolvedConfig(**{**chosen, "mean": (0.5,) * 3, "std": (0.2,) * 3, "image_size": (12, 12), **options})


class Batches:
    """Local batches of several sizes, of which one has no image."""

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        """Yield batches of random pixels, from ``first_step`` on."""
        for step, size in enumerate(_SIZES[first_step:], start=first_step):
            draws = 100 * step + np.arange(size)
            pixels = np.random.default_rng(step).integers(0, 256, (size, 15, 15, 3), np.uint8)
            yield LocalBatch(GlobalBatch(step, 2, 0, size), pixels, draws % 10, draws, draws, (size,))

    def held_out(self, part: Part) -> Iterator[LocalBatch]:
        """Yield the same batches."""
        return self.train(0)

    def keys(self, part: Part, samples: Sequence[int]) -> list[str]:
        """Return names."""
        return [f"{sample}.png" for sample in samples]


def moved(image: Tensor) -> Tensor:
    """Draw from all generators of libraries."""
    right = random.randrange(10) + np.random.randint(10) + int(torch.randint(10, ()))
    return image.roll(right, 2)


def stamped(image: Tensor) -> Tensor:
    """Return the number of the process in base 256."""
    return torch.tensor([os.getpid() >> 16, os.getpid() >> 8 & 255, os.getpid() & 255], dtype=torch.uint8)[
        :, None, None
    ].expand_as(image)


def unseeded(image: Tensor) -> Tensor:
    return image ^ int(np.random.default_rng().integers(256))


def failing(image: Tensor) -> Tensor:
    raise RuntimeError("no more images")


def test_several_processes_give_what_one_gives() -> None:
    options = config(random_resized_crop=True, cache_side=1.25)
    here, notes = UserTransforms(options, moved), list[str]()
    with transformed(Batches(), options, moved) as source:
        for first_step in (0, 2):
            batches = list(source.train(first_step))
            assert [len(local.images) for local in batches] == list(_SIZES[first_step:])
            for local, plain in zip(batches, Batches().train(first_step), strict=True):
                assert (local.draws == plain.draws).all() and (local.labels == plain.labels).all()
                if len(local.images):
                    assert (local.images == here(plain.images, plain.draws, 2)).all()
        assert isinstance(source, TransformedBatches)
        source.try_twice(notes.append)
        held_out = next(source.held_out("validation"))
        assert (held_out.images == next(Batches().train(0)).images).all()
    assert notes == []


def test_the_process_that_trains_transforms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # There are as many processes as cores, and two are wanted on any machine.
    monkeypatch.setattr(transform_processes, "num_decoders", lambda: 2)
    monkeypatch.setattr(decoder_processes, "num_decoders", lambda: 2)
    with transformed(Batches(), config(cache_side=1.25, random_resized_crop=True), stamped) as source:
        pixels = np.concatenate([local.images[:, 0, 0] for local in source.train(0) if len(local.images)])
    processes = {int(high) << 16 | int(middle) << 8 | int(low) for high, middle, low in pixels}
    assert len(processes) == 2 and os.getpid() not in processes


def test_what_a_transform_raises_reaches_the_loop_in_one_sentence() -> None:
    said = pytest.raises(UsageError, match=r"--transforms mine.py:own cannot be applied to uint8 .*no more images")
    with transformed(Batches(), config(cache_side=1.25, random_resized_crop=True), failing) as source, said:
        list(source.train(0))


@pytest.mark.usefixtures("new_decoders")
def test_a_module_in_the_current_folder_of_a_notebook_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("def inverted(image):\n    return 255 - image\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    inverted = import_module("beside_the_notebook").inverted
    with transformed(Batches(), config(cache_side=1.25, random_resized_crop=True), inverted) as source:
        assert len(next(source.train(0)).images) == _SIZES[0]


def test_generators_that_are_not_found_are_reported() -> None:
    notes: list[str] = []
    options = config(cache_side=1.25, random_resized_crop=True)
    with transformed(Batches(), options, unseeded) as source:
        assert isinstance(source, TransformedBatches)
        source.try_twice(notes.append)
    (note,) = notes
    assert note.startswith("--transforms mine.py:own makes different images of the same one")


def test_without_transforms_the_source_is_left_as_it_is() -> None:
    source = Batches()
    with transformed(source, config(transforms=None), None) as same:
        assert same is source
