"""S3: endpoint and region from this process's AWS configuration, and how obstore wants them."""

# botocore has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from raytrain.storage.base import BucketSettings, S3Settings
from raytrain.storage.cloud import Cloud, checked_endpoint
from raytrain.storage.credentials import Credentials, resolve
from raytrain.storage.error_sentences import explain

if TYPE_CHECKING:
    from obstore.store import S3Store


class S3(Cloud):
    """Amazon's S3, and other servers that speak its protocol."""

    def settings(self, url: str) -> S3Settings:
        return resolve_settings(url)

    def credentials(self) -> Credentials | None:
        return resolve()

    def store_class(self) -> type[S3Store]:
        from obstore.store import S3Store

        return S3Store

    def config(self, settings: BucketSettings) -> dict[str, Any]:
        assert isinstance(settings, S3Settings)
        config: dict[str, Any] = {"region": settings.region or "us-east-1", "virtual_hosted_style_request": False}
        return config | ({"endpoint": settings.endpoint_url} if settings.endpoint_url else {})


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
    endpoint_url: str | None = next(filter(None, (*environment, *configured)), None)
    if endpoint_url is not None:
        checked_endpoint(endpoint_url, "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    return S3Settings(endpoint_url, region)
