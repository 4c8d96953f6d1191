"""Transforms of the user's own, on single images, with random numbers of each sample's own; options come after them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

import raytrain
from raytrain.config import ResolvedConfig
from raytrain.errors import UsageError
from raytrain.training.batches.augment_and_normalise import Augment
from raytrain.training.batches.user_transforms import UserTransforms, own_transforms, transform_each
from raytrain.training.random_numbers import held_generators

SAMPLES = np.arange(40) * 1_000_003


def config(channels: int = 3, **options: Any) -> ResolvedConfig:
    base = {"name": "run", "device": "cpu", "batch_size": 8, "learning_rate": 0.1, "image_size": (20, 16)}
    colour = {"mean": (0.5,) * channels, "std": (0.2,) * channels, "channels": channels, "precision": "float32"}
    return ResolvedConfig(**{**base, **colour, **options})


def images(channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (40, channels, 20, 16), dtype=torch.uint8, generator=generator)


def test_transforms_leave_the_random_numbers_of_the_loop_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    transform_each(v2.RandomErasing(1.0), images(), SAMPLES, 0, 0)
    assert (torch.rand(4) == expected).all()


@pytest.mark.parametrize("options", [{"rotation": 30}, {"random_erasing": 1.0}], ids=str)
def test_uncovered_pixels_get_the_mean_colour(options: dict[str, Any]) -> None:
    white = torch.full((40, 20, 16, 3), 255, dtype=torch.uint8)
    pixels = Augment(config(**options)).train(white, SAMPLES, 0)
    levels = ((pixels * 0.2 + 0.5) * 255).round()
    assert levels.min() > 100 and 255 in levels  # black would be 0
    assert (levels == 128).any()


def test_options_change_an_image_as_augmentation_does() -> None:
    chosen: dict[str, Any] = {"auto_augment": "randaugment", "rotation": 5, "color_jitter": 0.2, "random_erasing": 0.5}
    pixels = Augment(config(**chosen, blur=0.5, seed=3)).train(images().permute(0, 2, 3, 1), SAMPLES, 2)
    expected = raytrain.Augmentation(**chosen, blur=0.5, seed=3, fill=128)(images(), SAMPLES, epoch=2)
    assert torch.equal(((pixels * 0.2 + 0.5) * 255).round().to(torch.uint8), expected)


def test_own_transforms_come_after_crops_and_the_size_of_the_epoch() -> None:
    options = config(image_size="8..16", random_resized_crop=True, cache_side=1.5, epochs=4)
    sources = np.random.default_rng(0).integers(0, 256, (5, 24, 24, 3), np.uint8)
    sizes: list[tuple[int, ...]] = []

    def own(image: Tensor) -> Tensor:
        sizes.append(tuple(image.shape))
        return 255 - image

    ours, plain = UserTransforms(options, own), UserTransforms(options, lambda image: image.clone())
    for epoch, side in ((0, 8), (3, 16)):
        changed = ours(sources, SAMPLES[:5], epoch)
        assert changed.shape == (5, side, side, 3) and set(sizes) == {(3, side, side)}
        assert (255 - changed == plain(sources, SAMPLES[:5], epoch)).all()
        sizes.clear()


def test_own_transforms_may_be_a_list() -> None:
    chain = own_transforms(config(), lambda: [v2.RandomInvert(1.0), lambda image: image // 2])
    black = transform_each(chain, torch.zeros(4, 3, 20, 16, dtype=torch.uint8), SAMPLES[:4], 0, 0)
    assert set(black.unique().tolist()) == {127}


class Shifts:
    """A transform that draws from generators of its own, as those of albumentations do."""

    def __init__(self) -> None:
        self.of_numpy, self.of_python = [np.random.default_rng()], {"one": random.Random()}
        self.of_torch = torch.Generator()
        self.of_torch.seed()

    def __call__(self, image: Tensor) -> Tensor:
        down = int(self.of_numpy[0].integers(20))
        right = self.of_python["one"].randrange(16) + int(torch.randint(16, (), generator=self.of_torch))
        return image.roll((down, right), (1, 2))


OWN = np.random.default_rng()
SHIFTS = Shifts()


def with_a_global_one(image: Tensor) -> Tensor:
    return image.roll(int(OWN.integers(16)), 2)


def with_a_global_object(image: Tensor) -> Tensor:
    return SHIFTS(image)


def with_a_closure() -> Any:
    own = np.random.RandomState()
    return lambda image: image.roll(int(own.randint(16)), 2)


class HasAMethod:
    def __call__(self, image: Tensor) -> Tensor:
        return with_a_global_one(image)


class OfTheClass:
    OWN = np.random.default_rng()

    def __call__(self, image: Tensor) -> Tensor:
        return image.roll(int(self.OWN.integers(16)), 2)


class Inherits(OfTheClass, HasAMethod):
    """Has nothing of its own."""


def with_a_class(image: Tensor) -> Tensor:
    return OfTheClass()(image)


def decorated(image: Tensor) -> Tensor:
    return SHIFTS(image)


OWN_GENERATORS = {
    "attributes": Shifts,
    "a global": lambda: with_a_global_one,
    "a global object": lambda: with_a_global_object,
    "a closure": with_a_closure,
    "a method": HasAMethod,
    "a class": OfTheClass,
    "a base class": Inherits,
    "an object of a call": lambda: with_a_class,
    "a decorator of a library": lambda: torch.no_grad()(decorated),
    "partial": lambda: partial(Shifts.__call__, Shifts()),
    "a bound method": lambda: Shifts().__call__,
    "a lambda of torchvision": lambda: v2.Compose([v2.RandomHorizontalFlip(), v2.Lambda(Shifts())]),
}


@pytest.mark.parametrize("make", OWN_GENERATORS.values(), ids=OWN_GENERATORS)
def test_generators_that_a_transform_holds_are_seeded_for_each_image(make: Callable[[], Any]) -> None:
    batch = images().permute(0, 2, 3, 1).numpy()
    options = config(transforms="mine.py:own")
    whole = UserTransforms(options, make)(batch, SAMPLES, 0)
    again = UserTransforms(options, make)
    order = np.random.default_rng(1).permutation(40)
    pieces = [again(batch[rows], SAMPLES[rows], 0) for rows in np.array_split(order, 3)]
    assert (np.concatenate(pieces) == whole[order]).all()
    assert (again(batch, SAMPLES, 1) != whole).any()


def test_a_transform_whose_closure_is_not_complete_is_looked_into_as_far_as_possible() -> None:
    def own(image: Tensor) -> Tensor:
        return image if later is None else later

    both: Any = [own, OWN]
    assert held_generators(both) == [OWN]
    later = None


def test_two_generators_of_a_transform_give_different_numbers() -> None:
    first, second = np.random.default_rng(), np.random.default_rng()
    drawn: list[tuple[float, float]] = []

    def own(image: Tensor) -> Tensor:
        drawn.append((first.random(), second.random()))
        return image

    UserTransforms(config(), lambda: own)(images().permute(0, 2, 3, 1).numpy(), SAMPLES, 0)
    assert all(one != other for one, other in drawn)


@pytest.mark.parametrize("own", [v2.RandomInvert(1.0), v1.Compose([v2.RandomInvert(1.0)]), lambda image: 255 - image])
def test_own_transforms_may_be_named_themselves(own: Any) -> None:
    chain = own_transforms(config(), own)
    assert transform_each(chain, torch.zeros(4, 3, 20, 16, dtype=torch.uint8), SAMPLES[:4], 0, 0).min() == 255


def test_a_transform_that_fails_is_named_and_not_the_network() -> None:
    failing = UserTransforms(config(transforms="mine.py:jitter"), v2.Normalize([0.5], [0.5]))
    with pytest.raises(
        UsageError, match=r"--transforms mine.py:jitter cannot be applied to uint8 .*: TypeError: Input"
    ):
        failing(np.zeros((4, 20, 16, 3), np.uint8), SAMPLES[:4], 0)


@pytest.mark.parametrize("made", [None, 0.5, [v2.RandomInvert(1.0), "flip"]])
def test_what_is_no_transform_is_refused(made: Any) -> None:
    with pytest.raises(UsageError, match=r"returns .*, which is no transform; return a function of an image, uint8"):
        own_transforms(config(), lambda: made)


def test_transforms_that_make_anything_but_a_tensor_are_refused() -> None:
    with pytest.raises(UsageError, match=r"into one of type PIL.Image.Image; transforms must keep the type"):
        transform_each(v2.ToPILImage(), images(), SAMPLES, 0, 0)


@pytest.mark.parametrize("transform", [v2.Resize((9, 9)), v2.ToDtype(torch.float32)], ids=["shape", "dtype"])
def test_transforms_that_change_the_shape_or_type_are_refused(transform: Any) -> None:
    with pytest.raises(UsageError, match=r"A transform made an image of uint8 \(3, 20, 16\) into one of"):
        transform_each(transform, images(), SAMPLES, 0, 0)
