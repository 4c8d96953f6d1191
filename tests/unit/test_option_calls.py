"""Calls of raytrain's functions with options outside of their TrainConfig are refused with how to write them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import raytrain
from raytrain.errors import UsageError

CONFIG = raytrain.recipes.custom(data="photos")
TAKE_CONFIG = [
    getattr(raytrain, name)
    for name in raytrain.__all__
    if inspect.isfunction(getattr(raytrain, name))
    and next(iter(inspect.signature(getattr(raytrain, name)).parameters), "") == "config"
]


def sentence_of(call: Callable[[], object]) -> str:
    with pytest.raises(UsageError) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("function", TAKE_CONFIG, ids=lambda function: function.__name__)
def test_options_beside_the_config_are_refused(function: Callable[..., Any]) -> None:
    name = f"raytrain.{function.__name__}"
    assert sentence_of(lambda: function(data="photos")) == (
        f"data is an option; write {name}(raytrain.TrainConfig(data=…))."
    )
    assert f"not an argument of {name}; give TrainConfig(epochs=…)" in sentence_of(lambda: function(CONFIG, epochs=3))
    assert sentence_of(function) == f"{name} needs the options of a run; write {name}(raytrain.TrainConfig(data=…))."
    assert "one value without a name" in sentence_of(lambda: function(CONFIG, print))
    assert "no argument lr (did you mean learning_rate?)" in sentence_of(lambda: function(CONFIG, lr=1))


def test_a_misspelt_argument_is_refused_with_the_one_that_was_meant() -> None:
    assert len(TAKE_CONFIG) >= 7
    wrong: dict[str, Any] = {"loops": print}
    assert sentence_of(lambda: raytrain.train(CONFIG, **wrong)) == (
        "raytrain.train has no argument loops (did you mean loop?); help(raytrain.train) lists all."
    )
