"""Augmentation: its effect on an image, which does not depend on the other images of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.data.plan.permutation import uniform
from raytrain.training.batches.augment_and_normalise import Augment

MEAN, STD = (0.2, 0.5, 0.7), (0.1, 0.2, 0.3)


def augment(**options: Any) -> Augment:
    base = {"name": "run", "device": "cpu", "batch_size": 8, "learning_rate": 0.1, "precision": "float32"}
    return Augment(ResolvedConfig(**{**base, "image_size": (12, 16), "mean": MEAN, "std": STD, **options}))


def images(num: int = 40, height: int = 12, width: int = 16) -> Tensor:
    return torch.randint(0, 256, (num, height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def normalised(raw: Tensor) -> Tensor:
    return ((raw.double() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(0, 3, 1, 2)


SAMPLES = np.arange(40) * 1_000_003
ALL = {"flip": "random", "translate": 3, "random_resized_crop": True, "cache_side": 1.0}


@pytest.mark.parametrize(
    ("precision", "dtype"), [("float32", torch.float32), ("bfloat16", torch.float32), ("float64", torch.float64)]
)
@pytest.mark.parametrize("channels_last", [False, True])
def test_evaluation_only_normalises(precision: str, dtype: torch.dtype, channels_last: bool) -> None:
    out = augment(precision=precision, channels_last=channels_last, **ALL).evaluate(images())
    assert out.dtype == dtype
    assert out.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    torch.testing.assert_close(out.double(), normalised(images()), rtol=1e-5, atol=1e-5)


def test_training_without_augmentation_is_evaluation() -> None:
    plain = augment()
    torch.testing.assert_close(plain.train(images(), SAMPLES, 3), plain.evaluate(images()), rtol=0, atol=0)


def test_images_are_resized_to_the_networks_input_size() -> None:
    gradient = torch.arange(32, dtype=torch.uint8)[None, None, :, None].expand(2, 24, 32, 3) * 4
    out = augment().evaluate(gradient)
    assert out.shape == (2, 3, 12, 16)
    halved = gradient.double().unflatten(1, (12, 2)).unflatten(3, (16, 2)).mean(dim=(2, 4))
    torch.testing.assert_close(out[..., 1:-1].double(), normalised(halved)[..., 1:-1], rtol=1e-4, atol=1e-4)


def test_bicubic_pixels_stay_within_the_range_of_pixels() -> None:
    edge = torch.zeros(2, 24, 32, 3, dtype=torch.uint8)
    edge[:, :, 16:] = 255
    cropping = {**ALL, "flip": "none", "translate": 0}
    bicubic, bilinear = (augment(interpolation=each, **cropping) for each in ("bicubic", "bilinear"))
    lowest, highest = normalised(torch.tensor([0, 255], dtype=torch.uint8)[:, None, None, None].expand(2, 1, 1, 3))
    for one, other in ((each.evaluate(edge), each.train(edge, SAMPLES[:2], 0)) for each in (bicubic, bilinear)):
        assert (one >= lowest - 1e-5).all() and (one <= highest + 1e-5).all()
        assert (other >= lowest - 1e-5).all() and (other <= highest + 1e-5).all()
    assert not torch.allclose(bicubic.evaluate(edge), bilinear.evaluate(edge))


def test_downscaling_averages_pixels() -> None:
    stripes = torch.tensor([240, 0, 0, 0], dtype=torch.uint8).repeat(16)[None, None, :, None].expand(1, 48, 64, 3)
    out = augment().evaluate(stripes)
    grey = normalised(torch.full((1, 12, 14, 3), 60, dtype=torch.uint8))
    torch.testing.assert_close(out[..., 1:-1].double(), grey, rtol=0, atol=0.5)


@pytest.mark.parametrize(
    "options",
    [ALL, {"flip": "random"}, {"flip": "alternating"}, {"translate": 3}, ALL | {"channels_last": True}],
    ids=str,
)
def test_the_augmentation_of_an_image_is_the_same_in_any_batch(options: dict[str, Any]) -> None:
    ours = augment(**options)
    whole = ours.train(images(), SAMPLES, 1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    pieces = [ours.train(images()[piece], SAMPLES[piece.numpy()], 1) for piece in order.split([1, 7, 32])]
    torch.testing.assert_close(torch.cat(pieces), whole[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("other", [{"epoch": 2}, {"seed": 5}, {"samples": SAMPLES + 1}], ids=str)
def test_epoch_seed_and_sample_change_the_augmentation(other: dict[str, Any]) -> None:
    same = torch.stack([images()[0]] * 40)
    first = augment(**ALL, seed=4).train(same, SAMPLES, 1)
    second = augment(**ALL, seed=other.get("seed", 4)).train(same, other.get("samples", SAMPLES), other.get("epoch", 1))
    assert (first != second).flatten(1).any(dim=1).all()
    assert (first[0] != first[1:]).flatten(1).any(dim=1).all()


def test_about_half_of_the_images_are_mirrored_and_the_rest_unchanged() -> None:
    out = augment(flip="random").train(images(), SAMPLES, 0)
    plain = augment().evaluate(images())
    mirrored = (out == plain.flip(3)).flatten(1).all(dim=1)
    untouched = (out == plain).flatten(1).all(dim=1)
    assert (mirrored ^ untouched).all()
    assert 10 <= mirrored.sum() <= 30


def test_alternating_flips_mirror_each_image_in_every_second_epoch() -> None:
    ours, plain = augment(flip="alternating"), augment().evaluate(images())
    epochs = [ours.train(images(), SAMPLES, epoch) for epoch in range(4)]
    mirrored = torch.stack([(out == plain.flip(3)).flatten(1).all(dim=1) for out in epochs])  # (4, B)
    untouched = torch.stack([(out == plain).flatten(1).all(dim=1) for out in epochs])
    assert (mirrored ^ untouched).all()
    assert (mirrored[1:] == untouched[:-1]).all()
    assert 10 <= mirrored[0].sum() <= 30
    other = augment(flip="alternating", seed=5).train(images(), SAMPLES, 0)
    assert not torch.equal(other, epochs[0]) and not torch.equal(other, epochs[1])


@pytest.mark.parametrize("flip", ["none", "random"])
def test_translation_shifts_by_whole_pixels_and_fills_with_zeros(flip: str) -> None:
    out = augment(translate=2, flip=flip).train(images(400), np.arange(400), 0)
    plain = augment().evaluate(images(400))
    padded = torch.nn.functional.pad(torch.stack([plain, plain.flip(3)]), (2, 2, 2, 2))  # (2, B, C, H + 4, W + 4)
    candidates = padded.unfold(3, 12, 1).unfold(4, 16, 1).movedim((3, 4), (1, 2))  # (2, 5, 5, B, C, H, W)
    found = (candidates == out).flatten(-3).all(dim=-1).flatten(0, 2)  # (2 * 5 * 5, B)
    assert (found.sum(dim=0) == 1).all()
    each = found.sum(dim=1)[: 50 if flip == "random" else 25]
    assert each.min() > 0  # All 25 shifts, mirrored and not mirrored, occur in 400 images.
    assert flip or each.sum() == 400


def test_a_random_resized_crop_of_a_gradient_is_a_part_of_it() -> None:
    row = torch.linspace(0, 255, 64).round().to(torch.uint8)
    flat = torch.stack([row[None, :].expand(64, 64), row[:, None].expand(64, 64), row[None, :].expand(64, 64)], dim=2)
    out = augment(image_size=(64, 64), random_resized_crop=True, cache_side=1).train(
        flat.expand(400, 64, 64, 3), np.arange(400), 0
    )
    pixels = out * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]  # Back to 0..1.
    width = (pixels[:, 0, 0, -1] - pixels[:, 0, 0, 0]) * 64 / 63
    height = (pixels[:, 1, -1, 0] - pixels[:, 1, 0, 0]) * 64 / 63
    assert pixels.min() >= -1e-3 and pixels.max() <= 1 + 1e-3
    area, aspect = width * height, width / height
    assert 0.06 < area.min() < 0.15 and 0.9 < area.max() < 1.05
    assert 0.7 < aspect.min() < 0.8 and 1.25 < aspect.max() < 1.4
    left = pixels[:, 0, 0, 0]
    assert left.min() < 0.02 and left.max() > 0.5


def test_grey_images_have_one_channel() -> None:
    grey = augment(channels=1, mean=(0.5,), std=(0.5,), **ALL)
    assert grey.train(images()[..., :1], SAMPLES, 0).shape == (40, 1, 12, 16)


def test_the_memory_of_a_batch_is_used_again_once_nobody_has_it() -> None:
    plain = augment()
    kept = plain.evaluate(images())[3:5]
    addresses = {plain.evaluate(255 - images()).data_ptr() for _ in range(20)}
    torch.testing.assert_close(kept, plain.evaluate(images())[3:5], rtol=0, atol=0)
    assert len(addresses) == 1


def test_the_random_numbers_are_those_of_splitmix64() -> None:
    # First outputs of the published generator for seed 1234567, https://prng.di.unimi.it/splitmix64.c
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    wanted = [(word >> 11) * 2.0**-53 for word in words]
    assert uniform(1234567, np.array([0]), 5)[0].tolist() == wanted
    assert uniform(1234567, np.array([1]), 2)[0].tolist() == wanted[2:4]


def test_the_random_numbers_are_uniform_and_unrelated() -> None:
    numbers = torch.from_numpy(uniform(2**64 - 1, np.arange(20_000), 4))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert (numbers.mean(dim=0) - 0.5).abs().max() < 0.01
    correlation = torch.corrcoef(torch.cat([numbers.T[:, 1:], numbers.T[:1, :-1]])) - torch.eye(5)
    assert correlation.abs().max() < 0.03
