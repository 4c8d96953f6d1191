"""Credentials for S3, from the standard chain of AWS as boto3 walks it: variables, profiles, programs, roles.

Each step of the chain may be the user's or that of the machine: keys in variables or in a file, a program that prints
them (``credential_process``), a token of another service (web identity), a sign-in in the browser (SSO), or the role
that EC2, ECS or EKS give to a node. boto3 finds the first that is set and renews what expires. What is added here:
no request asks for the role of a machine that cannot have one, and sentences name the program or file at fault.
"""

# boto3 and botocore have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import os
import shlex
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timezone
from functools import lru_cache
from pathlib import Path
from typing import Any

from raytrain.errors import StorageError
from raytrain.storage.clouds.s3_sentences import DAMAGED_SIGN_IN, SENTENCES
from raytrain.storage.credentials import BucketCredentials, Credentials, CredentialSource

_EC2_MARKS = (
    ("/sys/class/dmi/id/sys_vendor", "amazon ec2"),  # Nitro
    ("/sys/hypervisor/uuid", "ec2"),  # Xen
)
"""Files that exist on EC2 instances, and how their content starts."""

_ROLE_VARIABLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_ROLES = ("assume-role-with-web-identity", "container-role", "iam-role")  # what boto3 calls credentials of roles


def resolve_credentials() -> Credentials | None:
    """Return this process's credentials from the standard AWS chain; None if no step of it has any.

    Raises botocore's exceptions if it is broken, and StorageError if a program or file that it names is.
    """
    with _source_named():
        credentials = _chain_credentials(aws_configuration())
        # Without the method refresh_needed, credentials do not renew themselves. They are looked up again each time,
        # because the file that they are read from may change.
        if not hasattr(credentials, "refresh_needed"):
            _chain_credentials.cache_clear()
        return _current_keys(credentials)


def credential_method() -> str:
    """Return boto3's name for the step of the chain that yields this process's credentials; empty if none does."""
    with _source_named():
        return getattr(aws_session().get_credentials(), "method", "")


def own_role() -> Credentials | None:
    """Return the credentials of this node's or container's role (EC2, ECS, EKS), unless the user has set others.

    Returns None at once if there can be no role: the metadata service is asked only on EC2, and never if
    AWS_EC2_METADATA_DISABLED is true. Raises the same as :func:`resolve_credentials` if a role yields no credentials.
    """
    # ECS and EKS set variables; otherwise only an EC2 instance can have a role.
    is_disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if os.environ.keys().isdisjoint(_ROLE_VARIABLES) and (is_disabled or not _is_on_ec2()):
        return None
    with _source_named():
        credentials = _chain_credentials(aws_configuration())
        return _current_keys(credentials) if credentials is not None and credentials.method in _ROLES else None


def own_role_or(fallback: CredentialSource) -> BucketCredentials | None:
    """Return the credentials of the role of this process's node; without a role, what ``fallback`` returns."""
    return own_role() or fallback()


@lru_cache(maxsize=1)
def _chain_credentials(_configuration: object) -> Any:
    """Return boto3's credentials, which renew themselves. ``_configuration`` is only the key of the cache."""
    return aws_session().get_credentials()


def _current_keys(credentials: Any) -> Credentials | None:
    """Return the keys that boto3's ``credentials`` have at present; None if there are none."""
    if credentials is None:
        return None
    keys = credentials.get_frozen_credentials()  # refreshes them first if they expire soon
    expires_at = getattr(credentials, "_expiry_time", None)  # boto3 has no public attribute for it
    # obstore accepts only the standard library's UTC, and botocore uses another.
    return Credentials(keys.access_key, keys.secret_key, keys.token, expires_at and expires_at.astimezone(timezone.utc))


def _is_on_ec2() -> bool:
    """Return True if this machine is an EC2 instance. It sends no request, which nobody would answer elsewhere."""
    for file, start in _EC2_MARKS:
        with suppress(OSError):
            if Path(file).read_text().lower().startswith(start):
                return True
    return "AWS_EC2_METADATA_SERVICE_ENDPOINT" in os.environ


def aws_configuration() -> tuple[frozenset[tuple[str, str]], float]:
    """Return the variables of AWS and the time of its configuration file, as a key of caches.

    Both may change while a process runs, for example in a notebook.
    """
    modified = 0.0
    with suppress(OSError):  # without a file, or if HOME is another user's, which boto3 ignores as well
        modified = os.stat(os.path.expanduser(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"))).st_mtime
    return frozenset(item for item in os.environ.items() if item[0].startswith("AWS_")), modified


def aws_session() -> Any:
    """Return a session of boto3, in the region of AWS_REGION if that is set: boto3 itself ignores this variable."""
    import boto3  # takes half a second, and folders do not need it

    return boto3.Session(region_name=os.environ.get("AWS_REGION"))


@contextmanager
def _source_named() -> Generator[None]:
    """Turn the exception of a source of credentials into a StorageError that names the program or file at fault.

    For a program that cannot be started, a missing token or a damaged cache, botocore raises whatever its code runs
    into, such as FileNotFoundError, JSONDecodeError or KeyError. The caller would take that for an error of the bucket.
    """
    from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, ParamValidationError

    try:
        yield
    except Exception as error:
        if isinstance(error, ClientError):  # AWS STS refuses a role, for example
            # The code may have a sentence of its own. That of AccessDenied is about objects in S3, and not about roles.
            code = error.response.get("Error", {}).get("Code", "")
            if code in SENTENCES.by_code and code != "AccessDenied":
                raise
            raise StorageError(SENTENCES.not_obtained.format(detail=_first_line(str(error)))) from error
        if isinstance(error, CredentialRetrievalError) and error.kwargs.get("provider") == "custom-process":
            reason = error.kwargs["error_msg"]
        elif isinstance(error, BotoCoreError) and not isinstance(error, ParamValidationError):  # that is an empty token
            raise
        else:
            reason = (error.strerror or str(error)) if isinstance(error, OSError) else ""
        raise _failure_of_source(error, _first_line(reason)) from error


def _failure_of_source(error: Exception, reason: str) -> StorageError:
    """Return the error that names the file or program that is the source of the credentials, for a ``reason``.

    If the exception gives no reason, the first source that is configured is taken to be at fault, in the order in which
    botocore asks them: token, sign-in, program.
    """
    settings = _settings_of_profile()
    program = settings.get("credential_process", "")
    with suppress(ValueError, IndexError):
        program = shlex.split(program)[0]  # its arguments may be secret
    variable = "AWS_WEB_IDENTITY_TOKEN_FILE"
    setting = variable if os.environ.get(variable) else "web_identity_token_file"
    token_file = os.environ.get(variable) or settings.get(setting)

    if token_file and (getattr(error, "filename", None) == token_file or not reason):
        detail = f"{setting} {token_file}: {reason or 'it contains no token'}"
    elif not reason and not settings.keys().isdisjoint(("sso_start_url", "sso_session")):
        return StorageError(DAMAGED_SIGN_IN)
    elif program:
        detail = f"credential_process {program}: {reason or 'it does not print keys as JSON'}"
    else:
        detail = reason or _first_line(f"{type(error).__name__}: {error}")
    return StorageError(SENTENCES.not_obtained.format(detail=detail))


def _first_line(text: str) -> str:
    """Return the first line of a text, without its full stop."""
    return text.strip().partition("\n")[0].rstrip(".")


def _settings_of_profile() -> dict[str, str]:
    """Return the settings of the profile and of its source profiles; those of the first one take precedence."""
    from botocore.session import Session

    session = Session()
    profiles: dict[str, dict[str, str]] = session.full_config.get("profiles", {})
    settings: dict[str, str] = {}
    name, names = session.get_config_variable("profile") or "default", set[str]()
    while name in profiles and name not in names:
        names.add(name)
        settings = {**profiles[name], **settings}
        name = profiles[name].get("source_profile", "")
    return settings
