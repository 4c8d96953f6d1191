"""The networks of the recipes. Each function can be named by ``--model``: it takes num_classes and channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_WHITENING = (
    ((1, 1, 1, 1), ((0.179, 0.186, 0.179), (0.797, 0.018, -0.814), (1.048, -1.948, 0.984))),
    ((1, -1, 1, -1), ((1.001, 1.014, 0.934), (11.065, -1.217, -10.540), (8.170, -17.867, 10.640))),
    ((1, 1, -1, -1), ((0.925, 0.936, 0.862), (9.346, -1.298, -8.614), (6.915, -15.966, 9.909))),
    ((1, -1, -1, 1), ((2.489, 2.516, 2.334), (24.368, 2.591, -28.782), (19.642, -32.171, 13.734))),
)
"""Weights that make normalised patches of 2x2 pixels uncorrelated: 3 mixes of the colours for each of 4 sign patterns.

They were measured once on the 50,000 training images of CIFAR-10, normalised by each channel's mean and deviation.
Mirrored patches are as frequent as others, so each eigenvector of the patches' covariance is a mean or a difference of
the four pixels (the signs) times a mix of the colours. It is divided by sqrt(eigenvalue + 5e-4). The weights are a
table, so that they are the same on all workers and after a resume; small patches are much alike in all photographs.
"""


def digits(num_classes: int, channels: int) -> nn.Module:
    """Return three convolutions and a fully connected layer: (B, channels, 28, 28) -> logits (B, num_classes).

    It is the network of MATLAB's "Train Network in Parallel with Custom Training Loop" for digits. Images of other
    sizes, from 5x5 pixels on, are accepted, because the first map is pooled to 24x24, its size for 28x28 images.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 20, kernel_size=5),
        nn.AdaptiveAvgPool2d(24),
        *_normalised(20),
        nn.Conv2d(20, 20, kernel_size=3, padding=1),
        *_normalised(20),
        nn.Conv2d(20, 20, kernel_size=3, padding=1),
        *_normalised(20),
        nn.Flatten(),
        nn.Linear(20 * 24 * 24, num_classes),
    )


def digits_lstm(num_classes: int, channels: int) -> nn.Module:
    """Return an LSTM that reads an image row by row: (B, channels, H, 28) -> logits (B, num_classes).

    A fully connected layer follows its last states. Each image starts with a state of zeros, so that no state carries
    over to the next batch. Images of other widths are accepted, because each row is pooled to 28 pixels.
    """
    return _RowLstm(num_classes, row_size=channels * 28, width=128)


def cifar10(num_classes: int, channels: int) -> nn.Module:
    """Return three blocks of four convolutions: (B, channels, 32, 32) -> logits (B, num_classes).

    They are 32, 64 and 128 channels wide. It is the plain network of MATLAB's "Train Network in the Cloud Using
    Automatic Parallel Support". Images of other sizes, from 4x4 pixels on, are accepted, because the last pooling takes
    the mean over the whole map (8x8 for 32x32 images).
    """
    return nn.Sequential(
        *_block(channels, 32),
        nn.MaxPool2d(2),
        *_block(32, 64),
        nn.MaxPool2d(2),
        *_block(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, num_classes),
    )


def cifar10_fast(num_classes: int, channels: int) -> nn.Module:
    """Return a network of a whitening layer and three blocks: (B, channels, 32, 32) -> logits (B, num_classes).

    The whitening layer makes the pixels of small patches uncorrelated. Each block has two convolutions; they are 64,
    256 and 256 channels wide. It is the network of Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on
    a Single GPU" (airbench94), with its initial weights. Images of other sizes, from 9x9 pixels on, are accepted,
    because the last pooling takes the maximum over the whole map (3x3 for 32x32 images).
    """
    return nn.Sequential(
        _whitening(channels),
        nn.GELU(),
        *_fast_block(24, 64),
        *_fast_block(64, 256),
        *_fast_block(256, 256),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        nn.Linear(256, num_classes, bias=False),
        _Scale(1 / 9),  # the factor of airbench94, with which the first logits are small
    )


class _Scale(nn.Module):
    """Multiplies its input by a constant ``factor``, which does not learn."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, input: Tensor) -> Tensor:
        return input * self.factor


class _FastBias(nn.Module):
    """Adds to each channel 8 times a parameter: a bias that learns 64 times as fast, at the same learning rate.

    The gradient of the parameter is 8 times as large, and so is the effect of each change. Weight decay shrinks it like
    any other parameter.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, C, H, W) in the dtype of the ``input`` (B, C, H, W), which may be that of mixed precision."""
        return input + (8 * self.bias)[:, None, None].to(input.dtype)


class _RowLstm(nn.Module):
    """Reads the rows of an image in both directions; the last states of both give the logits."""

    def __init__(self, num_classes: int, row_size: int, width: int) -> None:
        super().__init__()
        self.to_rows = nn.AdaptiveAvgPool2d((None, 28))
        self.lstm = nn.LSTM(row_size, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.to_rows(images).transpose(1, 2).flatten(2)  # (B, H, channels * 28)
        _, (last, _) = self.lstm(rows)  # (2, B, width), the state after the last row and after the first
        return self.head(last.transpose(0, 1).flatten(1))


def _block(in_channels: int, width: int, depth: int = 4) -> list[nn.Module]:
    """Return a block of :func:`cifar10`: ``depth`` convolutions, each with batch norm and ReLU after it."""
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else in_channels, width, kernel_size=3, padding=1), *_normalised(width)]
    return layers


def _normalised(width: int) -> list[nn.Module]:
    """Return what follows a convolution of ``width`` channels: batch norm and ReLU."""
    return [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]


def _whitening(channels: int) -> nn.Conv2d:
    """Return a convolution with frozen weights that outputs 12 uncorrelated components of a patch, and their negatives.

    The negatives are needed because the GELU that follows suppresses values below 0.
    """
    signs, colours = (torch.tensor(table, dtype=torch.float32) for table in zip(*_WHITENING, strict=True))
    # p: patterns of signs (4), k: mixes of the colours (3), c: colours (3), i and j: pixels of a patch (2, 2)
    weights = torch.einsum("pij,pkc->pkcij", signs.view(4, 2, 2) / 2, colours).flatten(0, 1)  # (12, 3, 2, 2)
    if channels == 1:
        weights = weights.sum(dim=1, keepdim=True)  # a grey image is one whose colours are equal
    conv = nn.Conv2d(channels, 24, kernel_size=2)
    conv.weight = nn.Parameter(torch.cat([weights, -weights]), requires_grad=False)
    return conv


def _fast_block(in_channels: int, width: int) -> list[nn.Module]:
    """Return a block of :func:`cifar10_fast`: two convolutions, and after the first a pooling that halves the sides."""
    return [
        _dirac_convolution(in_channels, width),
        nn.MaxPool2d(2),
        *_fast_normalised(width),
        _dirac_convolution(width, width),
        *_fast_normalised(width),
    ]


def _dirac_convolution(in_channels: int, width: int) -> nn.Conv2d:
    """Return a convolution whose first outputs initially are nearly its inputs (Zagoruyko and Komodakis 2017).

    A hundredth of the usual random weights is added. Without that, many values in the first step are equal, because the
    pixels of photographs are whole numbers. Then rounding errors, which differ with the number of workers, decide which
    of them max pooling takes.
    """
    conv = nn.Conv2d(in_channels, width, kernel_size=3, padding=1, bias=False)
    first = conv.weight.detach()[:in_channels]
    first.lerp_(nn.init.dirac_(torch.empty_like(first)), 0.99)
    return conv


def _fast_normalised(width: int) -> list[nn.Module]:
    """Return what follows a convolution in airbench94: batch norm without scale, a bias that learns fast, and GELU."""
    return [nn.BatchNorm2d(width, eps=1e-12, momentum=0.4, affine=False), _FastBias(width), nn.GELU()]
