"""JSON as the documents of a run hold it: JSON lines, and numbers that JSON has no word for."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

T = TypeVar("T")
Report = Callable[[str], None]
"""Gets a line about each document, or part of one, that cannot be used."""


def encode_lines(documents: Iterable[Mapping[str, Any]]) -> bytes:
    """JSON lines of ``documents``; a number that is not finite becomes null."""
    return b"".join(json.dumps(plain(document), allow_nan=False).encode() + b"\n" for document in documents)


def ignore(problem: str) -> None:
    """The report of a caller that continues with what is whole."""


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in ``data``; raises ValueError with what is wrong with it."""
    if not data.strip(b"\0"):
        raise ValueError("it is empty")
    try:
        document = json.loads(data.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return cast(dict[str, Any], document)


def parse_line(line: bytes, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """What ``parse`` makes of a line; None if it is damaged, or ``parse`` raises KeyError, TypeError or ValueError."""
    with suppress(KeyError, TypeError, ValueError):
        return parse(plain(parse_object(line)))
    return None


def plain(value: Any) -> Any:
    """``value``, made of lists and dictionaries, with None in place of every number that is not finite."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
