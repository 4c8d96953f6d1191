"""Training images whose labels look wrong, as their margins show.

:mod:`raytrain.training.sample_margins` computes them.
"""

from __future__ import annotations

from typing import NamedTuple

NUM_SHOWN = 16  # images with suspicious labels, while a run trains


class SuspiciousLabel(NamedTuple):
    """A training image by its number, with means over its draws."""

    sample: int  # index into the manifest
    draws: int
    margin: float  # logit of the label, minus the largest one of another class
    loss: float  # cross entropy
    suggested: int  # the likeliest other class in its latest draw
