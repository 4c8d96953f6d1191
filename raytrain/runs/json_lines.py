"""JSON as the documents of a run hold it: JSON lines, and numbers that JSON has no word for."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from raytrain.storage.base import Store


def encode_lines(documents: Iterable[Mapping[str, Any]]) -> bytes:
    """JSON lines of ``documents``; a number that is not finite becomes null."""
    return b"".join(json.dumps(plain(document), allow_nan=False).encode() + b"\n" for document in documents)


def read_lines(store: Store, path: str) -> list[dict[str, Any]]:
    """The documents of a file of JSON lines; none if there is no such file. Lines that are cut short are left out."""
    try:
        lines = store.get(path).splitlines()
    except FileNotFoundError:
        return []
    documents: list[dict[str, Any]] = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            documents.append(json.loads(line))
    return documents


def plain(value: Any) -> Any:
    """``value``, made of lists and dictionaries, with None in place of every number that is not finite."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in cast(dict[Any, Any], value).items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in cast(list[Any], value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
