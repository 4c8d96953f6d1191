"""Input files of commands, in a folder or in a bucket."""

from __future__ import annotations

from pathlib import Path

from raytrain.errors import StorageError
from raytrain.storage.error_sentences import explain


def read_input(name: str) -> bytes:
    """Return the content of a file or an object in a bucket. Raises StorageError if it cannot be read."""
    if "://" in name:
        from raytrain.storage.filesystem import read_object  # s3fs takes a second to import

        return read_object(name)
    try:
        return Path(name).expanduser().read_bytes()
    except FileNotFoundError:
        raise StorageError(f"There is no file {name}; check the path.") from None
    except OSError as error:
        raise explain(error, name) from error
