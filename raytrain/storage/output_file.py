"""A file that a command leaves: its name is checked before the work begins, its content written when the work is done."""

from __future__ import annotations

from pathlib import Path

from raytrain.errors import UsageError
from raytrain.storage.base import open_store


def check_output(output: str, suffixes: tuple[str, ...], option: str = "--output") -> None:
    """Raise UsageError, in the name of ``option``, where ``output`` ends in none of ``suffixes`` or its folder is not there."""
    if not output.endswith(suffixes):
        raise UsageError(f"{option} is {output!r}; its name must end in {' or '.join(suffixes)}.")
    if "://" in output:
        open_store(output.rpartition("/")[0])  # complains of what is no place in S3
    elif not (folder := Path(output).absolute().parent).is_dir():
        raise UsageError(f"{option} is {output!r}, and there is no folder {folder}; make it first.")


def write_output(output: str, content: bytes) -> None:
    """Write or replace ``output``, a file or an ``s3://`` object: all of it, or StorageError and nothing."""
    folder, _, name = output.rpartition("/")
    open_store(folder or ".").put(name, content)
