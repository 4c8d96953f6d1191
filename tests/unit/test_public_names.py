"""Public names are complete: what the documents use is in docs/reference.md, and what raytrain gives has an example."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import raytrain
from raytrain.launch.option_checks import check_options

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
REFERENCE = frozenset(re.findall(r"^::: (\S+)", (ROOT / "docs/reference.md").read_text(), flags=re.MULTILINE))


def codes(document: Path) -> Iterator[str]:
    """Yield the Python code of a page or a notebook, without what only a notebook understands."""
    text = document.read_text()
    if document.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        blocks = ["".join(cell["source"]) for cell in cells]
    else:
        blocks = re.findall(r"^```python.*?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        yield re.sub(r"^\s*[!%].*$", "", block, flags=re.MULTILINE)


def names_used(code: str) -> Iterator[str]:
    """Yield what ``code`` takes from raytrain, as ``raytrain.train`` or ``raytrain.storage.open.open_store``."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "raytrain":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "raytrain":
            yield f"raytrain.{node.attr}"


def place_in_reference(name: str) -> str:
    """Return the address that docs/reference.md has for a public ``name``: of what it names, where that is defined."""
    module, _, attribute = name.rpartition(".")
    named = getattr(importlib.import_module(module), attribute)
    return named.__name__ if inspect.ismodule(named) else f"{named.__module__}.{named.__qualname__}"


def is_in_reference(place: str) -> bool:
    """Return whether docs/reference.md has ``place``, or all of its module."""
    return place in REFERENCE or place.rpartition(".")[0] in REFERENCE


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_what_a_document_uses_is_in_the_reference(document: Path) -> None:
    used = {name for code in codes(document) for name in names_used(code)}
    places = {name: place_in_reference(name) for name in used}
    assert {name: place for name, place in places.items() if not is_in_reference(place)} == {}


def test_what_raytrain_gives_is_in_the_reference_with_an_example() -> None:
    missing = [name for name in raytrain.__all__ if not is_in_reference(place_in_reference(f"raytrain.{name}"))]
    assert missing == []
    documents = {name: inspect.getdoc(getattr(raytrain, name)) or "" for name in raytrain.__all__}
    without = [name for name, text in documents.items() if not re.search(r"Example|>>>|::\n\n", text)]
    assert without == []


@pytest.mark.parametrize("name", raytrain.__all__)
def test_the_options_that_an_example_trains_with_suffice(name: str) -> None:
    document = inspect.getdoc(getattr(raytrain, name)) or ""
    for config in re.findall(r"raytrain\.(?:train|start|profile)\(([\w.]+\([^()]*\))", document):
        names = {"raytrain": raytrain, "TrainConfig": raytrain.TrainConfig, "recipes": raytrain.recipes}
        check_options(eval(config, names))


def test_what_the_reference_names_exists_and_says_what_it_is() -> None:
    for place in REFERENCE:
        module, _, name = place.rpartition(".")
        named = importlib.import_module(place) if place in _MODULES else getattr(importlib.import_module(module), name)
        assert inspect.getdoc(named), place


_MODULES = {"raytrain.recipes", "raytrain.errors"}
"""Modules of which the reference has everything."""
