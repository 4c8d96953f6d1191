"""Opens stores by URL, and the files that commands read and write."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from raytrain.errors import StorageError, UsageError, current_folder
from raytrain.storage.clouds.cloud import Cloud
from raytrain.storage.credentials import CredentialSource
from raytrain.storage.folder import FolderStore, explain_os_error
from raytrain.storage.store import Store
from raytrain.storage.temporary_files import TemporaryFolder

_FORMS = {"s3": "s3://bucket/prefix", "gs": "gs://bucket/prefix", "az": "az://container/prefix"}
_NO_PREFIX = re.compile(r"/\.{1,2}(/|$)|[\x00-\x1f\x7f]")  # obstore cannot reach what is below such a prefix
URL_FORMS = "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"  # what the URL of a bucket looks like


def open_store(url: str, credentials: CredentialSource | None = None, cloud: Cloud | None = None) -> Store:
    """Return the store at ``url``. Sends no request yet.

    >>> open_store("s3://bucket/images").get("cat/1.jpg")

    Args:
        url: ``s3://bucket/prefix``, ``gs://…``, ``az://container/prefix``, or the path of a folder.
        credentials: asked for credentials, and again before they expire; by default this process's own.
        cloud: how the bucket is reached; by default from this process's configuration.

    Raises UsageError for a URL of another kind or with credentials, StorageError if its cloud is configured wrongly.
    """
    if "://" not in url:
        check_folder_name(url)
        return FolderStore(absolute_path(url))
    check_url(url)
    from raytrain.storage.bucket import BucketStore  # a folder needs neither obstore nor boto3

    cloud = cloud or configured_cloud(url)
    return BucketStore(url.rstrip("/"), cloud, credentials or cloud.credentials, uuid.uuid4().hex)


def absolute_path(path: str) -> str:
    """Return ``path`` from the root on, with ``~`` replaced by the home folder, and without ``.`` and ``..``.

    Raises UsageError if it is relative to a removed folder, or if it names an unknown user.
    """
    expanded = expanded_path(path)
    return os.path.normpath(expanded if expanded.is_absolute() else Path(current_folder(), expanded))


def expanded_path(path: str) -> Path:
    """Return ``path`` with ``~`` replaced by the home folder.

    Raises UsageError if it names a user who is unknown, and for quotes around it or a variable at its beginning, which
    only a shell takes away and replaces: as a name, they would be looked for, or be made, in the current folder.
    """
    if path[:1] in ("'", '"') and path[:1] == path[1:][-1:]:
        raise UsageError(f"The path {path} has quotes around it that belong to its text; give it as {path[1:-1]}.")
    variable = re.match(r"\$\{?(\w+)", path)
    if variable and variable[1] in os.environ:
        raise UsageError(
            f"The path {path} begins with ${variable[1]}, which only a shell replaces, and not in single quotes; "
            "give the path that it stands for."
        )
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UsageError(
            f"There is no home folder for {path}; give the path from / on, or ./{path} if a name begins with ~."
        ) from None


def configured_cloud(url: str) -> Cloud:
    """Return the cloud that ``url`` is in, as this process's environment configures it.

    Raises UsageError or StorageError if that configuration is broken.
    """
    if url.startswith("az://"):
        from raytrain.storage.clouds.azure import Azure

        return Azure.configured(url)
    if url.startswith("gs://"):
        from raytrain.storage.clouds.google import Google

        return Google.configured(url)
    from raytrain.storage.clouds.s3 import S3

    return S3.configured(url)


def check_folder_name(path: str) -> None:
    """Raise UsageError if ``path`` is a URL that has lost a slash, as in s3:/bucket; it would become a folder.

    The sentence does not show the path, which may contain credentials.
    """
    scheme, slash, _ = path.partition(":/")
    if slash and scheme in _FORMS:
        raise UsageError(
            f"A folder begins with {scheme}:/, which is what pathlib or os.path makes of a URL; give the URL as text, "
            f"such as {_FORMS[scheme]}."
        )


def check_url(url: str) -> None:
    """Raise UsageError unless ``url`` is that of a bucket, or a prefix in it, without credentials, port or query.

    The sentence shows it only if it cannot contain credentials.
    """
    scheme, _, bucket_and_prefix = url.partition("://")
    bucket = bucket_and_prefix.partition("/")[0]
    # A user name, a password or a key may stand before an @, after a ?, or in the place of the bucket.
    if "?" in url or "@" in bucket or (scheme.lower() in _FORMS and not re.fullmatch(r"[\w.-]*", bucket)):
        raise UsageError(
            "A URL must not contain credentials, a port or a query; write s3://bucket/prefix and set AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY, or use a profile; or write gs://bucket/prefix and set "
            "GOOGLE_APPLICATION_CREDENTIALS; or write az://container/prefix and set AZURE_STORAGE_ACCOUNT_NAME and "
            "AZURE_STORAGE_ACCOUNT_KEY."
        )
    form = _FORMS.get(scheme)
    if form is None:
        raise UsageError(f"A URL must start with s3://, gs:// or az://; give {URL_FORMS}, or a folder.")
    if not bucket:
        raise UsageError(f"{url!r} has no bucket; write {form}.")
    if "//" in bucket_and_prefix:
        raise UsageError(f"{url!r} contains two consecutive slashes; write {form} with single slashes.")
    if _NO_PREFIX.search(bucket_and_prefix):
        raise UsageError(
            f"{url!r} has . or .. as the name of a folder, or a control character, which cannot be used; "
            f"write {form} without."
        )


# Files of commands.


def read_input(name: str, option: str | None = None) -> bytes:
    """Return the content of a file or of an object in a bucket. ``option`` is the option that named it, if any.

    Raises StorageError, whose sentence names the option, if the file cannot be read.

    Example: ``read_input("labels.csv", "--labels")``
    """
    advice = f"check the path of {option}" if option else "check the path"
    try:
        if "://" not in name:
            return expanded_path(name).read_bytes()
        folder, path = _open_folder(name)
        return folder.get(path)
    except FileNotFoundError:
        raise StorageError(f"There is no file {name}; {advice}.") from None
    except IsADirectoryError:
        raise StorageError(f"{name} is a folder, but should be a file; {advice}.") from None
    except OSError as error:
        raise explain_os_error(error, name) from error


def check_output(output: str | None, suffixes: tuple[str, ...], option: str = "--output") -> None:
    """Raise UsageError unless ``output``, which ``option`` gives, has one of ``suffixes`` and can be written.

    Called before the work that makes its content, which would be lost. Of a URL, only the form is checked: no request
    is sent. None, if the option is not given, is right. Raises StorageError if the folder takes no files.
    """
    if output is None:
        return
    if not output.endswith(suffixes):
        raise UsageError(f"{option} is {output!r}; its name must end in {' or '.join(suffixes)}.")
    if "://" in output:
        _open_folder(output)  # checks the URL
        return
    path = Path(absolute_path(output))
    if not path.parent.is_dir():
        raise UsageError(f"{option} is {output!r}, but there is no folder {path.parent}; create it first.")
    if path.is_dir():
        raise UsageError(f"{option} is {output!r}, which is a folder; name a file in it, or another one beside it.")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except FileNotFoundError as error:
        raise _no_file_there(output) from error
    except OSError as error:
        raise explain_os_error(error, output) from error


def write_output(output: str, content: bytes) -> None:
    """Write or replace ``output``, a file or an object in a bucket, atomically. Raises StorageError if that fails."""
    folder, name = _open_folder(output)
    try:
        folder.put(name, content)
    except StorageError as error:
        # For a folder, the error says that there is no folder, which is wrong here. A bucket's says what is wrong.
        if folder.cloud is None and isinstance(error.__cause__, FileNotFoundError):
            raise _no_file_there(output) from error.__cause__
        raise


@contextmanager
def new_output(output: str) -> Generator[Path]:
    """Yield the path of a new file, which replaces ``output`` in a folder or a bucket once it has been written.

    Nobody sees a part of it, and after an exception the old one stays. Raises StorageError if it cannot be written::

        with new_output("s3://bucket/rows.parquet") as file:
            file.write_bytes(rows)
    """
    folder, name = _open_folder(output)
    try:
        with TemporaryFolder(folder.url if folder.cloud is None else None) as temporary:
            yield temporary / name
            folder.put_file(name, temporary / name)
    except FileNotFoundError as error:
        raise _no_file_there(output) from error
    except OSError as error:
        raise explain_os_error(error, output) from error


def _no_file_there(output: str) -> StorageError:
    """Return the error for an ``output`` in a folder that exists, but takes no files, such as /proc."""
    return StorageError(f"{output} cannot be written: no file can be made there; choose another place.")


def _open_folder(output: str) -> tuple[Store, str]:
    """Return the store of the folder of ``output``, and the name in it; raise UsageError if a URL has no bucket."""
    folder, slash, name = output.rpartition("/")
    # The folder keeps its slash: that of "/a.csv" is the root, "/", and in "s3://a.csv" the bucket is missing.
    return open_store(folder + slash or "."), name
