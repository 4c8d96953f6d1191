"""Output files of commands: check the name before the work starts, write the content when it is done."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from raytrain.errors import UsageError
from raytrain.storage.base import Store
from raytrain.storage.error_sentences import explain
from raytrain.storage.open import open_store
from raytrain.storage.tempdir import TemporaryFolder


def check_output(output: str, suffixes: tuple[str, ...], option: str = "--output") -> None:
    """Raise UsageError, which names ``option``, unless ``output`` ends in one of ``suffixes`` and its folder exists."""
    if not output.endswith(suffixes):
        raise UsageError(f"{option} is {output!r}; its name must end in {' or '.join(suffixes)}.")
    if "://" in output:
        _open_folder(output)  # checks the URL
    elif not (folder := Path(output).absolute().parent).is_dir():
        raise UsageError(f"{option} is {output!r}, but there is no folder {folder}; create it first.")


def write_output(output: str, content: bytes) -> None:
    """Write or replace ``output``, a file or an object in a bucket, atomically. Raises StorageError if that fails."""
    folder, name = _open_folder(output)
    if "://" in output:
        from raytrain.storage.filesystem import write_object  # s3fs takes a second to import

        write_object(output, content)
    else:
        folder.put(name, content)


@contextmanager
def new_output(output: str) -> Generator[Path]:
    """A new file that, when it has been written, atomically becomes ``output``, a file or an object in a bucket.

    Raises StorageError if that fails.
    """
    folder, name = _open_folder(output)
    is_object = "://" in output
    try:
        with TemporaryFolder(None if is_object else folder.url) as temporary:
            yield temporary / name
            if is_object:
                from raytrain.storage.filesystem import upload_object  # s3fs takes a second to import

                upload_object(temporary / name, output)
            else:
                os.replace(temporary / name, Path(folder.url, name))
    except OSError as error:
        raise explain(error, output) from error


def _open_folder(output: str) -> tuple[Store, str]:
    """The store of the folder that ``output`` lies in, and its name there. Raises UsageError if it has no bucket."""
    folder, slash, name = output.rpartition("/")
    return open_store(folder + slash or "."), name  # with its slash: "/" is the root, and "s3://" has no bucket
