"""A small project to begin with: a loop of one's own, the options that it is trained with, and a line that says how."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

from raytrain.errors import UsageError


def new(folder: str) -> list[str]:
    """Write the project into ``folder``, which is made; gives the names of its files. Raises UsageError where one is there already."""
    target = Path(folder)
    with as_file(files("raytrain.cli") / "project_template") as source:
        names = sorted(path.name for path in source.iterdir() if path.is_file())
        taken = [name for name in names if (target / name).exists()]
        if taken:
            raise UsageError(f"There is a {taken[0]} in {folder} already; name a folder that is empty or not there.")
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(source / name, target / name)
    return names
