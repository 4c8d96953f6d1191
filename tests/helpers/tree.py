"""The tree of the package in ``docs/architecture.md``, made from the modules' docstrings.

``python -m tests.helpers.tree`` rewrites it. The phrase of a file is its docstring's first sentence, or what is
before its colon if it is longer than a line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
PHRASES_AT = 31
MOST_LETTERS = 120 - PHRASES_AT
_TREE = re.compile(r"(?<=\n)raytrain/\n.*?(?=```)", re.DOTALL)


def written_tree() -> str:
    """Return the tree that the page has now."""
    found = _TREE.search(PAGE.read_text())
    assert found
    return found[0]


def package_tree() -> str:
    """Return the tree of the package as it is: folders before files, each with its phrase."""
    return "raytrain/\n" + "".join(f"{line.rstrip()}\n" for line in _lines(ROOT / "raytrain", 1))


def _lines(folder: Path, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for subfolder in sorted({file.parent for file in folder.glob("*/*.py")}):
        yield f"{indent + subfolder.name + '/':{PHRASES_AT}}{_phrase(subfolder / '__init__.py')}"
        yield from _lines(subfolder, depth + 1)
    for file in sorted(folder.glob("*.py")):
        if not file.name.startswith("__"):
            yield f"{indent + file.name:{PHRASES_AT}}{_phrase(file)}"


def _phrase(module: Path) -> str:
    docstring = (ast.get_docstring(ast.parse(module.read_text())) if module.exists() else None) or ""
    sentence = " ".join(re.split(r"\.(?=\s|$)|\n\n", docstring, maxsplit=1)[0].replace("``", "`").split())
    return sentence if len(sentence) <= MOST_LETTERS else sentence.split(": ")[0]


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(written_tree(), package_tree()))
