"""torchvision's transforms on single images: random numbers of each sample's own, the mean colour at the edges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

from raytrain.config import ResolvedConfig
from raytrain.errors import UsageError
from raytrain.training.augment import Augment, build_transforms, transform_each

KINDS: dict[str, dict[str, Any]] = {
    "randaugment": {"auto_augment": "randaugment"},
    "trivialaugment": {"auto_augment": "trivialaugment"},
    "color_jitter": {"color_jitter": 0.4},
    "rotation": {"rotation": 30},
    "blur": {"blur": 1.0},
    "random_erasing": {"random_erasing": 1.0},
}
SAMPLES = np.arange(40) * 1_000_003


def config(channels: int = 3, **options: Any) -> ResolvedConfig:
    base = {"name": "run", "device": "cpu", "batch_size": 8, "learning_rate": 0.1, "image_size": (20, 16)}
    colour = {"mean": (0.5,) * channels, "std": (0.2,) * channels, "channels": channels, "precision": "float32"}
    return ResolvedConfig(**{**base, **colour, **options})


def images(channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (40, channels, 20, 16), dtype=torch.uint8, generator=generator)


def transformed(options: dict[str, Any], batch: Tensor, samples: np.ndarray, seed: int = 0, epoch: int = 0) -> Tensor:
    transforms = build_transforms(config(batch.shape[1], **options))
    assert transforms is not None
    return transform_each(transforms, batch, samples, seed, epoch)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_transformed_in_the_same_way_in_any_batch(kind: str, channels: int) -> None:
    batch = images(channels)
    whole = transformed(KINDS[kind], batch, SAMPLES)
    torch.manual_seed(5)
    pieces = [transformed(KINDS[kind], batch[rows], SAMPLES[rows]) for rows in np.array_split(np.arange(40), 3)]
    assert (torch.cat(pieces) == whole).all()
    assert (whole != batch).any()


@pytest.mark.parametrize("kind", KINDS)
def test_sample_epoch_and_seed_change_the_transform(kind: str) -> None:
    same = images()[:1].expand(40, -1, -1, -1)
    first = transformed(KINDS[kind], same, SAMPLES)
    assert len(first.flatten(1).unique(dim=0)) > 10
    for seed, epoch in [(1, 0), (0, 1)]:
        assert (transformed(KINDS[kind], same, SAMPLES, seed, epoch) != first).any()


def test_transforms_leave_the_random_numbers_of_the_loop_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    transformed(KINDS["randaugment"], images(), SAMPLES)
    assert (torch.rand(4) == expected).all()


@pytest.mark.parametrize("kind", ["rotation", "random_erasing"])
def test_uncovered_pixels_get_the_mean_colour(kind: str) -> None:
    white = torch.full((40, 3, 20, 16), 255, dtype=torch.uint8)
    changed = transformed(KINDS[kind], white, SAMPLES)
    assert changed.min() > 100 and 255 in changed  # black would be 0
    assert ((changed == 127) | (changed == 128)).any()


def test_no_option_means_no_transforms() -> None:
    assert build_transforms(config()) is None


def test_own_transforms_come_first(tmp_path: Path) -> None:
    chain = build_transforms(config(random_erasing=1.0), lambda: v2.RandomInvert(1.0))
    assert chain is not None
    black = transform_each(chain, torch.zeros(4, 3, 20, 16, dtype=torch.uint8), SAMPLES[:4], 0, 0)
    assert set(black.unique().tolist()) == {128, 255}


def test_own_transforms_may_be_a_list(tmp_path: Path) -> None:
    chain = build_transforms(config(), lambda: [v2.RandomInvert(1.0), lambda image: image // 2])
    assert chain is not None
    black = transform_each(chain, torch.zeros(4, 3, 20, 16, dtype=torch.uint8), SAMPLES[:4], 0, 0)
    assert set(black.unique().tolist()) == {127}


@pytest.mark.parametrize("own", [v2.RandomInvert(1.0), v1.Compose([v2.RandomInvert(1.0)]), lambda image: 255 - image])
def test_own_transforms_may_be_named_themselves(own: Any) -> None:
    chain = build_transforms(config(), own)
    assert chain is not None
    assert transform_each(chain, torch.zeros(4, 3, 20, 16, dtype=torch.uint8), SAMPLES[:4], 0, 0).min() == 255


def test_a_transform_that_fails_is_named_and_not_the_network(tmp_path: Path) -> None:
    failing = Augment(config(transforms="mine.py:jitter"), v2.Normalize([0.5], [0.5]))
    with pytest.raises(
        UsageError, match=r"--transforms mine.py:jitter cannot be applied to uint8 .*: TypeError: Input"
    ):
        failing.train(torch.zeros(4, 20, 16, 3, dtype=torch.uint8), SAMPLES[:4], 0)


@pytest.mark.parametrize("made", [None, 0.5, [v2.RandomInvert(1.0), "flip"]])
def test_what_is_no_transform_is_refused(made: Any) -> None:
    with pytest.raises(UsageError, match=r"returns .*, which is no transform; return a function of an image, uint8"):
        build_transforms(config(), lambda: made)


def test_transforms_that_make_anything_but_a_tensor_are_refused() -> None:
    with pytest.raises(UsageError, match=r"into one of type PIL.Image.Image; transforms must keep both"):
        transform_each(v2.ToPILImage(), images(), SAMPLES, 0, 0)


@pytest.mark.parametrize("transform", [v2.Resize((9, 9)), v2.ToDtype(torch.float32)], ids=["shape", "dtype"])
def test_transforms_that_change_the_shape_or_type_are_refused(transform: Any) -> None:
    with pytest.raises(UsageError, match=r"--transforms made an image of uint8 \(3, 20, 16\) into one of"):
        transform_each(transform, images(), SAMPLES, 0, 0)
