"""Commands for a first try."""

from __future__ import annotations

from typing import Annotated

from tyro.conf import Positional, arg

from raytrain.cli.command_result import CommandResult
from raytrain.cli.commands.arguments import Storage


def demo(storage: Storage = "./runs", workers: Annotated[int, arg(help="Training workers.")] = 2) -> CommandResult:
    """Draw images of digits, serve them over S3 on this machine, train on them, and test the result.

    Example: raytrain demo
    """
    from raytrain.demo.demo import run_demo, summary

    result = run_demo(storage=storage, workers=workers)
    return CommandResult(summary(result, storage), result.summary())


def new(folder: Annotated[Positional[str], arg(help="Folder to create.")]) -> CommandResult:
    """Start a project: a training loop of your own, and a script that trains it.

    Example: raytrain new my-project
    """
    from raytrain.cli.new_project import write_project

    names = write_project(folder)
    text = f"Wrote {', '.join(names)} into {folder}. Train with:  cd {folder} && python train.py"
    return CommandResult(text, {"folder": folder, "files": names})
