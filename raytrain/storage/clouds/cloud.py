"""A cloud: how its buckets are reached, with whose credentials, and what its answers mean."""

from __future__ import annotations

import ipaddress
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

from raytrain.errors import UsageError
from raytrain.storage.credentials import BucketCredentials, CredentialSource, LentCredentials

UNREACHABLE = "{endpoint} cannot be reached, or does not answer in time; check {endpoint_variable} and the network."
UNTRUSTED = (
    "The certificate of {endpoint} cannot be trusted; "
    "set {certificates_variable} to the file with the certificate of its authority."
)


@dataclass(frozen=True)
class CloudSentences:
    """Words of a cloud, and error sentences with places for ``{endpoint}``, ``{bucket}``, ``{url}``, ``{identity}``."""

    endpoint: str  # name of the cloud, if no endpoint is configured
    protocol: str  # name of the protocol of its servers
    endpoint_variable: str
    host_variables: str  # the environment variables that the name of its host depends on
    certificates_variable: str  # the environment variable that names the file with certificates to trust
    any_identity: str  # the text for ``{identity}`` if it is not known
    no_credentials: str
    not_obtained: str  # has a place for the reason, ``{detail}``, too
    refuses_credentials: str
    no_permission: str
    by_code: Mapping[str, str] = field(default_factory=dict[str, str])  # sentences by the cloud's error codes


def is_loopback(url: str | None) -> bool:
    """Return True if the server of a URL is on this machine, so that no proxy can reach it."""
    return is_loopback_host(urlsplit(url or "").hostname or "")


def is_loopback_host(host: str) -> bool:
    """Return whether ``host`` is ``localhost`` or a loopback address, such as ``[::1]``."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    return host == "localhost"


class Cloud(ABC):
    """A cloud, as the process that opened a store was configured to reach it. Can be pickled; contains no secret."""

    name: ClassVar[str]  # the scheme of its URLs: ``s3``, ``az`` or ``gs``
    sentences: ClassVar[CloudSentences]
    endpoint_url: str | None  # None: the cloud's own endpoint

    @classmethod
    @abstractmethod
    def configured(cls, url: str) -> Cloud:
        """Return the cloud of ``url`` as the environment configures it.

        Raises UsageError or StorageError if the configuration is broken.
        """

    @abstractmethod
    def credentials(self) -> BucketCredentials | None:
        """Return valid credentials of this process; None if it has none. Raises the exceptions of its libraries."""

    def credentials_from(self, lent: LentCredentials) -> CredentialSource:
        """Return the credential source for a store in a process to which ``lent`` lends credentials."""
        return partial(lent, self.name)

    @abstractmethod
    def obstore_config(self, bucket: str) -> Any:
        """Return the options with which obstore reaches ``bucket``, without credentials."""

    def sentence_and_detail(self, error: BaseException) -> tuple[str, str] | None:
        """Return the sentence and its ``{detail}`` for an error of the cloud's own library; None for other errors."""
        return None


def check_endpoint(endpoint_url: str, variable: str, key_variables: str) -> None:
    """Raise UsageError if the URL in ``variable`` is malformed, or contains keys, for which ``key_variables`` exist.

    A URL that may contain keys is not shown.
    """
    if "@" in endpoint_url or "?" in endpoint_url:
        raise UsageError(
            f"{variable} must look like https://host or http://host:port, without a user name, a password or a "
            f"query; set {key_variables} instead."
        )
    is_url = re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", endpoint_url) is not None
    try:
        address = urlsplit(endpoint_url)
        has_address = address.hostname is not None and address.port != 0
    except ValueError:  # the port is no number, or too large
        has_address = False
    if not (is_url and has_address):  # obstore panics without a host, or with such a port
        raise UsageError(f"{variable} is {endpoint_url!r}; it must look like https://host or http://host:port.")
