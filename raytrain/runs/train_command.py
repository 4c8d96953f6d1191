"""The command line that trains with given options."""

from __future__ import annotations

import dataclasses
import shlex
from typing import cast

from raytrain.config import TrainConfig
from raytrain.errors import option_name
from raytrain.recipes import RECIPES

_NO_FLAGS = ("recipe", "resume")


def train_command(config: TrainConfig) -> str:
    """``raytrain train RECIPE`` with a flag for each option that differs from the recipe.

    Options that were written in Python belong to no recipe: then the flags alone.
    """
    recipe = RECIPES.get(config.recipe)
    command = ["raytrain", "train", config.recipe] if recipe else []
    defaults = vars(recipe()) if recipe else {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for field in dataclasses.fields(TrainConfig):
        value = getattr(config, field.name)
        if value != defaults[field.name] and value is not None and field.name not in _NO_FLAGS:
            command += _flag(option_name(field.name), value)
    return shlex.join(command)


def _flag(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    values = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
    return [f"--{name}", *map(str, values)]
