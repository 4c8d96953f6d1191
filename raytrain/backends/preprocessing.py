"""How images are prepared for a network whose weights were trained before."""

from __future__ import annotations

import dataclasses

from raytrain.config import TrainConfig
from raytrain.config.network import timm_name
from raytrain.training.weights_source import DEFAULT


def with_preprocessing_of_weights(config: TrainConfig) -> TrainConfig:
    """The same options, but ``--weights DEFAULT`` of timm decide on size, cropping and normalisation of the images, as
    far as the options leave that open.

    torchvision's weights decide on nothing. Raises UsageError if timm has no such network.
    """
    name = timm_name(config.model)
    if name is None or config.weights != DEFAULT:
        return config
    from raytrain.training.model import preprocessing  # imports torch and timm

    wanted = preprocessing(name, config.channels)
    return dataclasses.replace(
        config, **{option: value for option, value in wanted.items() if getattr(config, option) is None}
    )
