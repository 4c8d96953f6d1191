"""The end of a worker's loop: its files are written and its exit functions are called, as at the end of a script.

The workers of a run are killed, or end like forked processes: then Python neither flushes files nor calls exit
functions. So a file that a loop has left open would lack its last lines, and a tracker that the loop has opened, such
as W&B's, would count as crashed.
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

    As in Python, the function that was registered last is called first, and exceptions are printed. Files are flushed
    that were opened in this context, and the two streams of standard output. Functions that were registered before are
    left to Python.

    This is only for processes of workers: all objects that exist at the beginning are left out of garbage collection
    from then on.
    """
    registered: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]] = []
    register, unregister = atexit.register, atexit.unregister

    # These take the places of atexit.register and atexit.unregister.
    def keep(function: Callable[..., Any], /, *args: Any, **options: Any) -> Callable[..., Any]:
        registered.append((function, args, options))
        return function

    def forget(function: Callable[..., object]) -> None:
        registered[:] = [entry for entry in registered if entry[0] != function]
        unregister(function)  # it may also have been registered before this context

    gc.freeze()  # so that gc.get_objects() at the end returns only objects of the loop
    atexit.register, atexit.unregister = keep, forget
    try:
        yield
    finally:
        while registered:  # an exit function may register others
            function, args, options = registered.pop()
            try:
                function(*args, **options)
            except (Exception, SystemExit):
                traceback.print_exc()
        atexit.register, atexit.unregister = register, unregister

        # Flush text files first, since they write to binary ones. Files that existed before may belong to the process
        # from which this one was forked, which would write the same text once more.
        objects = gc.get_objects()
        for kind in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            open_files = [item for item in objects if type(item) is kind]
            for file in (sys.stdout, sys.stderr, *open_files):
                # A pipe without a reader, a closed file, or in a stream's place an object that can only write.
                with suppress(OSError, ValueError, AttributeError):
                    file.flush()
