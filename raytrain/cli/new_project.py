"""``raytrain new``: write a small project with its own training loop."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

from raytrain.errors import UsageError


def write_project(folder: str) -> list[str]:
    """Copy the project template into ``folder``, which is created; returns the names of the files.

    Raises UsageError if one of the files exists.
    """
    target = Path(folder)
    with as_file(files("raytrain.cli") / "project_template") as template:
        names = sorted(path.name for path in template.iterdir() if path.is_file())
        existing = [name for name in names if (target / name).exists()]
        if existing:
            raise UsageError(f"{folder} already has a file {existing[0]}; name a new or an empty folder.")
        target.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copyfile(template / name, target / name)
    return names
