"""Places of warnings: a warning of torch names the line of the loop, not one of a function here that passes calls on.

Python names the file and line of the function that has called the one that warns. While a loop is watched, that is
always the same line, where :mod:`raytrain.training.loop_checks.swapped_images` calls torch for the loop. The same call
with swapped images would warn again, and is silent.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TextIO

_OVERRIDES = "torch/overrides.py"  # calls the watch for functions of torch that are written in Python


@contextmanager
def warnings_at_callers(watch: str, calls: str, silent: str) -> Iterator[None]:
    """Have torch's warnings name the line of the loop that called torch, not the line of the watch that passes it on.

    ``watch`` is the file with ``__torch_function__``, which gets the loop's calls, and ``calls`` the file that then
    calls torch. Warnings are dropped while its function ``silent`` runs. ``warnings.showwarning`` is replaced in this
    context.

    Example: ``with mode, warnings_at_callers(__file__, __file__, "_call_variant"): loop(batch)``
    """
    show_before = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        output: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if filename != calls or (caller := _caller(watch)) is None:
            show_before(message, category, filename, lineno, output, line)
            return
        if _frame_of(calls, silent) is not None:
            return
        # Warn again, as of the caller's line. The registry in the caller's module has the warnings that were shown
        # there already.
        module = caller.f_globals
        registry = module.setdefault("__warningregistry__", {})
        caller_file, caller_line = caller.f_code.co_filename, caller.f_lineno
        warnings.warn_explicit(message, category, caller_file, caller_line, module.get("__name__"), registry)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:  # the loop may have replaced it since
            warnings.showwarning = show_before


def _frame_of(file: str, function: str) -> FrameType | None:
    """Return the innermost frame in which ``function`` of ``file`` is running; None if it is not."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) != (file, function):
        frame = frame.f_back
    return frame


def _caller(watch: str) -> FrameType | None:
    """Return the frame whose call of torch the file ``watch`` is passing on; None if there is none."""
    frame = _frame_of(watch, "__torch_function__")
    if frame is None:
        return None
    # Go on to the caller. A function of torch that is written in Python has called the watch from its own first lines,
    # through torch/overrides.py: skip both.
    function_code = getattr(frame.f_locals.get("func"), "__code__", None)
    frame = frame.f_back
    while frame is not None and (frame.f_code.co_filename.endswith(_OVERRIDES) or frame.f_code is function_code):
        frame = frame.f_back
    return frame
