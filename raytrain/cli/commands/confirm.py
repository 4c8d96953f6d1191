"""A question before something is lost."""

from __future__ import annotations

import sys

from raytrain.errors import UsageError
from raytrain.runs.printable import one_line


def confirmed(question: str) -> bool:
    """Ask whoever sits at the terminal. Raises UsageError if nobody does."""
    if not sys.stdin.isatty():
        raise UsageError(f"{one_line(question)} Nobody can be asked here; add --yes to answer with yes.")
    return input(f"{one_line(question)} [y/N] ").strip().lower() in ("y", "yes")
