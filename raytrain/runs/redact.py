"""Text from outside: without secrets and control characters."""

from __future__ import annotations

import os
import re

_USER_INFO = re.compile(r"(?<=://)[^/\s@]+@")
_SECRET = re.compile("KEY|TOKEN|PASSWORD|SECRET", re.IGNORECASE)
_MIN_LENGTH = 6  # characters: a shorter value occurs by chance


def redact(text: str) -> str:
    """``text`` without the user and password of URLs, and without values of environment variables that hold secrets."""
    text = _USER_INFO.sub("…@", text)
    values = {value for name, value in os.environ.items() if _SECRET.search(name) and len(value) >= _MIN_LENGTH}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "…")
    return text


_LINE_ENDS = re.compile("[\t\n\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Besides the control characters: marks that reverse the direction of text, and halves of characters."""


def one_line(text: str) -> str:
    """Text from outside (a name, a message) as part of one line: with ␊ for a new line, and as :func:`printable`."""
    return printable(_LINE_ENDS.sub(_picture, text))


def printable(text: str) -> str:
    """Lines of text that no terminal obeys: with ␛ for an escape character, and so on."""
    return _CONTROLS.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
