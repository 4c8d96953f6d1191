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
def test_none_is_none(word: str) -> None:
    assert not_none("cifar10", [part for name in MAY_BE_NONE for part in (option(name), word)]) == {}


def test_none_after_an_equals_sign() -> None:
    assert not_none("alexnet-transfer", [f"{option(name)}=none" for name in MAY_BE_NONE]) == {}


def option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def not_none(recipe: str, words: list[str]) -> dict[str, object]:
    """Return those of the options that have a value after a command of these ``words``."""
    config = parse(["train", recipe, *words], COMMANDS).keywords["config"]
    values = {name: getattr(config, name) for name in MAY_BE_NONE}
    return {name: value for name, value in values.items() if value is not None}


def test_none_is_still_a_choice_of_the_cache() -> None:
    options = parse(["train", "cifar10", "--cache", "none", "--weights", "none"], COMMANDS).keywords["config"]
    assert (options.cache, options.weights) == ("none", None)


def test_commands_take_it_too() -> None:
    command = parse(["evaluate", "first", "--data", "d", "--workers", "none", "--output", "none"], COMMANDS)
    assert (command.keywords["prediction"].workers, command.keywords["output"]) == (None, None)
