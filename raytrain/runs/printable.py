"""Text from outside, such as a name or a message, as it may be shown."""

from __future__ import annotations

import re

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
