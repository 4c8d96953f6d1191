"""The options of a training run."""

from raytrain.config.options import ResolvedConfig as ResolvedConfig
from raytrain.config.options import TrainConfig as TrainConfig
