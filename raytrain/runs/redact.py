"""Text from outside: without secrets and control characters."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import quote, quote_plus, unquote

_MIN_LENGTH = 6  # characters: a shorter value occurs by chance
_MIN_LINE = 16  # of a key of several lines
_SECRET_NAME = re.compile(
    "KEY|TOKEN|PASSW|PASSPHRASE|PASS$|PASS_|_PWD|SECRET|CREDENTIAL|CONNECTION_?STRING|CONN_STR|DSN$|_PAT$|_SAS$|_AUTH$",
    re.IGNORECASE,
)
_PLACE_NAME = re.compile("_(FILE|PATH|DIR|SOCK)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)([^/\s:]*:\S*|[^/\s]+)@")  # a password may hold slashes and at signs
_BUILT_LIKE_SECRETS = (
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----(\\n)?", re.DOTALL),
    re.compile(r"""(\bauthorization["']?\s*[:=]\s*["']?)\w+\s+[^\s"']+""", re.IGNORECASE),
    re.compile(
        r"""((?:password|passwd|passphrase|[_-]pass|secret|token|signature|(?:api|access|account|private|shared)"""
        r"""[_-]?key|connection_?string)["']?\s*[=:]\s*["']?)[^\s"'&,…][^\s"'&,]{5,}""",
        re.IGNORECASE,
    ),
)


def redact(text: str) -> str:
    """``text`` without secrets: values that this process's environment holds, in any encoding, and what looks like one.

    A variable holds secrets if its name says so, or its value is a URL with a password.
    """
    found = {spelling for name, value in os.environ.items() for spelling in _spellings_of_variable(name, value)}
    for spelling in sorted(found, key=len, reverse=True):
        text = text.replace(spelling, "…")
    text = _USER_INFO.sub("…@", text)
    for pattern in _BUILT_LIKE_SECRETS:
        text = pattern.sub(r"\1…", text)
    return text


@lru_cache(maxsize=1024)
def _spellings_of_variable(name: str, value: str) -> frozenset[str]:
    secrets = {each for part in _secrets(name, value) for each in (part, part.strip(), unquote(part))}
    return frozenset(spelling for each in secrets if len(each) >= _MIN_LENGTH for spelling in _spellings(each))


def _secrets(name: str, value: str) -> Iterator[str]:
    """The value of a variable, if it is secret, and the parts of it that are secret by themselves."""
    for user_info in _USER_INFO.findall(value):
        yield user_info.partition(":")[2] or user_info
    if not _SECRET_NAME.search(name) or _PLACE_NAME.search(name):
        return
    yield value
    yield from (line for line in re.split(r"\\n|[\r\n\"]", value) if len(line) >= _MIN_LINE and "-----" not in line)
    for part in value.split(";") if "=" in value else ():
        key, _, secret = part.partition("=")
        if _SECRET_NAME.search(key):
            yield secret


def _spellings(secret: str) -> set[str]:
    """``secret`` and how URLs, JSON, HTML and Python write it, each within each other, in hexadecimal and base64."""
    in_bytes = secret.encode(errors="surrogateescape")
    base64s = {base64.b64encode(in_bytes).decode(), *_within_base64(in_bytes)}
    base64s |= {each.translate(str.maketrans("+/", "-_")) for each in base64s}
    plain = {secret, in_bytes.hex(), *base64s, *(each.rstrip("=") for each in base64s)}
    once = {spelling for each in plain for spelling in _escaped(each)}
    return {spelling for each in once for spelling in _escaped(each)}


def _escaped(text: str) -> Iterator[str]:
    yield text
    for safe in ("/", "", "!~*'()"):  # the last is JavaScript's
        yield (quoted := quote(text, safe, errors="surrogateescape"))
        yield re.sub("%..", lambda found: found[0].lower(), quoted)
    yield quote_plus(text, errors="surrogateescape")
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield html.escape(text)
    yield repr(text)[1:-1]
    yield repr(text.encode(errors="surrogateescape"))[2:-1]


def _within_base64(secret: bytes) -> Iterator[str]:
    """The characters that ``secret`` alone decides, if it is a part of what is encoded, at each of three places."""
    for before in range(3):
        bits = 8 * (before + len(secret))
        encoded = base64.b64encode(bytes(before) + secret).decode()
        yield encoded[-(-8 * before // 6) : bits // 6]


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
