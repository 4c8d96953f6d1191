"""Where the keys to S3 come from, and how they travel: held in memory, never printed, never pickled."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, repr=False)
class Credentials:
    """One set of AWS keys. Its text shows the last four characters of the key's name and no secret.

    It refuses to be pickled, so that it cannot slip into a file, a task's arguments or an object store. Whoever has
    to send it to another process says so: ``Credentials(*dataclasses.astuple(credentials))`` is the way there and back.
    """

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None
    expires_at: datetime | None = None
    """When they expire, with a time zone; None where they do not or nobody knows."""

    @property
    def identity(self) -> str:
        """What may be shown of them: ``…`` and the last four characters of the access key's name."""
        return f"…{self.access_key_id[-4:]}"

    def __repr__(self) -> str:
        return f"Credentials({self.identity}, expires_at={self.expires_at})"

    def __reduce__(self) -> Any:
        raise TypeError("Credentials are not pickled; send a credential source instead.")


class CredentialSource(Protocol):
    """Gives credentials that are valid now, or None where it has none. Asked again shortly before they expire.

    A source that is given to a store is pickled with it, so that it must itself hold no secret.
    """

    def __call__(self) -> Credentials | None: ...


def resolve() -> Credentials | None:
    """This process's own credentials by the standard AWS chain: environment, profile, single sign-on, role, node.

    Raises botocore's exceptions where the configuration is broken (an unknown profile, say) or a role is refused;
    :func:`raytrain.storage.errors.explain` makes a sentence of them.
    """
    found = _chain(_aws_environment())
    if not hasattr(found, "refresh_needed"):
        _chain.cache_clear()  # plain keys are read anew each time: their file may have been rewritten since
    return _frozen(found)


def own_role() -> Credentials | None:
    """The role that this node or container was given (EC2, ECS, EKS), and nothing that a person configured.

    Answers at once where there can be none: the metadata service is asked on EC2 only, and not where
    AWS_EC2_METADATA_DISABLED is true. Raises botocore's exceptions where the role exists and cannot be taken.
    """
    return _frozen(_role(_aws_environment()))


@dataclass(frozen=True)
class NodeOrServed:
    """A picklable source: the role of the node on which it is asked, else what ``served`` gives (the driver's)."""

    served: CredentialSource

    def __call__(self) -> Credentials | None:
        return own_role() or self.served()


@lru_cache(maxsize=1)
def _chain(environment: frozenset[tuple[str, str]]) -> Any:
    return _session().get_credentials()


@lru_cache(maxsize=1)
def _role(environment: frozenset[tuple[str, str]]) -> Any:
    methods = [method for method, may_apply in _ROLES.items() if may_apply()]
    if not methods:
        return None
    chain = _session().get_component("credential_provider")
    found: Any = None
    for method in methods:
        found = found or chain.get_provider(method).load()
    return found


def _session() -> Any:
    import botocore.session  # pyright: ignore[reportMissingTypeStubs] ; takes 0.4 s, and folders need none

    return botocore.session.Session()


def _aws_environment() -> frozenset[tuple[str, str]]:
    """What the answers above depend on, as the key of their caches: a notebook may change it between two runs."""
    return frozenset(item for item in os.environ.items() if item[0].startswith("AWS_"))


def _frozen(found: Any) -> Credentials | None:
    if found is None:
        return None
    keys = found.get_frozen_credentials()  # refreshes them first where botocore finds it due
    expires_at = getattr(found, "_expiry_time", None)  # botocore tells it nowhere else
    # obstore takes the one UTC of the standard library, and botocore has another.
    return Credentials(keys.access_key, keys.secret_key, keys.token, expires_at and expires_at.astimezone(timezone.utc))


def _has_web_identity() -> bool:
    return "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ and "AWS_ROLE_ARN" in os.environ


def _has_container_role() -> bool:
    return any(f"AWS_CONTAINER_CREDENTIALS_{kind}_URI" in os.environ for kind in ("RELATIVE", "FULL"))


def _is_ec2() -> bool:
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    return "AWS_EC2_METADATA_SERVICE_ENDPOINT" in os.environ or any(_starts(*mark) for mark in _EC2_MARKS)


def _starts(path: str, beginning: str) -> bool:
    try:
        return Path(path).read_text().lower().startswith(beginning)
    except OSError:
        return False


_EC2_MARKS = (("/sys/class/dmi/id/sys_vendor", "amazon ec2"), ("/sys/hypervisor/uuid", "ec2"))  # Nitro, and Xen before it

_ROLES: dict[str, Callable[[], bool]] = {
    "assume-role-with-web-identity": _has_web_identity,
    "container-role": _has_container_role,
    "iam-role": _is_ec2,
}
