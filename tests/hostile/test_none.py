"""Options that may be None take the word none, in any case, and others do not."""

from __future__ import annotations

import dataclasses
from typing import get_args, get_type_hints

import pytest

from raytrain.cli.commands import COMMANDS
from raytrain.cli.parser import parse
from raytrain.config import TrainConfig

MAY_BE_NONE = [
    field.name
    for field in dataclasses.fields(TrainConfig)
    if type(None) in get_args(get_type_hints(TrainConfig)[field.name]) and field.name != "batch_size"
]


def test_there_are_such_options() -> None:
    assert {"weights", "loop", "max_steps", "mean", "worker_load"} <= set(MAY_BE_NONE)


@pytest.mark.parametrize("word", ["none", "None", "NONE"])
@pytest.mark.parametrize("name", MAY_BE_NONE)
def test_none_is_none(name: str, word: str) -> None:
    config = parse(["train", "cifar10", f"--{name.replace('_', '-')}", word], COMMANDS).keywords["config"]
    assert getattr(config, name) is None


@pytest.mark.parametrize("name", MAY_BE_NONE)
def test_none_after_an_equals_sign(name: str) -> None:
    config = parse(["train", "alexnet-transfer", f"--{name.replace('_', '-')}=none"], COMMANDS).keywords["config"]
    assert getattr(config, name) is None


def test_none_is_still_a_choice_of_the_cache() -> None:
    options = parse(["train", "cifar10", "--cache", "none", "--weights", "none"], COMMANDS).keywords["config"]
    assert (options.cache, options.weights) == ("none", None)


def test_commands_take_it_too() -> None:
    command = parse(["evaluate", "first", "--data", "d", "--workers", "none", "--output", "none"], COMMANDS)
    assert (command.keywords["prediction"].workers, command.keywords["output"]) == (None, None)
