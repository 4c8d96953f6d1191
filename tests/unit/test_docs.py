"""The documentation is correct: the tree names every file, commands can be parsed, linked files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from raytrain.cli.commands import COMMANDS
from raytrain.cli.parser import parse
from raytrain.recipes import RECIPES

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "cluster/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_tree_names_every_file_of_the_package() -> None:
    existing = {path.relative_to(ROOT / "raytrain").as_posix() for path in (ROOT / "raytrain").rglob("*.py")}
    assert files_of_the_tree() == {path for path in existing if not path.endswith("__.py")}


def files_of_the_tree() -> set[str]:
    """Return the files in the tree of the architecture page, relative to the package."""
    _, _, rest = (ROOT / "docs/architecture.md").read_text().partition("\nraytrain/\n")
    folders, files = list[str](), set[str]()
    for line in rest.partition("\n```")[0].splitlines():
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 2  # 1 for files directly in the package.
        folders = folders[: depth - 1]
        if name.endswith("/"):
            folders.append(name)
        else:
            files.add("".join(folders) + name)
    return files


def test_every_command_is_documented_and_every_documented_command_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "config.json").write_text(RECIPES["cifar10"](name="first", data="s3://BUCKET/cifar10/train").to_json())
    commands = [words for page in PAGES for words in documented_commands(page)]
    assert {words[0] for words in commands if not words[0].startswith("-")} == set(COMMANDS)
    for words in commands:
        if "--help" not in words:
            parse(words, COMMANDS)


def documented_commands(page: Path) -> list[list[str]]:
    """Return the arguments of raytrain in every indented command line of a page, after ``uv run``, ``--`` or ``-m``."""
    lines = re.sub(r" *\\\n *", " ", page.read_text()).splitlines()
    calls = [re.search(r"(?:uv run|--|-m) raytrain (.*)", line) for line in lines if line.startswith("    ")]
    return [shlex.split(call[1].partition(" #")[0]) for call in calls if call]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_files_that_a_page_points_to_exist(page: Path) -> None:
    text = page.read_text()
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:md|py|ipynb))`", text)
    missing = [path for path in linked if not (page.parent / path).exists()]
    missing += [path for path in named if not any((folder / path).exists() for folder in (ROOT, ROOT / "raytrain"))]
    assert missing == []


def test_the_readme_needs_two_commands_for_the_setup() -> None:
    readme = (ROOT / "README.md").read_text()
    setups = [line.strip() for line in readme.splitlines() if "pip install" in line]
    assert setups == ["python3 -m pip install uv && uv run raytrain demo", "python3 -m pip install uv && uv run pytest"]
