"""Endpoint and region of S3, from this process's AWS configuration."""

# botocore has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import re

from raytrain.errors import UsageError
from raytrain.storage.base import S3Settings
from raytrain.storage.error_sentences import explain


def resolve_settings(url: str) -> S3Settings:
    """Return endpoint and region from this process's AWS configuration: the environment, then the profile."""
    import botocore.session  # pyright: ignore[reportMissingTypeStubs]
    from botocore.exceptions import BotoCoreError  # pyright: ignore[reportMissingTypeStubs]

    session = botocore.session.Session()
    try:
        profile = session.get_scoped_config()
        services = session.full_config.get("services", {}).get(profile.get("services"), {})
        configured = (services.get("s3", {}).get("endpoint_url"), profile.get("endpoint_url"))
        region = os.environ.get("AWS_REGION") or session.get_config_variable("region")
    except BotoCoreError as error:
        raise explain(error, url) from error
    environment = (os.environ.get("AWS_ENDPOINT_URL_S3"), os.environ.get("AWS_ENDPOINT_URL"))
    return S3Settings(_checked_endpoint(next(filter(None, (*environment, *configured)), None)), region)


def _checked_endpoint(endpoint_url: str | None) -> str | None:
    if endpoint_url is not None and ("@" in endpoint_url or "?" in endpoint_url):  # not shown: it may be secret
        raise UsageError(
            "AWS_ENDPOINT_URL must look like https://host or http://host:port, without a user name, a password or a "
            "query; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY instead."
        )
    if endpoint_url is not None and not re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./-]*)?", endpoint_url):
        raise UsageError(f"AWS_ENDPOINT_URL is {endpoint_url!r}; it must look like https://host or http://host:port.")
    return endpoint_url
