"""Augmentation of whole batches: each image gets torchvision's operations, with numbers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import raytrain
from raytrain.errors import UsageError
from raytrain.training.batches import image_operations
from raytrain.training.batches.augmentation import magnitudes_of
from raytrain.training.batches.image_operations import Operation, apply_operations, erase
from raytrain.training.batches.mixup import mix_batch

BILINEAR, FILL = v2.InterpolationMode.BILINEAR, [100, 120, 140]
POLICIES = {"rand": v2.RandAugment, "trivial": v2.TrivialAugmentWide, "augmix": v2.AugMix}
KINDS: dict[str, dict[str, Any]] = {
    "RandAugment": {"auto_augment": "rand-m9-n2"},
    "TrivialAugment": {"auto_augment": "trivialaugment"},
    "AugMix": {"auto_augment": "augmix"},
    "3-Augment": {"auto_augment": "3-augment"},
    "rotation": {"rotation": 30},
    "colour jitter": {"color_jitter": 0.4},
    "blur": {"blur": 0.5},
    "erasing": {"random_erasing": 0.5},
}


def colour(channels: int = 3) -> Tensor:
    return torch.tensor(FILL[:channels], dtype=torch.float32)[:, None, None]


def noise(num: int, channels: int = 3, size: tuple[int, int] = (40, 30)) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, channels, *size), dtype=torch.uint8, generator=generator)


def photographs(num: int, channels: int = 3, size: tuple[int, int] = (40, 30)) -> Tensor:
    """Smooth images, some of whose channels have few levels, or one."""
    generator = torch.Generator().manual_seed(1)
    coarse = torch.rand(num, channels, 5, 5, generator=generator) * 340 - 40
    smooth = torch.nn.functional.interpolate(coarse, size, mode="bicubic").clamp(0, 255)
    smooth[1] = (smooth[1] / 60).round() * 60
    smooth[2] = 77
    return smooth.to(torch.uint8)


def differences(ours: Tensor, theirs: Sequence[Tensor]) -> Tensor:
    return (ours.int() - torch.stack(list(theirs)).int()).abs()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("operation", list(Operation)[: Operation.BLUR], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_each_operation_of_each_magnitude_is_torchvisions(policy: str, operation: Operation, channels: int) -> None:
    # torchvision applies what it has drawn with a private method, and its magnitudes are in private tables.
    theirs: Any = POLICIES[policy](interpolation=BILINEAR, fill=FILL[:channels])
    name = operation.name.title().replace("_", "")
    if name not in theirs._AUGMENTATION_SPACE:
        return  # AugMix always changes an image
    ours = magnitudes_of(policy, (40, 30))[operation]
    of_levels, signed = theirs._AUGMENTATION_SPACE[name]
    expected_magnitudes = of_levels(len(ours), 40, 30)
    np.testing.assert_allclose(ours, 0 if expected_magnitudes is None else expected_magnitudes.numpy(), rtol=1e-6)
    operations = np.full(len(ours), operation)
    for sign in (1, -1) if signed else (1,):
        for images in (noise(len(ours), channels), photographs(len(ours), channels)):
            expected = [
                theirs._apply_image_or_video_transform(image, name, magnitude, BILINEAR, theirs._fill)
                for image, magnitude in zip(images, (sign * ours).tolist(), strict=True)
            ]
            levels = differences(apply_operations(images, [(operations, sign * ours)], colour(channels)), expected)
            assert levels.max() <= 1
            assert levels.double().mean() < 0.03


@pytest.mark.parametrize("size", [(40, 30), (250, 270), (6, 9)], ids=str)
def test_a_blur_is_torchvisions(size: tuple[int, int]) -> None:
    sigmas, side = [0.1, 0.4, 1.0, 1.7, 2.0], min(size) // 10 * 2 + 1
    images = noise(len(sigmas), size=size)
    ours = apply_operations(images, [(np.full(len(sigmas), Operation.BLUR), np.array(sigmas))], colour())
    theirs = [F.gaussian_blur(image, [side, side], [sigma]) for image, sigma in zip(images, sigmas, strict=True)]
    levels = differences(ours, theirs)
    assert levels.max() <= 1
    assert levels.double().mean() < 1e-3


def test_a_box_is_erased_as_by_torchvision() -> None:
    boxes = [(0, 0, 40, 30), (3, 4, 20, 5), (7, 7, 7, 7), (39, 29, 40, 30)]
    images = noise(len(boxes))
    theirs = [
        F.erase(image, top, left, bottom - top, right - left, torch.tensor(FILL)[:, None, None])
        for image, (top, left, bottom, right) in zip(images, boxes, strict=True)
    ]
    assert torch.equal(erase(images, np.array(boxes), colour()), torch.stack(theirs))
    # Without a GPU, only the private function is what a GPU computes.
    by_masks = image_operations._erase_by_masks(images, np.array(boxes), colour().to(torch.uint8))
    assert torch.equal(by_masks, torch.stack(theirs))


@pytest.mark.parametrize("size", [(40, 30), (500, 400)], ids=str)  # of the large ones, few are changed at a time
def test_each_image_gets_its_own_operations_in_its_own_place(size: tuple[int, int]) -> None:
    images = noise(30, size=size)
    given = images.clone()
    steps = [(np.arange(30) * factor % len(Operation), np.ones(30)) for factor in (1, 0, 4)]  # 0: the identity
    together = apply_operations(images, steps, colour())
    for row in range(30):
        alone = images[row : row + 1]
        for operations, magnitudes in steps:
            alone = apply_operations(alone, [(operations[row : row + 1], magnitudes[row : row + 1])], colour())
        assert torch.equal(together[row], alone[0])
    assert torch.equal(images, given)  # the images that were given are not changed


def test_translations_are_the_same_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = np.array([Operation.TRANSLATE_X, Operation.TRANSLATE_Y] * 6)
    magnitudes = np.array([0.0, 0.7, -0.7, 3, -3.9, 12, -12, 29, -30, 40, -41, 100])
    images = noise(12)
    on_a_cpu = apply_operations(images, [(operations, magnitudes)], colour())
    # Without a GPU, only the private table makes a CPU compute them as a GPU does.
    monkeypatch.setattr(image_operations, "_FUNCTION_OF", image_operations._CUDA_FUNCTION_OF)
    assert torch.equal(apply_operations(images, [(operations, magnitudes)], colour()), on_a_cpu)


@pytest.mark.parametrize("kind", KINDS)
def test_the_images_themselves_stay_as_they_are(kind: str) -> None:
    images = noise(3, size=(500, 400))
    changed = raytrain.Augmentation(**KINDS[kind], fill=FILL)(images, range(3))
    assert torch.equal(images, noise(3, size=(500, 400)))
    assert changed is not images


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_looks_the_same_in_any_batch(kind: str, channels: int) -> None:
    augmentation = raytrain.Augmentation(**KINDS[kind], fill=FILL[:channels], seed=5)
    images, samples = noise(60, channels, (33, 31)), np.arange(60) * 1_000_003
    whole = augmentation(images, samples, epoch=2)
    order = np.random.default_rng(0).permutation(60)
    pieces = [augmentation(images[rows], samples[rows], epoch=2) for rows in np.array_split(order, [1, 8, 20])]
    assert torch.equal(torch.cat(pieces), whole[order])
    assert whole.dtype == torch.uint8 and not torch.equal(whole, images)
    assert torch.equal(augmentation(images, torch.from_numpy(samples).tolist(), epoch=2), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_sample_epoch_and_seed_change_an_image(kind: str) -> None:
    same, samples = noise(1).expand(40, -1, -1, -1), range(40)
    first = raytrain.Augmentation(**KINDS[kind])(same, samples, epoch=1)
    assert len(first.flatten(1).unique(dim=0)) > 10
    for seed, epoch in ((0, 0), (1, 1)):
        assert not torch.equal(raytrain.Augmentation(**KINDS[kind], seed=seed)(same, samples, epoch), first)


def test_the_random_numbers_of_the_loop_stay_as_they_are() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    raytrain.Augmentation("randaugment", rotation=3, color_jitter=0.1, blur=1, random_erasing=1)(noise(8), range(8))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_images_look_the_same_with_another_default_type_of_torch(kind: str) -> None:
    augmentation, images = raytrain.Augmentation(**KINDS[kind]), noise(60)
    expected = augmentation(images, range(60))
    for dtype in (torch.float64, torch.bfloat16):
        torch.set_default_dtype(dtype)
        try:
            assert torch.equal(augmentation(images, range(60)), expected)
        finally:
            torch.set_default_dtype(torch.float32)


def test_all_operations_are_drawn_equally_often_and_half_of_them_in_each_direction() -> None:
    _, (operations, magnitudes) = raytrain.Augmentation("rand-m30-n2").steps(np.arange(14_000), 0, (32, 32))
    counts = np.bincount(operations)
    assert len(counts) == Operation.BLUR and counts.min() > 850 and counts.max() < 1150
    rotations = magnitudes[operations == Operation.ROTATE]
    assert set(rotations) == {-30.0, 30.0} and 0.42 < (rotations > 0).mean() < 0.58


@pytest.mark.parametrize(
    ("images", "samples", "message"),
    [
        (torch.zeros(2, 3, 8, 8), range(2), r"images of torch.float32 \(2, 3, 8, 8\); give torch.uint8 \(m, C, H, W\)"),
        (torch.zeros(2, 8, 8, 3, dtype=torch.uint8), range(2), "with one or three channels"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), range(3), "got 2 images and 3 samples; give one for each"),
        (
            torch.zeros(2, 3, 8, 8, dtype=torch.uint8),
            [[0], [1]],
            r"samples of the shape \(2, 1\); give whole numbers \(2,\)",
        ),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), [0.2, 1.0], "samples of the type float64; give whole numbers"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["a", "b"], "samples of the type <U1; give whole numbers"),
        ([torch.zeros(3, 8, 8, dtype=torch.uint8)], range(1), "images in a list; give a tensor"),
        (
            torch.zeros(2, 1, 8, 8, dtype=torch.uint8),
            range(2),
            "a fill of 3 numbers, and images of 1 channel; give one",
        ),
    ],
)
def test_other_images_are_refused(images: Tensor, samples: range, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        raytrain.Augmentation("randaugment", fill=FILL)(images, samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blur": 2}, "--blur is 2; it must be at least 0 and at most 1"),
        ({"rotation": -5}, "--rotation is -5"),
        ({"rotation": float("nan")}, "--rotation is nan"),
        ({"color_jitter": "much"}, "--color-jitter is 'much'; give a number"),
        ({"auto_augment": 3}, "--auto-augment is 3; give"),
        ({"fill": "red"}, "got the fill 'red'; give a number from 0 to 255"),
        ({"fill": (0, 0, 256)}, "got the fill"),
        ({"seed": 1.5}, "got the seed 1.5; give a whole number"),
    ],
)
def test_numbers_that_no_run_would_take_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        raytrain.Augmentation(**options)
    with pytest.raises(UsageError, match=r"got the epoch 0\.5; give a whole number"):
        raytrain.Augmentation("randaugment")(noise(2), range(2), 0.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("shares", [{}, {"mixup": -1.0}, {"mixup": 0.2, "cutmix": -1.0}])
def test_a_mixture_of_nothing_is_refused(shares: dict[str, Any]) -> None:
    labels = torch.zeros(2, dtype=torch.int64)
    batch = raytrain.Batch(torch.zeros(2, 3, 8, 8), labels, labels, labels, 0, 0, 2, (2,))
    with pytest.raises(UsageError, match=r"mix_batch got mixup .* give at least one that is above 0, and none below"):
        mix_batch(batch, 3, 0, **shares)


@pytest.mark.parametrize("text", ["rand-m31-n2", "rand-m9-mstd0.5", "rand-m9-n0", "augmix-m11", "augmix-m0", "randaug"])
def test_a_policy_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--auto-augment is '{text}'.*; give randaugment, or rand-m9-n2"):
        raytrain.Augmentation(text)


def test_nothing_is_done_without_options_or_images() -> None:
    assert not raytrain.Augmentation()
    images = noise(4)
    assert torch.equal(raytrain.Augmentation()(images, range(4)), images)
    assert raytrain.Augmentation("augmix")(images[:0], []).shape == (0, 3, 40, 30)
