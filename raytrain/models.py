"""The networks of the recipes. Each function can be named by ``--model``: it takes num_classes and channels."""

from __future__ import annotations

from torch import Tensor, nn


def digits(num_classes: int, channels: int) -> nn.Module:
    """Three convolutions and a fully connected layer: (B, channels, 28, 28) -> logits (B, num_classes).

    The network of MATLAB's "Train Network in Parallel with Custom Training Loop" for digits. Images of other sizes,
    from 5x5 pixels on, are accepted, because the first map is pooled to 24x24, its size for 28x28 images.
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
    """An LSTM that reads an image row by row, and a fully connected layer: (B, channels, H, 28) -> logits (B,
    num_classes).

    Each image starts with a state of zeros, so that no state carries over to the next batch. Images of other widths are
    accepted, because each row is pooled to 28 pixels.
    """
    return _RowLstm(num_classes, row_size=channels * 28, width=128)


def cifar10(num_classes: int, channels: int) -> nn.Module:
    """Three blocks of four convolutions, 32, 64 and 128 channels wide: (B, channels, 32, 32) -> logits (B,
    num_classes).

    The plain network of MATLAB's "Train Network in the Cloud Using Automatic Parallel Support". Images of other sizes,
    from 4x4 pixels on, are accepted, because the last pooling takes the mean over the whole map (8x8 for 32x32 images).
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


class _RowLstm(nn.Module):
    """Reads the rows of an image in both directions; the two last states together give the logits."""

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
    layers: list[nn.Module] = []
    for index in range(depth):
        layers += [nn.Conv2d(width if index else in_channels, width, kernel_size=3, padding=1), *_normalised(width)]
    return layers


def _normalised(width: int) -> list[nn.Module]:
    return [nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
