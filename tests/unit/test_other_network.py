"""Weights that do not fit the network which a run's options build now."""

from __future__ import annotations

from pathlib import Path

import pytest

import raytrain
from raytrain.errors import UsageError
from raytrain.training.networks.model import build_model
from tests.helpers.stored_runs import ANIMALS, add_checkpoint, make_run, options

pytestmark = pytest.mark.not_quick


def test_weights_of_another_number_of_classes_are_said_with_whole_shapes(tmp_path: Path) -> None:
    config = options()
    add_checkpoint(make_run(tmp_path, config), build_model(config.model, len(ANIMALS) + 2, 1, 0), config)
    sentence = r"another network \(size mismatch for \S+: .* torch\.Size\(\[5, \d+\]\) from checkpoint, .*…\)\.$"
    with pytest.raises(UsageError, match=sentence):
        raytrain.load("first", storage=str(tmp_path))
