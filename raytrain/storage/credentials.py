"""AWS credentials and their sources. Credentials are held in memory, never printed, never pickled."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

_ASK_EVERY_S = 60.0

CredentialFields = tuple[str, str, "str | None", "datetime | None"]
"""The fields of :class:`Credentials` in order, as they are sent to another process."""


@dataclass(frozen=True, repr=False)
class Credentials:
    """One set of AWS credentials. Its text shows the last four characters of the access key ID, and no secret.

    It cannot be pickled, so that it does not end up in a file, in a task's arguments or in Ray's object store by
    accident. To send it to another process on purpose, send :meth:`fields`; ``Credentials(*fields)`` restores it.
    """

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None
    expires_at: datetime | None = None
    """When they expire, with a time zone; None if they do not, or if that is unknown."""

    @property
    def identity(self) -> str:
        """What may be shown: ``…`` and the last four characters of the access key ID."""
        return f"…{self.access_key_id[-4:]}"

    def fields(self) -> CredentialFields:
        """Return all fields, the secret ones too."""
        return astuple(self)

    def __repr__(self) -> str:
        return f"Credentials({self.identity}, expires_at={self.expires_at})"

    def __reduce__(self) -> Any:
        raise TypeError("Credentials cannot be pickled; send a credential source instead.")


class CredentialSource(Protocol):
    """Returns credentials that are valid now, or None if it has none. Called again shortly before they expire.

    A store's source is pickled with the store, so it must not contain a secret itself.
    """

    def __call__(self) -> Credentials | None: ...


def resolve() -> Credentials | None:
    """Return this process's credentials from the standard AWS chain: environment, profile, single sign-on, role.

    Raises botocore's exceptions if the configuration is broken (an unknown profile, for example) or a role is refused;
    :func:`raytrain.storage.error_sentences.explain` turns them into a sentence.
    """
    found = _chain(_aws_environment())
    if not hasattr(found, "refresh_needed"):
        _chain.cache_clear()  # static credentials are read again each time, because their file may have been rewritten
    return _frozen(found)


def required(credentials: Credentials | None) -> Credentials:
    """Return ``credentials``; raises botocore's NoCredentialsError if there are none."""
    if credentials is None:
        from botocore.exceptions import NoCredentialsError  # pyright: ignore[reportMissingTypeStubs]

        raise NoCredentialsError
    return credentials


def ask_again_after_s(credentials: Credentials | None) -> float:
    """Seconds after which whoever keeps ``credentials`` should ask their source again: a minute, or a third of the
    time until they expire.

    They may have changed before they expire: a credentials file can be rewritten at any time.
    """
    if credentials is None or credentials.expires_at is None:
        return _ASK_EVERY_S
    remaining_s = (credentials.expires_at - datetime.now(timezone.utc)).total_seconds()
    return min(_ASK_EVERY_S, remaining_s / 3)


def own_role() -> Credentials | None:
    """Return the credentials of the role that this node or container has (EC2, ECS, EKS).

    Ignores what a user configured. Returns at once if there can be no role: the metadata service is asked only on EC2,
    and never if AWS_EC2_METADATA_DISABLED is true. Raises botocore's exceptions if a role gives no credentials.
    """
    return _frozen(_role(_aws_environment()))


@dataclass(frozen=True)
class OwnRoleOr:
    """A source that can be pickled: the role of the node where it is called, or ``fallback`` if there is none."""

    fallback: CredentialSource

    def __call__(self) -> Credentials | None:
        return own_role() or self.fallback()


@lru_cache(maxsize=1)
def _chain(environment: frozenset[tuple[str, str]]) -> Any:
    return _session().get_credentials()


@lru_cache(maxsize=1)
def _role(environment: frozenset[tuple[str, str]]) -> Any:
    providers = [provider for provider, may_apply in _ROLE_PROVIDERS.items() if may_apply()]
    if not providers:
        return None
    chain = _session().get_component("credential_provider")
    found: Any = None
    for provider in providers:
        found = found or chain.get_provider(provider).load()
    return found


def _session() -> Any:
    import botocore.session  # pyright: ignore[reportMissingTypeStubs] ; takes 0.4 s, and folders do not need it

    return botocore.session.Session()


def _aws_environment() -> frozenset[tuple[str, str]]:
    """Return the key of the caches: the variables that select credentials. A notebook may change them between runs."""
    return frozenset(item for item in os.environ.items() if item[0].startswith("AWS_"))


def _frozen(found: Any) -> Credentials | None:
    if found is None:
        return None
    keys = found.get_frozen_credentials()  # refreshes them first if they expire soon
    expires_at = getattr(found, "_expiry_time", None)  # botocore has no public attribute for it
    # obstore accepts only the standard library's UTC, and botocore uses another.
    return Credentials(keys.access_key, keys.secret_key, keys.token, expires_at and expires_at.astimezone(timezone.utc))


def _has_web_identity() -> bool:
    return "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ and "AWS_ROLE_ARN" in os.environ


def _has_container_role() -> bool:
    return any(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI" in os.environ for kind in ("RELATIVE", "FULL"))


def _is_ec2() -> bool:
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    return "AWS_EC2_METADATA_SERVICE_ENDPOINT" in os.environ or any(_starts_with(*mark) for mark in _EC2_MARKS)


def _starts_with(path: str, prefix: str) -> bool:
    try:
        return Path(path).read_text().lower().startswith(prefix)
    except OSError:
        return False


_EC2_MARKS = (
    ("/sys/class/dmi/id/sys_vendor", "amazon ec2"),  # Nitro
    ("/sys/hypervisor/uuid", "ec2"),  # Xen
)
"""Files that exist on EC2 instances, and how their content starts."""

_ROLE_PROVIDERS: dict[str, Callable[[], bool]] = {
    "assume-role-with-web-identity": _has_web_identity,
    "container-role": _has_container_role,
    "iam-role": _is_ec2,
}
"""botocore's credential providers for roles, each with whether it may have credentials here."""
