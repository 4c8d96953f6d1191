"""The options of a training run, a file for each section."""

from raytrain.config.options import SECTIONS as SECTIONS
from raytrain.config.options import ResolvedConfig as ResolvedConfig
from raytrain.config.options import TrainConfig as TrainConfig
