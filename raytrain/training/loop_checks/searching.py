"""Lets a run go on if a search of its loop fails, because searches meet all kinds of the user's objects."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


@contextmanager
def searching(subject: str) -> Iterator[None]:
    """Log an exception in this context, which says that ``subject`` is not known, and go on after the context.

    Example: ``with searching("the variants of a call of add"): variants = ...``
    """
    try:
        yield
    except Exception:
        _log.debug("%s is not known", subject, exc_info=True)
