"""S3: its endpoint and region, from the AWS configuration through boto3, and requests that obstore cannot make."""

# boto3 and botocore have no types, and obstore's refer to arro3, which is not installed.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raytrain.errors import StorageError
from raytrain.storage.clouds.cloud import Cloud, check_endpoint, is_loopback
from raytrain.storage.clouds.s3_credentials import aws_configuration, aws_session, own_role_or, resolve_credentials
from raytrain.storage.clouds.s3_sentences import (
    BAD_CONFIGURATION,
    BREAKS_OFF,
    KMS,
    SENTENCES,
    botocore_sentence,
    detail_of,
)
from raytrain.storage.credentials import Credentials, CredentialSource, LentCredentials

if TYPE_CHECKING:
    from obstore import ObjectMeta

_KEY_VARIABLES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_OBSTORES_OWN = re.compile(r"https://s3([.-][a-z0-9-]+)?\.amazonaws\.com")  # it knows no other, such as China's


@dataclass(frozen=True)
class S3(Cloud):
    """Amazon's S3, and other servers that speak its protocol."""

    name = "s3"
    sentences = SENTENCES
    endpoint_url: str | None = None
    region: str | None = None  # None stands for us-east-1
    virtual_hosted: bool = False  # the name of the bucket is a part of the host's name
    unsigned: bool = False  # requests have no signature: AWS_SKIP_SIGNATURE, for public buckets
    requester_pays: bool = False

    @classmethod
    def configured(cls, url: str) -> S3:
        # boto3 takes the endpoint from a variable or from the AWS configuration. The error names the one at fault.
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if value := os.environ.get(variable):
                check_endpoint(value, variable, _KEY_VARIABLES)
        cloud = _configured(aws_configuration())
        if cloud.endpoint_url is not None:
            check_endpoint(cloud.endpoint_url, "endpoint_url", _KEY_VARIABLES)
        return cloud

    def credentials(self) -> Credentials | None:
        return None if self.unsigned else resolve_credentials()

    def credentials_from(self, lent: LentCredentials) -> CredentialSource:
        """See :meth:`Cloud.credentials_from`. In Amazon's S3, a node that has a role of its own uses that."""
        source = super().credentials_from(lent)
        return partial(own_role_or, source) if self.is_amazon and not self.unsigned else source

    @property
    def is_amazon(self) -> bool:
        """True if it is Amazon's own S3; no other server accepts the role of a node."""
        return self.endpoint_url is None or self.endpoint_url.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def obstore_config(self, bucket: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "region": self.region or "us-east-1",
            "virtual_hosted_style_request": self.virtual_hosted,
            "skip_signature": self.unsigned,
            "request_payer": self.requester_pays,
        }
        if self.endpoint_url is None:
            return config
        # For virtual-hosted requests, obstore wants the bucket in the endpoint: https://bucket.host.
        before_host = f"://{bucket}." if self.virtual_hosted else "://"
        return config | {"endpoint": self.endpoint_url.replace("://", before_host, 1)}

    def sentence_and_detail(self, error: BaseException) -> tuple[str, str] | None:
        return (KMS, "") if "perform: kms:" in str(error) else botocore_sentence(error)

    def list_any_names(self, bucket: str, prefix: str, keys: Credentials | None) -> Iterator[ObjectMeta]:
        """Iterate over all objects whose names start with ``prefix``, even names that no path can have, as ``a//b``.

        For a folder with one such name, obstore returns nothing, and boto3 everything. Raises botocore's exceptions,
        and StorageError as :meth:`list_pages` does.
        """
        for page in self.list_pages(bucket, prefix, keys):
            for entry in page.get("Contents", []):
                yield {
                    "path": entry["Key"],
                    "size": entry["Size"],
                    "e_tag": entry.get("ETag"),
                    "last_modified": entry["LastModified"],
                    "version": None,
                }

    def list_pages(
        self,
        bucket: str,
        prefix: str,
        keys: Credentials | None,
        delimiter: str = "",
        max_attempts: int = 5,
        read_timeout_s: float = 30.0,
    ) -> Iterator[dict[str, Any]]:
        """Iterate over the pages of a listing; raise StorageError if the server does not say how to get the next one.

        For such a server, obstore and boto3's paginator would return the first page as if it were the whole listing, or
        the same page for ever. Raises botocore's exceptions.

        With the ``delimiter`` "/", the pages have the folders directly below ``prefix`` in place of what is in them. A
        request is sent at most ``max_attempts`` times.
        """
        client = self._client(keys, max_attempts, read_timeout_s)
        query: dict[str, str] = {"Bucket": bucket, "Prefix": prefix}
        query |= {"RequestPayer": "requester"} if self.requester_pays else {}
        query |= {"Delimiter": delimiter} if delimiter else {}
        first_names: set[str] = set()  # of each page
        num_names = 0

        # Ask for page after page. The first name of each page is new, unless the server sends a page twice.
        while True:
            page: dict[str, Any] = client.list_objects_v2(**query)
            names = [entry["Key"] for entry in page.get("Contents", [])]
            names += [folder["Prefix"] for folder in page.get("CommonPrefixes", [])]
            token: str = page.get("NextContinuationToken", "")
            fault = ""
            is_repeated = not first_names.isdisjoint(names[:1])
            if is_repeated:
                fault = "the same page again for its NextContinuationToken"
            else:
                yield page
                if not page.get("IsTruncated"):
                    return
                num_names += len(names)
                if not token or token == query.get("ContinuationToken"):
                    fault = "no NextContinuationToken" if not token else "the same NextContinuationToken again"
            if fault:
                endpoint, url = self.endpoint_url or SENTENCES.endpoint, f"s3://{bucket}/{prefix}".rstrip("/")
                raise StorageError(BREAKS_OFF.format(endpoint=endpoint, url=url, number=f"{num_names:,}", fault=fault))
            first_names.update(names[:1])
            query["ContinuationToken"] = token

    def abort_uploads(
        self, bucket: str, prefix: str, keys: Credentials | None, should_abort: Callable[[str], bool]
    ) -> None:
        """Abort the multipart uploads of objects below ``prefix`` whose names ``should_abort`` accepts.

        The parts of an abandoned upload are in no listing of objects, but must be paid for. Raises botocore's
        exceptions.
        """
        client = self._client(keys, max_attempts=2)
        payer = {"RequestPayer": "requester"} if self.requester_pays else {}
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix, **payer)
        # List all uploads before the first is aborted: the request for the next page names the last upload of this one.
        uploads = [upload for page in pages for upload in page.get("Uploads", []) if should_abort(upload["Key"])]
        for upload in uploads:
            client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"], **payer)

    def _client(self, keys: Credentials | None, max_attempts: int, read_timeout_s: float = 30.0) -> Any:
        """Return a client of boto3, for requests that obstore cannot make."""
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        signature = {"signature_version": UNSIGNED} if self.unsigned else {}
        return boto3.Session().client(
            "s3",
            self.region or "us-east-1",
            endpoint_url=self.endpoint_url,
            config=Config(
                **self.boto_config(),
                **signature,
                retries={"mode": "standard", "total_max_attempts": max_attempts},
                connect_timeout=5,
                read_timeout=read_timeout_s,
            ),
            **(keys.for_boto3() if keys else {}),
        )

    def boto_config(self) -> dict[str, Any]:
        """Return the settings of this S3 as options of botocore's Config."""
        config: dict[str, Any] = {"s3": {"addressing_style": "virtual" if self.virtual_hosted else "path"}}
        if is_loopback(self.endpoint_url):
            config["proxies"] = {}  # otherwise botocore takes the environment's proxy, which cannot reach this machine
        return config


@lru_cache(maxsize=4)
def _configured(_configuration: object) -> S3:
    """Return S3 as boto3 finds it configured in this process.

    ``_configuration`` is only the key of the cache: whenever it differs, boto3 is asked again. Raises StorageError if
    the configuration is broken.
    """
    from botocore.exceptions import BotoCoreError

    try:
        # This sends no request: a client is the only way to learn what boto3 has found in the configuration.
        session = aws_session()
        meta = session.client("s3", aws_access_key_id="none", aws_secret_access_key="none").meta
    except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is no URL
        sentence, detail = botocore_sentence(error) or (BAD_CONFIGURATION, detail_of(error))
        raise StorageError(sentence.format(url="S3", detail=detail)) from error
    # The name of a bucket cannot stand before a host that is an IP address.
    is_address = False
    with suppress(ValueError):
        is_address = bool(ipaddress.ip_address(urlsplit(meta.endpoint_url).hostname or ""))
    return S3(
        endpoint_url=None if _OBSTORES_OWN.fullmatch(meta.endpoint_url) else meta.endpoint_url,
        region=session.region_name,
        virtual_hosted=(meta.config.s3 or {}).get("addressing_style") == "virtual" and not is_address,
        unsigned=os.environ.get("AWS_SKIP_SIGNATURE", "").lower() == "true",
        requester_pays=os.environ.get("AWS_REQUEST_PAYER", "").lower() in ("requester", "true"),
    )
