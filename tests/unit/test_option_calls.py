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
    name, options = f"raytrain.{function.__name__}", dict[str, Any](data="photos")
    assert sentence_of(lambda: function(**options)) == (
        f"{name} cannot be called so: missing a required argument: 'config'; write "
        f"{name}(raytrain.TrainConfig(data=…)), and see help({name}) for what it takes beside the options."
    )
    assert f"write {name}(raytrain.TrainConfig(epochs=…))" in sentence_of(lambda: function(CONFIG, epochs=3))
    assert f"write {name}(raytrain.TrainConfig(data=…))" in sentence_of(function)
    assert "too many positional arguments" in sentence_of(lambda: function(CONFIG, print))
    assert sentence_of(lambda: function("photos")) == "The options are a str; give raytrain.TrainConfig(data=…, …)."
    assert "'lr' (did you mean learning_rate?); write" in sentence_of(lambda: function(CONFIG, lr=1))


def test_all_functions_that_take_options_refuse_them_so() -> None:
    assert len(TAKE_CONFIG) >= 7
