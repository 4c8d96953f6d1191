"""A transform of a user's own, which draws from every generator that such code draws from.

It needs torch alone: each process that applies it imports its module, and torchvision would double the time of that.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


class Changed:
    """Draws from torch's generator, from Python's, as many transforms of people's own do, from NumPy's, and from one
    that it keeps, as those of albumentations do.
    """

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __call__(self, image: Tensor) -> Tensor:
        image = 255 - image if torch.rand(()) < 0.5 else image
        image = image | random.randrange(128)
        image = image & np.random.randint(128, 256)
        return image.roll(int(self.generator.integers(8)), 2)
