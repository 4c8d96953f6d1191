"""The tree of the package in ``docs/architecture.md``, made from the modules' docstrings.

``python -m tests.helpers.tree`` rewrites it. Beside a file stands its docstring's first sentence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/architecture.md"
SENTENCES_AT = 31
_TREE = re.compile(r"(?<=\n)raytrain/\n.*?(?=```)", re.DOTALL)


def written_tree() -> str:
    """Return the tree that the page has now."""
    found = _TREE.search(PAGE.read_text())
    assert found
    return found[0]


def package_tree() -> str:
    """Return the tree of the package as it is: folders before files, each with its first sentence."""
    return "raytrain/\n" + "".join(f"{line.rstrip()}\n" for line in _lines(ROOT / "raytrain", 1))


def _lines(folder: Path, depth: int) -> Iterator[str]:
    indent = "  " * depth
    for subfolder in sorted({file.parent for file in folder.glob("*/*.py")}):
        yield f"{indent + subfolder.name + '/':{SENTENCES_AT}}{_first_sentence(subfolder / '__init__.py')}"
        yield from _lines(subfolder, depth + 1)
    for file in sorted(folder.glob("*.py")):
        if not file.name.startswith("__"):
            yield f"{indent + file.name:{SENTENCES_AT}}{_first_sentence(file)}"


def _first_sentence(module: Path) -> str:
    docstring = (ast.get_docstring(ast.parse(module.read_text())) if module.exists() else None) or ""
    return " ".join(re.split(r"\.(?=\s|$)|\n\n", docstring, maxsplit=1)[0].replace("``", "`").split())


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().replace(written_tree(), package_tree()))
