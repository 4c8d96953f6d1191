"""Calls of functions that take options: a wrong call is refused with how to give the options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from raytrain.config.option_values import hints_of
from raytrain.config.options import TrainConfig, similar_options
from raytrain.errors import UsageError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


def takes_config(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``function``, one of raytrain's whose first argument is ``config``, refuse calls that Python would refuse.

    UsageError replaces Python's TypeError for an option that is given beside the config, a call without a config, and a
    second value without a name. It is also raised for a config of another type.

    Example: ``takes_config(train)(data="photos")`` says to write raytrain.train(raytrain.TrainConfig(data=…)).
    """
    name, signature = f"raytrain.{function.__name__}", inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            options, arguments = hints_of(TrainConfig), signature.parameters
            unexpected = [argument for argument in kwargs if argument not in arguments]
            option = next((argument for argument in unexpected if argument in options), "data")
            unknown = next((argument for argument in unexpected if argument not in options), "")
            hint = did_you_mean(unknown, arguments) or similar_options(unknown)
            raise UsageError(
                f"{name} cannot be called so: {error}{hint}; write {name}(raytrain.TrainConfig({option}=…)), and "
                f"see help({name}) for what it takes beside the options."
            ) from None
        config: object = args[0] if args else kwargs["config"]
        if not isinstance(config, TrainConfig):
            raise UsageError(f"The options are a {type(config).__name__}; give raytrain.TrainConfig(data=…, …).")
        return function(*args, **kwargs)

    return call
