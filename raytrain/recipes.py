"""The recipes: each is a complete TrainConfig, any field of which can be overridden.

Each recipe but ``auto`` and ``custom`` reproduces a training that somebody has published; ``raytrain.models`` names the
publications with networks of their own. The docstring of ``cifar10_fast`` lists how it differs from the publication.
The others differ in these points. Images are normalised by each channel's mean and standard deviation, whereas the
publications divide by 255 or subtract a mean image (the batch norm after the first convolution undoes either). The
network is evaluated after each epoch, not only at the end. SGD has the publications' momentum of 0.9.

The first paragraph of a docstring is the recipe's line in the help.

Example: ``raytrain.train(raytrain.recipes.cifar10(data="s3://bucket/cifar10", epochs=20))``
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raytrain.config import TrainConfig
from raytrain.config.option_marks import Mark
from raytrain.config.options import options_with


def digits(**overrides: Any) -> TrainConfig:
    """A small convolutional network on 28x28 grey digits; 20 epochs, 128 images per worker, learning rate 0.01.

    Example: ``raytrain.recipes.digits(data="digits")``
    """
    return _config(
        overrides,
        recipe="digits",
        model="raytrain.models:digits",
        image_size=(28, 28),
        channels=1,
        epochs=20,
        batch_size="128/worker",  # the publication takes 128 for each GPU, but on CPUs 128 for all workers together
        learning_rate=0.01,  # the publication names none, so its optimizer takes its default, for any number of workers
        batch_norm="aggregate",
        channels_last=True,
    )


def digits_lstm(**overrides: Any) -> TrainConfig:
    """An LSTM that reads 28x28 grey digits row by row, from a state of zeros; 30 epochs, 64 images per step.

    Example: ``raytrain.recipes.digits_lstm(data="digits")``
    """
    return _config(
        overrides,
        recipe="digits-lstm",
        model="raytrain.models:digits_lstm",
        image_size=(28, 28),
        channels=1,
        epochs=30,
        batch_size=64,  # the publication has only a network; these options are the same for any number of workers
        optimizer="adamw",
        learning_rate=0.003,
        weight_decay=0.01,
        schedule="cosine",
        warmup_epochs=1,
        translate=2,
    )


def cifar10(**overrides: Any) -> TrainConfig:
    """A plain three-block convolutional network on CIFAR-10; 50 epochs, 256 images and learning rate 0.1 per worker.

    The learning rate drops after 45 epochs.

    Example: ``raytrain.recipes.cifar10(data="s3://bucket/cifar10/train", test_data="s3://bucket/cifar10/test")``
    """
    return _config(
        overrides,
        recipe="cifar10",
        model="raytrain.models:cifar10",
        image_size=(32, 32),
        epochs=50,
        batch_size="256/worker",
        learning_rate="0.1/worker",
        schedule="piecewise:0.1/45ep",
        weight_decay=1e-10,
        batch_norm="aggregate",
        channels_last=True,
        evaluate_every=1,
        flip="random",
        translate=4,  # by whole pixels, filled with the mean colour; the publication also shifts by fractions of pixels
    )


def cifar10_fast(**overrides: Any) -> TrainConfig:
    """The network and the options of airbench94, made to learn CIFAR-10 fast (Jordan 2024); 16 epochs, 1,024 images.

    Each step has 1,024 images, on any number of workers. The recipe differs from airbench94 in these points:

    - The learning rate rises from near 0 to its peak and falls to 0. That of airbench94 starts at 0.2 of its peak and
      ends at 0.07 of it.
    - The average of the weights is only evaluated. airbench94 writes it back into the weights every five steps
      (Lookahead), which settles them; here a learning rate that ends at 0 does so as well, and the average mostly
      smooths the statistics of batch norm.
    - Shifted images are filled with the mean colour, not mirrored at the edge.
    - The bias of the first layer learns until the end, not only in the first epochs.
    - The last batch of an epoch is used, too, although it is smaller.
    - It trains for 16 epochs, not 9.9, for a margin above 94 % of the validation images.

    Example: ``raytrain.recipes.cifar10_fast(data="cifar10")``
    """
    return _config(
        overrides,
        recipe="cifar10-fast",
        model="raytrain.models:cifar10_fast",
        image_size=(32, 32),
        epochs=16,
        batch_size=1024,  # for any number of workers
        # airbench94 has the rate 11.5 / (1024 * (1 + 1 / (1 - 0.85))) for a loss that is the sum over the 1,024 images
        # of a batch. Here the loss is their mean, whose gradients are 1,024 times smaller, so the rate is 1,024 times
        # as large: 11.5 / (1 + 1 / (1 - 0.85)) = 1.5.
        learning_rate=1.5,
        # Before momentum, each step of airbench94 shrinks the weights by the fraction 0.0153 / (1 + 1 / (1 - 0.85)).
        # Here it shrinks them by the learning rate times the decay, so the decay is that fraction / 1.5: 0.0153 / 11.5.
        weight_decay=0.00133,
        momentum=0.85,
        nesterov=True,
        schedule="linear",
        warmup_epochs=3.7,  # 23 % of the epochs
        label_smoothing=0.2,
        ema_decay=0.95,
        channels_last=True,
        evaluate_every=4,  # an evaluation predicts six views of each image, which takes nearly half as long as an epoch
        test_views=("flip", "shift"),
        flip="alternating",
        translate=2,
    )


def flowers(**overrides: Any) -> TrainConfig:
    """A ResNet-50 on flowers at 100x100; 100 epochs, 128 images per worker, learning rate 0.01.

    Example: ``raytrain.recipes.flowers(data="flowers")``
    """
    return _config(
        overrides,
        recipe="flowers",
        model="resnet50",  # its convolutions have no bias before batch norm; those of the published network have one
        image_size=(100, 100),
        epochs=100,
        batch_size="128/worker",  # as in digits
        learning_rate=0.01,  # as in digits
        batch_norm="aggregate",
        channels_last=True,
    )


def alexnet_transfer(**overrides: Any) -> TrainConfig:
    """An AlexNet pretrained on ImageNet, with a new head that learns 20 times as fast.

    30 epochs, 250 images and learning rate 0.00125 per worker.

    Example: ``raytrain.recipes.alexnet_transfer(data="photos")``
    """
    return _config(
        overrides,
        recipe="alexnet-transfer",
        model="alexnet",
        weights="DEFAULT",
        head_learning_rate_factor=20.0,
        image_size=(224, 224),  # the publication has 227, without padding in the first convolution: the same 55x55 map
        mean=(0.485, 0.456, 0.406),  # of ImageNet, which the weights were trained with
        std=(0.229, 0.224, 0.225),
        epochs=30,  # the publication names neither epochs nor decay: these are the defaults of its trainer
        batch_size="250/worker",
        learning_rate="0.00125/worker",
        schedule="piecewise:0.1/20ep",
        weight_decay=1e-4,
        channels_last=True,
    )


def auto(**overrides: Any) -> TrainConfig:
    """Options chosen for your images: a pretrained network for photographs, that of cifar10-fast for small images.

    An option that you give stays as it is. The run prints which others were chosen and why, in at most five lines.

    Example: ``raytrain.train(raytrain.recipes.auto(data="photos", epochs=3))``
    """
    # The images decide on these when the run starts. Until then they have the values of the recipe custom.
    left_open = tuple(name for name in options_with(Mark.CHOSEN_BY_AUTO) if name not in overrides)
    return _config(
        overrides, recipe="auto", open_options=left_open, batch_size="32/worker", learning_rate="0.01/worker"
    )


def custom(**overrides: Any) -> TrainConfig:
    """Your own options: by default a ResNet-18 at 224x224, 32 images and learning rate 0.01 per worker.

    Example: ``raytrain.recipes.custom(data="photos")``
    """
    return _config(overrides, batch_size="32/worker", learning_rate="0.01/worker")


AUTO, CUSTOM = "auto", "custom"
"""The recipe of a command that names none: CUSTOM if the user gives a training loop, otherwise AUTO."""
RECIPES: dict[str, Callable[..., TrainConfig]] = {
    "digits": digits,
    "digits-lstm": digits_lstm,
    "cifar10": cifar10,
    "cifar10-fast": cifar10_fast,
    "flowers": flowers,
    "alexnet-transfer": alexnet_transfer,
    AUTO: auto,
    CUSTOM: custom,
}


def _config(overrides: dict[str, Any], **options: Any) -> TrainConfig:
    """Return the options of a recipe, with those of the user in place of the recipe's."""
    return TrainConfig(**{**options, **overrides})
