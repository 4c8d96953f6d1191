"""Hook of mkdocs: links to files that the site does not have become text, and so do Sphinx's roles in docstrings."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
_ROLE = re.compile(r":(class|func|meth|mod|attr|data):(?=<code>)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page."""
    return _OUTSIDE.sub(r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with the HTML of each page."""
    return _ROLE.sub("", html)
