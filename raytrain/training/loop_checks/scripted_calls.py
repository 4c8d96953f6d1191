"""Shows the watch of a loop the calls of functions that ``torch.jit.script`` has made, which torch does not show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

_KINDS: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)


@contextmanager
def scripted_calls_by(call: Callable[..., Any]) -> Iterator[None]:
    """In this context, have ``call`` make the calls of scripted functions and of methods of scripted modules.

    It gets a function that makes the call, and the arguments, and returns what the call is to return. The calls of
    ``__call__`` of torch's classes are replaced, because no function of torch's passes them on.

    Example: ``with scripted_calls_by(lambda function, *args, **options: function(*args, **options)): loop(batch)``
    """
    before = [kind.__call__ for kind in _KINDS]
    for kind, call_before in zip(_KINDS, before, strict=True):
        kind.__call__ = _passed_to(call, call_before)
    try:
        yield
    finally:
        for kind, call_before in zip(_KINDS, before, strict=True):
            kind.__call__ = call_before


def _passed_to(call: Callable[..., Any], call_before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that gives ``call`` the scripted function, as ``call_before`` calls it, and its arguments."""

    def passed(function: Any, *args: Any, **options: Any) -> Any:
        return call(partial(call_before, function), *args, **options)

    return passed
