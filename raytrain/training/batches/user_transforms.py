"""Applies the user's own transforms, which take one image, to a batch, with each image's own random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raytrain.config import ResolvedConfig
from raytrain.config.user_code import in_one_sentence
from raytrain.data.plan.permutation import Int64s, mix
from raytrain.errors import UsageError
from raytrain.training.batches.augment_and_normalise import crop_and_resize
from raytrain.training.random_numbers import held_generators, kept_generators, seed_each, seed_generators

Transforms = Callable[[Tensor], Tensor]
"""One or several transforms of ``torchvision.transforms.v2``: uint8 (C, H, W) -> uint8 of the same shape."""

Images = npt.NDArray[np.uint8]  # (n, H, W, C)
_KEY = 2  # keeps these random numbers apart from those of other augmentation


class UserTransforms:
    """The user's transforms, with the cropping and resizing before them.

    ``function`` makes them, as :func:`own_transforms` says. Raises UsageError if they cannot be made.

    Example:
        >>> transforms = UserTransforms(config, lambda: v2.RandomInvert(0.5))
        >>> images = transforms(images, draws, epoch=0)
    """

    def __init__(self, config: ResolvedConfig, function: Callable[..., Any]) -> None:
        self._config = config
        self._transforms = own_transforms(config, function)
        self._generators = held_generators(self._transforms)

    def __call__(self, images: Images, draws: Int64s, epoch: int) -> Images:
        """Return the ``images`` of ``draws``, (n,), as ``epoch`` sees them: cropped, resized and transformed.

        They stay uint8 (n, H, W, C). Raises UsageError if a transform fails, or changes the shape or the type.
        """
        seed = self._config.seed
        source = torch.from_numpy(np.require(images, requirements=["C", "W"])).permute(0, 3, 1, 2)
        pixels = crop_and_resize(source, draws, epoch, self._config)
        pixels = pixels.round().to(torch.uint8)  # changes nothing unless resizing has made floats
        with in_one_sentence(f"{subject(self._config)} cannot be applied to {_kind(pixels[0])}"):
            pixels = transform_each(self._transforms, pixels, draws, seed, epoch, self._generators)
        return pixels.permute(0, 2, 3, 1).numpy()


def subject(config: ResolvedConfig) -> str:
    """Return the name of the user's transforms in messages: the option, or ``transforms`` of a call in Python."""
    return "transforms" if config.transforms is None else f"--transforms {config.transforms}"


def own_transforms(config: ResolvedConfig, function: Callable[..., Any]) -> Transforms:
    """Return the user's transforms as one function; ``function``, that of ``--transforms``, makes them.

    ``function`` returns a transform or a list of them, or is a transform itself. Raises UsageError if it fails, or
    returns something else.
    """
    with in_one_sentence(f"{subject(config)} cannot be made"):
        # A module of torchvision, or a function that needs a positional argument, the image, is a transform itself.
        needs_image = any(
            parameter.default is parameter.empty and parameter.kind <= parameter.POSITIONAL_OR_KEYWORD
            for parameter in signature(function).parameters.values()
        )
        made = function if isinstance(function, torch.nn.Module) or needs_image else function()
    chain = list(made) if isinstance(made, (list, tuple)) else [made]
    if not_callable := [transform for transform in chain if not callable(transform)]:
        raise UsageError(
            f"{subject(config)} returns {not_callable[0]!r:.50}, which is no transform; return a function of "
            "an image, uint8 (C, H, W), such as one of torchvision.transforms.v2, or a list of them."
        )
    if len(chain) == 1:
        return chain[0]
    from torchvision.transforms import v2  # deferred: the import takes seconds

    return v2.Compose(chain)


def transform_each(
    transforms: Transforms, images: Tensor, draws: Int64s, seed: int, epoch: int, generators: Sequence[Any] = ()
) -> Tensor:
    """Return each of ``images``, uint8 (B, C, H, W), of the ``draws``, int64 (B,), as ``transforms`` change it.

    While an image is transformed, the random numbers of torch, NumPy and Python, and of the ``generators`` that the
    transforms hold, depend on ``seed``, ``epoch`` and the draw alone, so that it looks the same in any batch and on any
    worker. Afterwards the libraries' generators continue as before. Raises UsageError if a transform changes an image's
    shape or type.
    """
    transformed: list[Tensor] = []
    with kept_generators(images.device):
        for image, draw in zip(images, draws.tolist(), strict=True):
            key = mix(seed, epoch, _KEY, draw)
            seed_generators(key, image.device)
            seed_each(generators, key)
            result: object = transforms(image)
            if not isinstance(result, Tensor) or result.shape != image.shape or result.dtype != image.dtype:
                raise UsageError(
                    f"A transform made an image of {_kind(image)} into one of {_kind(result)}; transforms must keep "
                    "the type and the shape: images are resized before them, and normalised after them."
                )
            transformed.append(result)
    return torch.stack(transformed)


def _kind(image: object) -> str:
    """Return the type and the shape of ``image`` as text, such as uint8 (3, 32, 32); of no tensor, its class."""
    if not isinstance(image, Tensor):
        return f"type {type(image).__module__}.{type(image).__qualname__}"
    return f"{str(image.dtype).removeprefix('torch.')} {tuple(image.shape)}"
