"""Balanced sampling, class weights and focal loss give the same weights on any number of workers, and an audit fits."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch

from raytrain import audit
from raytrain.data.labels.manifest import Manifest
from raytrain.runs.documents import MANIFEST, write_config
from raytrain.storage.open import open_store
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import (
    CLASSES,
    Recorder,
    config,
    images,
    make_run,
    note_microbatches,
    trained,
    weights_of,
)

NUM_IMAGES, NUM_STEPS = 38, 18
OPTIONS = config(batch_size=7, epochs=3, sampling="balanced", trace=True, focal_gamma=1.5)


class Trained(NamedTuple):
    weights: dict[str, torch.Tensor]
    samples: dict[int, list[int]]
    """Of this worker in each step."""


def balanced(folder: str, stop_after: int | None) -> Trained:
    run = make_run(OPTIONS, images(NUM_IMAGES), folder, Recorder(stop_after), class_weights=(0.5, 1.5, 1.0, 2.0))
    seen = note_microbatches(run)
    trained(run)
    weights = {name.removeprefix("module."): value.clone() for name, value in weights_of(run).items()}
    return Trained(weights, {step: samples.tolist() for step, samples, _ in seen})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return balanced(str(tmp_path_factory.mktemp("alone")), None)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Trained]]:
    """A run that two workers started and three continued from the middle of an epoch."""
    folder = tmp_path_factory.mktemp("resumed")
    run_in_processes(2, balanced, str(folder / "run"), 8)
    return folder, run_in_processes(3, balanced, str(folder / "run"), None)


def test_three_workers_draw_and_compute_what_one_does_also_after_a_resume(
    alone: Trained, resumed: tuple[Path, list[Trained]]
) -> None:
    _, ranks = resumed
    assert max((ranks[0].weights[name] - value).abs().max().item() for name, value in alone.weights.items()) < 1e-10
    first = min(ranks[0].samples)
    assert 0 < first < NUM_STEPS
    for step in range(first, NUM_STEPS):
        assert [sample for rank in ranks for sample in rank.samples[step]] == alone.samples[step]


def test_every_class_comes_equally_often_in_an_epoch(alone: Trained) -> None:
    labels = images(NUM_IMAGES).labels
    drawn = np.concatenate([alone.samples[step] for step in range(6)])
    assert np.bincount(labels[drawn]).tolist() == [10, 10, 9, 9] != np.bincount(labels).tolist()


def test_an_audit_expects_each_sample_as_often_as_it_is_drawn(resumed: tuple[Path, list[Trained]]) -> None:
    folder, _ = resumed
    store = open_store(str(folder / "run"))
    keys = pa.array([f"{number:02}.png" for number in range(NUM_IMAGES)], pa.large_string())
    labels = images(NUM_IMAGES).labels.astype(np.int32)
    sizes = np.ones(NUM_IMAGES, np.int64)
    store.put(MANIFEST, Manifest(keys, labels, sizes, keys, CLASSES, "images").to_parquet())
    write_config(store, OPTIONS)
    result = audit("run", storage=str(folder))
    assert result.clean and [(epoch.planned, epoch.used_once) for epoch in result.epochs] == [(38, 38)] * 3
    write_config(store, config(batch_size=7, epochs=3, trace=True))
    assert not audit("run", storage=str(folder)).clean


def test_an_image_that_comes_twice_is_augmented_differently(tmp_path: Path) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES), str(tmp_path), Recorder())
    seen = note_microbatches(run)
    trained(run)
    epoch = seen[: run.plan.steps_per_epoch]
    drawn, pixels = torch.cat([samples for _, samples, _ in epoch]).tolist(), torch.cat([each for _, _, each in epoch])
    twice = [(drawn.index(sample), place) for place, sample in enumerate(drawn) if sample in drawn[:place]]
    assert twice and any(not torch.equal(pixels[one], pixels[other]) for one, other in twice)
