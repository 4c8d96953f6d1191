"""Removes secrets and control characters from texts."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from urllib.parse import quote, quote_plus, unquote

_MIN_LENGTH = 6  # characters of a secret: a shorter value occurs by chance
_MIN_LINE = 16  # characters of a single line of a secret, such as a key, to count as a secret
_kept: set[str] = set()  # secrets that are not in the environment, see keep_secret
_SECRET_NAME = re.compile(
    "KEY|TOKEN|PASSW|PASSPHRASE|PASS$|PASS_|_PWD|SECRET|CREDENTIAL|CONNECTION_?STRING|CONN_STR|DSN$|_PAT$|_SAS$|_AUTH$",
    re.IGNORECASE,
)
_PLACE_NAME = re.compile("_(FILE|PATH|DIR|SOCK)$|^GOOGLE_APPLICATION_CREDENTIALS$", re.IGNORECASE)  # of a path
_URL_REST = re.compile(r"://\S+")
_USER_INFO = re.compile(r"(?<=://)([^/\s:]*:\S*|[^/\s]+)@")  # a password may hold slashes and at signs
_PRIVATE_KEY_LIMIT = re.compile(r"-----(BEGIN|END) [A-Z ]*PRIVATE KEY-----(?:\\n)?")
_NAME = (
    r"(?:password|passwd|passphrase|[_-]pass|secret|token|signature"
    r"|(?:api|access|account|private|secret|shared)[_-]?key|connection_?string)"
)
_NAME_WORDS = "pass", "secret", "token", "signature", "key", "connection"
_FLAG = r"(?<![\w-])--(?:[\w-]*[_-])?(?:password|passwd|passphrase|secret|token|key)"
_COOKIE_VALUE = r"""=(?:\\?"[^"\r\n]*"|[^"'\r\n;]*)"""
_NAMED_SECRETS = (
    (
        ("authorization",),
        re.compile(r"""(\bauthorization["']?\s*[:=]\s*["']?)(?:[\w-]+\s+[^\s"']+|[^\s"'…]{6,})""", re.IGNORECASE),
    ),
    # A header of cookies, whose values may be quoted, and a cookie as Python shows it.
    (
        ("cookie",),
        re.compile(
            rf"""((?:\b(?:set-)?cookie["']?\s*[:=]\s*["']?|<Cookie\s))[\w.$~!#%&*+^`|-]{{1,128}}{_COOKIE_VALUE}"""
            rf"""(?:;[^"'\r\n;=]*(?:{_COOKIE_VALUE})?)*""",
            re.IGNORECASE,
        ),
    ),
    # A value beside its name: in quotation marks, where it may have blanks, or one word. On a command line, which
    # provenance holds, there is a blank between both.
    (
        _NAME_WORDS,
        re.compile(
            rf"""((?:{_NAME}["']?\s*[=:]\s*|{_FLAG}\s+)(["']))(?!…)(?:(?!\2)[^\r\n]){{6,512}}(?=\2)""",
            re.IGNORECASE,
        ),
    ),
    (_NAME_WORDS, re.compile(rf"""({_NAME}["']?\s*[=:]\s*["']?)[^\s"'&,…][^\s"'&,]{{5,}}""", re.IGNORECASE)),
    (("--",), re.compile(rf"""({_FLAG}\s+["']?)[^\s"'-][^\s"']{{5,}}""", re.IGNORECASE)),
    # A word with letters and digits behind a name in a sentence, as in "password hunter22"; and a user of curl.
    (
        (*_NAME_WORDS, "bearer"),
        re.compile(
            r"""(\b(?:password|passwd|passphrase|secret|token|bearer)\s+(?:is\s+)?["']?)(?=[^\s"']{0,64}?\d)"""
            r"""(?=[^\s"']{0,64}?[a-z])(?![a-z]\w*://)[^\s"',;=]{6,}={0,2}(?![^\s"',;])""",
            re.IGNORECASE,
        ),
    ),
    (
        ("-u", "user"),
        re.compile(r"""((?<!\S)(?:-u|--user|--proxy-user)[\s=]+["']?[^\s"':]{1,256}:)(?!\d+(?!\S))[^\s"']+"""),
    ),
    (("sig=",), re.compile(r"((?<![\w%])sig=)[\w%+/-]{20,}")),
    # Keys of a length that no other word has beside these names: W&B's are 40 digits of base 16.
    (
        ("bearer", "key="),
        re.compile(r"""((?<![\w.-])(?:bearer\s+|key=["']))[\w~+/-]{32,}=*(?:\.[\w~+/-]+=*)*""", re.IGNORECASE),
    ),
)
"""Patterns of a name and a secret beside it. Each is tried only in a text that has one of the words before it, in small
letters: that is looked for much faster.
"""
_TOKENS = re.compile(
    r"(?<![\w.-])(?:hf_|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|sk-(?:ant|proj)-|AIza|npm_|pypi-"
    r"|dckr_pat_|nvapi-|wandb_v\d_|ya29\.)[\w-]{16,}"
    r"|(?<![\w.-])sk-[A-Za-z0-9]{32,}"
    r"|(?<![\w.-])eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
    r"|(?<=://hooks\.slack\.com/)[\w/-]{16,}"
)
"""Tokens that say what they are: of Hugging Face, GitHub, GitLab, Slack, OpenAI, Anthropic, Google and W&B, and JWTs.

A match is tried at the beginning of a word alone, so that a long one takes linear time.
"""


def redact(text: str) -> str:
    """Return ``text`` with "…" in place of each secret.

    Secrets are values in this process's environment, those given to :func:`keep_secret`, and what looks like one. A
    variable of the environment holds secrets if its name says so, or if its value is a URL with a password. They are
    also found in the encodings of URLs, JSON, HTML, Python, hexadecimal and base64. The time is linear in the length of
    ``text``, however long its lines are.

    Example: ``redact("cannot open postgres://me:hunter22@host/db") == "cannot open postgres://…@host/db"``
    """
    # A kept secret is handled as the value of a variable whose name says that it is one.
    values = (*os.environ.items(), *(("SECRET", secret) for secret in _kept))
    spellings = {spelling for name, value in values for spelling in _spellings_of_secrets(name, value)}
    for spelling in sorted(spellings, key=len, reverse=True):  # the longest first: a shorter one may be a part of it
        text = text.replace(spelling, "…")
    text = _URL_REST.sub(lambda rest: _without_user_info(rest[0]), text)
    text = _without_private_keys(text)
    lowered = text.lower()
    for words, pattern in _NAMED_SECRETS:
        if any(word in lowered for word in words):
            text = pattern.sub(r"\1…", text)
    return _TOKENS.sub("…", text)


def keep_secret(secret: str) -> None:
    """Make :func:`redact` remove ``secret``, which is not in the environment of this process."""
    _kept.add(secret)


def is_secret_name(name: str) -> bool:
    """Return True if a variable or an option of this name holds a secret, and not the path of one.

    Example: ``is_secret_name("WANDB_API_KEY") and not is_secret_name("AWS_WEB_IDENTITY_TOKEN_FILE")``
    """
    return bool(_SECRET_NAME.search(name)) and not _PLACE_NAME.search(name)


@lru_cache(maxsize=1024)
def _spellings_of_secrets(name: str, value: str) -> frozenset[str]:
    """Return every spelling of the secrets in a variable of the environment; empty if it holds none.

    Cached, because the environment hardly changes, and each line that is printed is redacted.
    """
    # The password of each URL, or else the user, is secret whatever the variable is called.
    secrets: list[str] = []
    for rest in _URL_REST.findall(value):
        for user_info in _USER_INFO.findall(rest[: rest.rfind("@") + 1]):
            secrets.append(user_info.partition(":")[2] or user_info)
    if is_secret_name(name):
        secrets.append(value)
        # A log may show single lines of a key, or one field of a connection string such as AccountName=…;AccountKey=….
        lines = re.split(r"\\n|[\r\n\"]", value)
        secrets += [line for line in lines if len(line) >= _MIN_LINE and "-----" not in line]
        fields = [field.partition("=") for field in value.split(";")]
        secrets += [secret for key, _, secret in fields if _SECRET_NAME.search(key)]
    variants = {variant for secret in secrets for variant in (secret, secret.strip(), unquote(secret))}

    encoded: set[str] = set()
    for variant in variants:
        if len(variant) >= _MIN_LENGTH:
            variant_bytes = variant.encode(errors="surrogateescape")
            base64_texts = base64.b64encode(variant_bytes).decode(), base64.urlsafe_b64encode(variant_bytes).decode()
            encoded |= {variant, variant_bytes.hex(), *base64_texts, *(text.rstrip("=") for text in base64_texts)}

    # Escape twice, because formats are often nested: JSON in JSON, or a URL in HTML.
    escaped_once = {spelling for text in encoded for spelling in _escaped(text)}
    return frozenset(spelling for text in escaped_once for spelling in _escaped(text))


def _escaped(text: str) -> Iterator[str]:
    """Yield ``text`` unchanged, and as URLs, JSON, HTML and Python write it."""
    yield text
    for safe in ("/", "", "!~*'()"):  # the last is JavaScript's
        yield (quoted := quote(text, safe, errors="surrogateescape"))
        yield re.sub("%..", lambda escape: escape[0].lower(), quoted)
    yield quote_plus(text, errors="surrogateescape")
    yield json.dumps(text)[1:-1]
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield html.escape(text)
    yield repr(text)[1:-1]
    yield repr(text.encode(errors="surrogateescape"))[2:-1]


def _without_user_info(rest_of_url: str) -> str:
    """Return a URL from its ``://`` on, with "…" in place of a user or a password."""
    # No match can reach beyond the last "@". Before it, a failing match ends at the next slash, so that all URLs in one
    # long word together take linear time.
    before, at, after = rest_of_url.rpartition("@")
    return _USER_INFO.sub("…@", before + at) + after


def _without_private_keys(text: str) -> str:
    """Return ``text`` with "…" in place of each private key in PEM."""
    # Go once through the first and last lines of keys. A pattern for a whole key would search to the end of the text
    # for each first line without a last line.
    pieces: list[str] = []
    position, key_start = 0, None
    for limit in _PRIVATE_KEY_LIMIT.finditer(text):
        if limit[1] == "BEGIN":
            key_start = limit.start() if key_start is None else key_start
        elif key_start is not None:
            pieces += text[position:key_start], "…"
            position, key_start = limit.end(), None
    return "".join([*pieces, text[position:]])


_LINE_ENDS = re.compile("[\t\n\u2028\u2029]")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Besides the control characters: marks that reverse the direction of text, and halves of characters."""


def one_line(text: str) -> str:
    """Return text from outside, such as a name, as part of one line: :func:`printable`, with ␊ for a line end.

    Example:
        >>> one_line("two\\nlines")
        'two␊lines'
    """
    return printable(_LINE_ENDS.sub(_picture, text))


def printable(text: str) -> str:
    """Return lines of text with signs such as ␛ in place of control characters, which a terminal would obey."""
    return _CONTROLS.sub(_picture, text)


def _picture(control: re.Match[str]) -> str:
    """Return the sign that Unicode has for a control character, such as ␛ for an escape."""
    code = ord(control[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else "\N{REPLACEMENT CHARACTER}"
