"""Takes secrets out of text that others wrote, such as an error message, before it is kept or shown."""

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
