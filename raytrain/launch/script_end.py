"""The end of a worker's loop: its files are written and its exit functions are called, as at the end of a script.

The workers of a run are killed, or end as forks do: Python itself writes and calls nothing then. So a file that a loop
has left open would lack its last lines, and a tracker that the loop has opened, such as W&B's, would count as crashed.
"""

from __future__ import annotations

import atexit
import gc
import io
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def ends_as_a_script() -> Iterator[None]:
    """At the end of this context, call the functions that were registered with :mod:`atexit` in it, and flush files.

    As in Python, the function that was registered last is called first, and what one raises is printed. For processes
    of workers, which do nothing else: all objects that exist at the beginning are left out of garbage collection.
    """
    registered: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []
    register, unregister = atexit.register, atexit.unregister

    def keep(function: Callable[..., Any], /, *args: Any, **options: Any) -> Callable[..., Any]:
        registered.append((function, args, options))
        return function

    def forget(function: Callable[..., object]) -> None:
        registered[:] = [each for each in registered if each[0] != function]
        unregister(function)

    gc.freeze()  # what there is now need not be looked through at the end, nor collected
    atexit.register, atexit.unregister = keep, forget
    try:
        yield
    finally:
        while registered:  # one may register others
            function, args, options = registered.pop()
            try:
                function(*args, **options)
            except (Exception, SystemExit):
                traceback.print_exc()
        atexit.register, atexit.unregister = register, unregister

        # Text first: it goes to binary files. Older ones may belong to the process that this one was forked from.
        opened = gc.get_objects()
        for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            for file in (sys.stdout, sys.stderr, *(each for each in opened if type(each) is kind)):
                with suppress(OSError, ValueError):  # a pipe without a reader; closed
                    file.flush()
