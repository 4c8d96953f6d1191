"""The documentation is correct: the tree is that of the package, commands can be parsed, linked files exist."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from raytrain.cli.commands import COMMANDS
from raytrain.cli.parser import parse
from raytrain.config.named_functions import load_function
from raytrain.recipes import RECIPES
from tests.helpers.folder_runs import folder_run, train_here
from tests.helpers.tree import package_tree, written_tree

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "cluster/README.md",
    ROOT / "raytrain/cli/project_template/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def test_the_tree_is_made_from_the_docstrings() -> None:
    assert written_tree() == package_tree(), "uv run python -m tests.helpers.tree rewrites it"


@pytest.mark.not_quick
def test_every_command_is_documented_and_every_documented_command_is_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "scaling"):  # which pages resume
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.json").write_text(RECIPES["cifar10"](name=name, data="s3://BUCKET/cifar10/train").to_json())
    (tmp_path / "run.yaml").write_text("recipe: cifar10\n")
    commands = [words for page in PAGES for words in documented_commands(page)]
    assert {words[0] for words in commands if not words[0].startswith("-")} == set(COMMANDS)
    commands += [words for page in PAGES for words in mentioned_commands(page)]
    for words in map(list, dict.fromkeys(map(tuple, commands))):  # pages say the same ones
        if "--help" not in words:
            parse(words, COMMANDS)
        if words[0] == "submit" and "--resume" not in words:  # which reads the options of the run
            parse(words[words.index("--") + 1 :], COMMANDS)


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "notebooks").glob("*.ipynb"))], ids=lambda page: page.name)
def test_what_a_page_or_a_notebook_imports_exists(page: Path) -> None:
    imports = re.findall(r"^[ \"]*from (raytrain[\w.]*) import ([\w, ]+)", page.read_text(), flags=re.MULTILINE)
    for module, names in imports:
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.split()[0]), f"{module} has no {name.strip()}"


def documented_commands(page: Path) -> list[list[str]]:
    """Return the arguments of raytrain in every indented command line of a page, after ``uv run``, ``--`` or ``-m``."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    lines = re.sub(r" *\\\n *", " ", text).splitlines()
    before = r"(?:uv run(?: --extra \w+)*|--|-m)"
    calls = [re.search(rf"{before} raytrain (.*)", line) for line in lines if line.startswith("    ")]
    return [shlex.split(call[1].partition(" #")[0]) for call in calls if call]


def mentioned_commands(page: Path) -> list[list[str]]:
    """Return the arguments of raytrain in sentences of a page, if they are more than the name of a command."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    calls = re.findall(r"`(?:uv run )?raytrain ([^`]+)`", re.sub(r"\s+", " ", text))
    unnamed = ("COMMAND", "…")  # an example of any command, or of any options
    words = [shlex.split(call) for call in calls if not any(name in call for name in unnamed)]
    names = {call[0] for call in words if not call[0].startswith("-")}
    assert names <= set(COMMANDS), page
    return [call for call in words if len(call) > 1 and "--help-all" not in call]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_files_that_a_page_points_to_exist(page: Path) -> None:
    text = page.read_text()
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    named = re.findall(r"`((?:[\w-]+/)+[\w.-]+\.(?:md|py|ipynb))`", text)
    missing = [path for path in linked if not (page.parent / path).exists()]
    missing += [path for path in named if not any((folder / path).exists() for folder in (ROOT, ROOT / "raytrain"))]
    assert missing == []


@pytest.mark.not_quick
def test_the_loops_on_the_pages_can_be_pasted(images: Path, tmp_path: Path) -> None:
    for page in ("README.md", "docs/your-own-loop.md"):
        codes = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
        file = tmp_path / f"{Path(page).stem.replace('-', '_')}_loop.py"
        file.write_text(next(code for code in codes if "def train(run" in code))
        loop = load_function("--loop", f"{file}:train")
        train_here(folder_run(images, tmp_path, file.stem, loop=loop, max_steps=2))


def test_the_readme_names_every_command_in_its_map() -> None:
    rows = (ROOT / "README.md").read_text().partition("## The commands")[2].partition("\n`uv run")[0]
    assert set(re.findall(r"`([\w-]+)`", rows)) == set(COMMANDS)


def test_the_readme_needs_two_commands_for_the_setup() -> None:
    readme = (ROOT / "README.md").read_text()
    setups = [line.strip() for line in readme.splitlines() if "-m pip install" in line]
    assert setups == [
        "python3 -m pip install uv && uv run raytrain demo",
        "python3 -m pip install uv && uv run --group dev pytest",
    ]
