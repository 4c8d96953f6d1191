"""Each wait without a limit, of those that start and feed a run, is in the table that says what ends it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALWAYS = {"accept", "acquire", "barrier", "broadcast_object_list", "Client", "readline", "recv", "recv_fds"}
UNLESS_LIMITED = {"join", "result", "select", "wait"}


def waits_without_limit(tree: ast.AST, place: str = "") -> Iterator[str]:
    """Yield the function of each call that may wait for ever, as ``Class.function``."""
    for node in ast.iter_child_nodes(tree):
        is_scope = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        yield from waits_without_limit(node, f"{place}.{node.name}".lstrip(".") if is_scope else place)
        if isinstance(node, ast.Call) and _may_wait_for_ever(node):
            yield place


def _may_wait_for_ever(call: ast.Call) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    if any(keyword.arg in ("timeout", "timeout_s") for keyword in call.keywords):
        return False
    if owner == "ray":
        return name in ("get", "wait")
    if name == "connect":  # of a socket
        return bool(owner) and len(call.args) == 1
    if name == "wait_for":  # of a condition, after what it waits for
        return len(call.args) < 2
    if not owner and name == "wait":  # concurrent.futures.wait(futures)
        return len(call.args) < 2
    return name in ALWAYS or (bool(owner) and name in UNLESS_LIMITED and not call.args)


def table() -> str:
    """Return the table of docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    return page.partition("## Waits without a limit")[2].partition("\n## ")[0]


def test_the_table_has_all_waits_without_limit() -> None:
    found = {
        (file.relative_to(ROOT / "raytrain").as_posix(), place or file.stem)
        for folder in ("launch", "loader")
        for file in sorted((ROOT / "raytrain" / folder).rglob("*.py"))
        for place in waits_without_limit(ast.parse(file.read_text()))
    }
    missing = [f"{file}: {place}" for file, place in sorted(found) if f"`{place}`" not in table()]
    assert missing == []


def test_the_table_names_functions_that_exist() -> None:
    named = re.findall(r"`(\w[\w.]*)`", " ".join(line.split("|")[1] for line in table().splitlines() if "|" in line))
    functions = {
        name for file in (ROOT / "raytrain").rglob("*.py") for name in functions_of(ast.parse(file.read_text()))
    }
    assert [name for name in named if not name.endswith(".py") and name not in functions] == []


def functions_of(tree: ast.AST, place: str = "") -> Iterator[str]:
    """Yield the name of each function, as ``Class.function``."""
    for node in ast.iter_child_nodes(tree):
        is_scope = isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        name = f"{place}.{node.name}".lstrip(".") if is_scope else place
        if is_scope and not isinstance(node, ast.ClassDef):
            yield name
        yield from functions_of(node, name)
