"""What the README promises is there: the tree names every file, and its commands are understood."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from raytrain.cli.commands import COMMANDS
from raytrain.cli.parser import parse
from raytrain.recipes import RECIPES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_tree_names_every_file_of_the_package() -> None:
    _, _, rest = README.partition("\nraytrain/\n")
    folder, named = "", set[str]()
    for line in rest.partition("\ncluster/")[0].splitlines():
        name = line.split()[0]
        if name.endswith("/"):
            folder = name
        else:
            named.add((folder if line.startswith("    ") else "") + name)
    there = {path.relative_to(ROOT / "raytrain").as_posix() for path in (ROOT / "raytrain").rglob("*.py")}
    assert named == {path for path in there if not path.endswith("__.py")}


def test_its_commands_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begun = tmp_path / "runs" / "first"
    begun.mkdir(parents=True)
    (begun / "config.json").write_text(RECIPES["cifar10"](name="first", data="s3://BUCKET/cifar10/train").to_json())
    lines = README.replace("\\\n", " ").splitlines()
    commands = [
        line.partition("uv run raytrain ")[2].partition(" #")[0] for line in lines if line.startswith("    ") and "uv run raytrain " in line
    ]
    assert {command.split()[0] for command in commands} == set(COMMANDS)
    for command in commands:
        parse(shlex.split(command), COMMANDS)


def test_the_files_that_it_points_to_are_there() -> None:
    linked = re.findall(r"\]\((?!http)([^)]+)\)", README) + re.findall(r"`([\w./-]+\.(?:md|ipynb))`", README)
    assert linked
    assert [path for path in linked if not (ROOT / path).exists()] == []
