"""Calls of functions that take options: what belongs into their TrainConfig is refused with how to give it there."""

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
    """Make ``function``, one of raytrain's whose first argument is ``config``, raise UsageError for a wrong call.

    Python would raise TypeError for an option that is given beside the config, for a call without one, and for a second
    value without a name.

    Example: ``takes_config(train)(data="photos")`` says to write raytrain.train(raytrain.TrainConfig(data=…)).
    """
    name = f"raytrain.{function.__name__}"
    arguments = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for given in kwargs:
            if given in arguments:
                continue
            if given not in hints_of(TrainConfig):
                hint = did_you_mean(given, arguments) or similar_options(given)
                raise UsageError(f"{name} has no argument {given}{hint}; help({name}) lists all.")
            if args or "config" in kwargs:
                raise UsageError(f"{given} is an option, not an argument of {name}; give TrainConfig({given}=…) to it.")
            raise UsageError(f"{given} is an option; write {name}(raytrain.TrainConfig({given}=…)).")
        if not args and "config" not in kwargs:
            raise UsageError(f"{name} needs the options of a run; write {name}(raytrain.TrainConfig(data=…)).")
        if len(args) > 1:
            raise UsageError(f"{name} takes one value without a name, the options; write {arguments[1]}=… for others.")
        return function(*args, **kwargs)

    return call
