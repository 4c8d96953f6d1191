"""Augmentation, mixup, CutMix and dropout: the same weights on any number of workers, in parts, and after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.ops import StochasticDepth

from raytrain import Run
from raytrain.training.batches.mixup import mix_batch
from tests.helpers.folder_runs import FolderRun, folder_run, largest_difference, train_here, train_runs

TRANSFORMED: dict[str, Any] = {
    "auto_augment": "randaugment",
    "color_jitter": 0.3,
    "rotation": 20,
    "blur": 0.5,
    "random_erasing": 0.5,
}
MIXED: dict[str, Any] = {"mixup": 0.4, "cutmix": 1.0}
NO_NORM = "tests.helpers.memory_runs:network_without_norm"


def dropping_network(num_classes: int, channels: int) -> nn.Module:
    """A network with all kinds of randomness, and no batch norm."""
    blocks = [nn.Conv2d(channels, 8, 3, padding=1), nn.Dropout2d(0.3), nn.ReLU(), StochasticDepth(0.2, "row")]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, num_classes))


def mixing_loop(run: Run) -> None:
    """The built-in loop, which mixes by hand."""
    model = run.prepare(run.build_model())
    optimizer = run.prepare(run.build_optimizer(model))
    for epoch in run.epochs():
        for batch in epoch:
            mixed = mix_batch(batch, run.num_classes, run.config.seed, mixup=0.4, cutmix=1.0)
            loss = F.cross_entropy(model(mixed.images), mixed.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


CASES: dict[str, dict[str, Any]] = {
    "transformed": TRANSFORMED,
    "mixed": MIXED,
    "mixed in small batches": {"mixup": 0.4, "batch_size": 2, "max_steps": 12},
    "mixed in microbatches": {**MIXED, "accumulate": 3, "model": NO_NORM},
    "averaged and clipped": {"ema_decay": 0.9, "clip_norm": 0.5, "decay_norms_and_biases": False, "weight_decay": 0.01},
    "dropout": {"model": "tests.integration.test_augmented:dropping_network"},
    "dropout in microbatches": {"model": "tests.integration.test_augmented:dropping_network", "accumulate": 2},
}


@pytest.fixture
def damaged(images: Path, tmp_path: Path) -> Path:
    """A folder of images of which every fourth cannot be read."""
    folder = tmp_path / "damaged"
    for number, path in enumerate(sorted(images.rglob("*.png"))[::3]):
        copy = folder / path.relative_to(images)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(b"no image" if number % 4 == 2 else path.read_bytes())
    return folder


def test_the_weights_are_the_same_on_any_number_of_workers_and_after_a_resume(damaged: Path, tmp_path: Path) -> None:
    def runs(prefix: str, stop_after: int | None = None) -> list[FolderRun]:
        defaults = {"batch_size": 7, "max_bad_fraction": 1.0}
        return [
            folder_run(damaged, tmp_path, f"{prefix}-{number}", stop_after=stop_after, **{**defaults, **options})
            for number, options in enumerate(CASES.values())
        ]

    whole = folder_run(damaged, tmp_path, "whole", batch_size=7, **MIXED, model=NO_NORM)
    *alone, at_once = train_runs(1, *runs("1"), whole)
    train_runs(3, *runs("stopped", stop_after=6))  # within the second epoch
    resumed = train_runs(2, *runs("stopped"))
    for name, expected, other in zip(CASES, alone, resumed, strict=True):
        assert largest_difference(expected, other) < 1e-10, name
    assert largest_difference(alone[3], at_once) < 1e-10  # the microbatches of a batch are mixed as the whole is
    assert largest_difference(alone[-1], alone[-2]) < 1e-10  # and their masks are the same


def test_own_transforms_are_the_same_on_any_number_of_workers_and_after_a_resume(images: Path, tmp_path: Path) -> None:
    def run(name: str, stop_after: int | None = None) -> FolderRun:
        transforms = "tests.helpers.own_transforms:Changed"
        return folder_run(images, tmp_path, name, stop_after=stop_after, transforms=transforms)

    train_runs(2, run("stopped", stop_after=6))  # within the second epoch
    # In this process, whose own processes for transforms are forked from one that has imported torch.
    alone_runs = run("stopped"), run("alone"), folder_run(images, tmp_path, "plain")
    resumed, alone, plain = (train_here(each)[0] for each in alone_runs)
    assert largest_difference(alone, resumed) < 1e-10
    assert largest_difference(alone, plain) > 1e-3


def test_own_loops_mix_in_one_call(images: Path, tmp_path: Path) -> None:
    (by_option,) = train_runs(1, folder_run(images, tmp_path, "option", **MIXED))
    (by_hand,) = train_runs(3, folder_run(images, tmp_path, "hand", loop=mixing_loop))
    (plain,) = train_runs(1, folder_run(images, tmp_path, "plain"))
    assert largest_difference(by_option, by_hand) < 1e-10
    assert largest_difference(by_option, plain) > 1e-3


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_an_image_is_mixed_with_the_one_before_it_and_its_target_by_the_same_share(
    kind: str, images: Path, tmp_path: Path
) -> None:
    seen: list[tuple[Any, Any]] = []
    mixing: dict[str, Any] = {kind: 1.0}

    def loop(run: Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(run.build_optimizer(model))
        for epoch in run.epochs():
            for batch in epoch:
                seen.append((batch, mix_batch(batch, run.num_classes, 0, **mixing)))
                model(batch.images).mean().backward()
                optimizer.step()

    train_here(folder_run(images, tmp_path, "seen", loop=loop, epochs=1))
    shares = set()
    for batch, mixed in seen:
        own = mixed.targets.gather(1, batch.labels[:, None])[:, 0]
        alike = batch.labels == batch.labels.roll(1)
        if alike.all():
            continue
        share = own[~alike][0].item()
        shares.add(share)
        assert 0.5 <= share <= 1 and torch.allclose(own[~alike], torch.full_like(own[~alike], share))
        assert torch.allclose(mixed.targets.sum(dim=1), torch.ones_like(own))
        before = batch.images.roll(1, 0)
        if kind == "mixup":
            assert torch.allclose(mixed.images, share * batch.images + (1 - share) * before)
        else:
            pasted = (mixed.images == before) & (before != batch.images)
            assert ((mixed.images == batch.images) | pasted).all()
            assert pasted.any(dim=1).float().mean() == pytest.approx(1 - share, abs=0.02)
    assert len(shares) > 2
