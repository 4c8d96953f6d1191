"""The options of a training run, by sections."""

from raytrain.config.options import SECTIONS as SECTIONS
from raytrain.config.options import ResolvedConfig as ResolvedConfig
from raytrain.config.options import TrainConfig as TrainConfig
