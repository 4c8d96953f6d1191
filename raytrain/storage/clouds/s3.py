"""S3: endpoint, region and credentials from the AWS configuration through boto3, and the meaning of S3's answers."""

# boto3 and botocore have no types, and obstore's refer to arro3, which is not installed.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timezone
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raytrain.errors import StorageError
from raytrain.storage.clouds.cloud import UNREACHABLE, UNTRUSTED, Cloud, CloudSentences, check_endpoint, is_loopback
from raytrain.storage.credentials import BucketCredentials, Credentials, CredentialSource, LentCredentials

if TYPE_CHECKING:
    from obstore import ObjectMeta

_KEY_VARIABLES = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_AMAZON = re.compile(r"https://s3([.-][a-z0-9-]+)?\.amazonaws\.com(\.cn)?")

_EXPIRED = (
    "The session of the access key {identity} has expired; sign in to AWS again (for example: aws sso login) "
    "and repeat the command."
)
_BAD_TOKEN = (
    "The session token does not belong to the access key {identity}; sign in to AWS again, or remove AWS_SESSION_TOKEN."
)
_NO_PERMISSION = (
    "The access key {identity} has no permission for {url}; "
    "grant it s3:ListBucket and s3:GetObject, and to write also s3:PutObject; "
    "if the bucket lets whoever asks pay, set AWS_REQUEST_PAYER=requester."
)
_KMS = "S3 cannot use the KMS key that encrypts {url}; enable that key, and grant kms:Decrypt and kms:GenerateDataKey."
_BAD_CONFIGURATION = "The AWS configuration is broken ({detail}); check ~/.aws/config."
_BREAKS_OFF = (
    "{endpoint} breaks off its listing of {url} after {number} names, which are not all: it sends IsTruncated=true and "
    "{fault}; update that server, or copy the objects to another one."
)
_SIGNED_OUT = "The AWS sign-in has expired; sign in again (for example: aws sso login) and repeat the command."

_DAMAGED_SIGN_IN = (
    "The AWS sign-in that is kept below ~/.aws/sso/cache cannot be read; sign in again (for example: aws sso login) "
    "and repeat the command."
)

_SENTENCES = CloudSentences(
    endpoint="Amazon S3",
    protocol="S3",
    endpoint_variable="AWS_ENDPOINT_URL",
    host_variables="AWS_ENDPOINT_URL, AWS_REGION",
    certificates_variable="AWS_CA_BUNDLE",
    any_identity="in use",
    no_credentials=(
        "There are no AWS credentials for {url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
        "or give the node a role, or set AWS_SKIP_SIGNATURE=true if the bucket is public."
    ),
    not_obtained=(
        "The credentials of this machine's AWS configuration could not be obtained ({detail}); "
        "check its role or profile."
    ),
    refuses_credentials=_NO_PERMISSION,
    no_permission=_NO_PERMISSION,
    by_code={
        "InvalidAccessKeyId": (
            "{endpoint} does not know the access key {identity}; "
            "check AWS_ACCESS_KEY_ID, or the profile that AWS_PROFILE names."
        ),
        "SignatureDoesNotMatch": (
            "The secret key does not belong to the access key {identity}; "
            "check AWS_SECRET_ACCESS_KEY, or the profile that AWS_PROFILE names."
        ),
        **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"), _EXPIRED),
        **dict.fromkeys(("InvalidToken", "InvalidClientTokenId"), _BAD_TOKEN),
        **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AccountProblem"), _NO_PERMISSION),
        "InvalidObjectState": "{url} is archived (S3 Glacier); restore it (aws s3api restore-object), or leave it out.",
        "SecondLevelDomainForbidden": (
            "{endpoint} wants the bucket's name in the host's; write addressing_style = virtual below s3 = in "
            "~/.aws/config, and name the endpoint by its host and not by an IP address."
        ),
        **dict.fromkeys(("KMS.DisabledException", "KMS.NotFoundException", "KMS.KMSInvalidStateException"), _KMS),
    },
)


@dataclass(frozen=True)
class S3(Cloud):
    """Amazon's S3, and other servers that speak its protocol."""

    name = "s3"
    sentences = _SENTENCES
    endpoint_url: str | None = None
    region: str | None = None  # None means us-east-1
    virtual_hosted: bool = False  # whether the bucket is a part of the host's name
    unsigned: bool = False  # whether requests show no credentials, as AWS_SKIP_SIGNATURE wants it for public buckets
    requester_pays: bool = False

    @classmethod
    def configured(cls, url: str) -> S3:
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            if value := os.environ.get(variable):
                check_endpoint(value, variable, _KEY_VARIABLES)
        cloud = _configured(_aws_configuration())
        if cloud.endpoint_url is not None:
            check_endpoint(cloud.endpoint_url, "endpoint_url", _KEY_VARIABLES)
        return cloud

    def credentials(self) -> Credentials | None:
        return None if self.unsigned else resolve_credentials()

    def credentials_from(self, lent: LentCredentials) -> CredentialSource:
        source = super().credentials_from(lent)
        return partial(own_role_or, source) if self.is_amazon and not self.unsigned else source

    @property
    def is_amazon(self) -> bool:
        """Return whether it is Amazon's own: no other server accepts the role of a node."""
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
        # For virtual-hosted requests, obstore wants the bucket in the endpoint.
        host = f"://{bucket}." if self.virtual_hosted else "://"
        return config | {"endpoint": self.endpoint_url.replace("://", host, 1)}

    def sentence_and_detail(self, error: BaseException) -> tuple[str, str] | None:
        return (_KMS, "") if "perform: kms:" in str(error) else _botocore_sentence(error)

    def list_any_names(self, bucket: str, prefix: str, keys: Credentials | None) -> Iterator[ObjectMeta]:
        """Iterate over the objects whose names start with ``prefix``, whatever these names are.

        obstore returns nothing of a folder that contains names which cannot be used; boto3 returns everything.
        Raises botocore's exceptions, and StorageError as :meth:`list_pages` does.
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
        self, bucket: str, prefix: str, keys: Credentials | None, delimiter: str = "", max_attempts: int = 5
    ) -> Iterator[dict[str, Any]]:
        """Iterate over the pages of a listing; raise StorageError if the server does not say how it goes on after one.

        Of such a server, obstore and boto3's paginator return the first page as if it was all, or the same page for
        ever. Raises botocore's exceptions.
        """
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        signature = {"signature_version": UNSIGNED} if self.unsigned else {}
        client = boto3.Session().client(
            "s3",
            self.region or "us-east-1",
            endpoint_url=self.endpoint_url,
            config=Config(
                **self.boto_config(),
                **signature,
                retries={"mode": "standard", "total_max_attempts": max_attempts},
                connect_timeout=5,
                read_timeout=30,
            ),
            **(keys.for_boto3() if keys else {}),
        )
        query: dict[str, str] = {"Bucket": bucket, "Prefix": prefix}
        query |= {"RequestPayer": "requester"} if self.requester_pays else {}
        query |= {"Delimiter": delimiter} if delimiter else {}
        first_names: set[str] = set()  # of each page
        num_names = 0
        while True:
            page: dict[str, Any] = client.list_objects_v2(**query)
            names = [entry["Key"] for entry in page.get("Contents", [])]
            names += [folder["Prefix"] for folder in page.get("CommonPrefixes", [])]
            token: str = page.get("NextContinuationToken", "")
            fault = ""
            if not first_names.isdisjoint(names[:1]):
                fault = "the same page again for its NextContinuationToken"
            else:
                yield page
                if not page.get("IsTruncated"):
                    return
                num_names += len(names)
                if not token or token == query.get("ContinuationToken"):
                    fault = "no NextContinuationToken" if not token else "the same NextContinuationToken again"
            if fault:
                endpoint, url = self.endpoint_url or _SENTENCES.endpoint, f"s3://{bucket}/{prefix}".rstrip("/")
                raise StorageError(_BREAKS_OFF.format(endpoint=endpoint, url=url, number=f"{num_names:,}", fault=fault))
            first_names.update(names[:1])
            query["ContinuationToken"] = token

    def boto_config(self) -> dict[str, Any]:
        """Return the same settings as options of botocore's Config."""
        config: dict[str, Any] = {"s3": {"addressing_style": "virtual" if self.virtual_hosted else "path"}}
        return config | ({"proxies": {}} if is_loopback(self.endpoint_url) else {})


# The configuration.


def _aws_configuration() -> tuple[frozenset[tuple[str, str]], float]:
    """Return the variables of AWS and the time of the configuration file: both may change in a notebook."""
    file = Path(os.environ.get("AWS_CONFIG_FILE", "~/.aws/config")).expanduser()
    modified = file.stat().st_mtime if file.exists() else 0.0
    return frozenset(item for item in os.environ.items() if item[0].startswith("AWS_")), modified


@lru_cache(maxsize=4)
def _configured(_: object) -> S3:
    from botocore.exceptions import BotoCoreError

    try:
        # Never sends a request: only boto3's clients say what boto3 has found in the configuration.
        session = _session()
        meta = session.client("s3", aws_access_key_id="none", aws_secret_access_key="none").meta
    except (BotoCoreError, ValueError) as error:  # ValueError: an endpoint that is no URL
        sentence, detail = _botocore_sentence(error) or (_BAD_CONFIGURATION, _detail(error))
        raise StorageError(sentence.format(url="S3", detail=detail)) from error
    # The name of a bucket cannot stand before a host that is an IP address.
    is_address = False
    with suppress(ValueError):
        is_address = bool(ipaddress.ip_address(urlsplit(meta.endpoint_url).hostname or ""))
    return S3(
        endpoint_url=None if _AMAZON.fullmatch(meta.endpoint_url) else meta.endpoint_url,
        region=session.region_name,
        virtual_hosted=(meta.config.s3 or {}).get("addressing_style") == "virtual" and not is_address,
        unsigned=os.environ.get("AWS_SKIP_SIGNATURE", "").lower() == "true",
        requester_pays=os.environ.get("AWS_REQUEST_PAYER", "").lower() in ("requester", "true"),
    )


def _session() -> Any:
    import boto3  # takes half a second, and folders do not need it

    return boto3.Session(region_name=os.environ.get("AWS_REGION"))


# Credentials.


def resolve_credentials() -> Credentials | None:
    """Return this process's credentials from the standard AWS chain.

    Raises botocore's exceptions if it is broken, and StorageError if a program or file that it names is.
    """
    with _source_named():
        credentials = _chain(_aws_configuration())
        if not hasattr(credentials, "refresh_needed"):
            _chain.cache_clear()  # static credentials are read again each time: their file may have been rewritten
        return _frozen(credentials)


def credential_method() -> str:
    """Return boto3's name for the step of the chain that has this process's credentials; empty if none has."""
    with _source_named():
        return getattr(_session().get_credentials(), "method", "")


def own_role() -> Credentials | None:
    """Return the credentials of the role that this node or container has (EC2, ECS, EKS), unless a user set others.

    Returns at once if there can be no role: the metadata service is asked only on EC2, and never if
    AWS_EC2_METADATA_DISABLED is true. Raises the same as :func:`resolve_credentials` if a role gives no credentials.
    """
    # ECS and EKS set variables; otherwise only an EC2 instance can have a role.
    is_disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if os.environ.keys().isdisjoint(_ROLE_VARIABLES) and (is_disabled or not _is_on_ec2()):
        return None
    with _source_named():
        credentials = _chain(_aws_configuration())
        return _frozen(credentials) if credentials is not None and credentials.method in _ROLES else None


def own_role_or(fallback: CredentialSource) -> BucketCredentials | None:
    """Return the credentials of the role of the node where this is called, or those of ``fallback`` without one."""
    return own_role() or fallback()


@lru_cache(maxsize=1)
def _chain(_: object) -> Any:
    return _session().get_credentials()


def _frozen(credentials: Any) -> Credentials | None:
    """Return boto3's ``credentials`` as they are now."""
    if credentials is None:
        return None
    keys = credentials.get_frozen_credentials()  # refreshes them first if they expire soon
    expires_at = getattr(credentials, "_expiry_time", None)  # boto3 has no public attribute for it
    # obstore accepts only the standard library's UTC, and botocore uses another.
    return Credentials(keys.access_key, keys.secret_key, keys.token, expires_at and expires_at.astimezone(timezone.utc))


def _is_on_ec2() -> bool:
    """Return whether this machine is an EC2 instance, without a request: elsewhere nobody would answer it."""
    for file, start in _EC2_MARKS:
        with suppress(OSError):
            if Path(file).read_text().lower().startswith(start):
                return True
    return "AWS_EC2_METADATA_SERVICE_ENDPOINT" in os.environ


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


# Errors.


@contextmanager
def _source_named() -> Generator[None]:
    """Raise StorageError, which names the program or file, if a source of credentials fails below botocore.

    botocore lets pass what a program that cannot be started, a missing token or a damaged cache raises, such as
    FileNotFoundError, JSONDecodeError or KeyError: these would be taken for errors of the bucket.
    """
    from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, ParamValidationError
    from botocore.session import Session

    try:
        yield
        return
    except ClientError as raised:  # AWS STS refuses a role, for example
        code = raised.response.get("Error", {}).get("Code", "")
        if code in _SENTENCES.by_code and code != "AccessDenied":  # which says of S3 what is missing there
            raise
        error, reason = raised, str(raised)
    except CredentialRetrievalError as raised:
        if raised.kwargs.get("provider") != "custom-process":
            raise
        error, reason = raised, raised.kwargs["error_msg"]
    except ParamValidationError as raised:  # an empty token
        error, reason = raised, ""
    except BotoCoreError:
        raise
    except OSError as raised:
        error, reason = raised, raised.strerror or str(raised)
    except Exception as raised:
        error, reason = raised, ""

    # The settings of the profile, and of those that it takes its credentials from. The first of them counts.
    session = Session()
    profiles: dict[str, dict[str, str]] = session.full_config.get("profiles", {})
    settings: dict[str, str] = {}
    name, names = session.get_config_variable("profile") or "default", set[str]()
    while name in profiles and name not in names:
        names.add(name)
        settings = {**profiles[name], **settings}
        name = profiles[name].get("source_profile", "")
    program = settings.get("credential_process", "")
    with suppress(ValueError, IndexError):
        program = shlex.split(program)[0]  # its arguments may be secret
    variable = "AWS_WEB_IDENTITY_TOKEN_FILE"
    setting = variable if os.environ.get(variable) else "web_identity_token_file"
    token_file = os.environ.get(variable) or settings.get(setting)

    # Without a reason, the first source counts that botocore asks: a token, a sign-in, a program.
    reason = reason.strip().partition("\n")[0].rstrip(".")
    if isinstance(error, ClientError):
        detail = reason
    elif token_file and (getattr(error, "filename", None) == token_file or not reason):
        detail = f"{setting} {token_file}: {reason or 'it contains no token'}"
    elif not reason and not settings.keys().isdisjoint(("sso_start_url", "sso_session")):
        raise StorageError(_DAMAGED_SIGN_IN) from error
    elif program:
        detail = f"credential_process {program}: {reason or 'it does not print keys as JSON'}"
    else:
        detail = reason or f"{type(error).__name__}: {error}".partition("\n")[0]
    raise StorageError(_SENTENCES.not_obtained.format(detail=detail)) from error


def _botocore_sentence(error: BaseException) -> tuple[str, str] | None:
    """Return the sentence for an error of boto3 whose type says what happened, and its ``{detail}``."""
    from botocore import exceptions as aws

    sentences: dict[str, str] = {
        "NoCredentialsError": _SENTENCES.no_credentials,
        "PartialCredentialsError": "The AWS credentials for {url} are incomplete: {detail} is missing.",
        **dict.fromkeys(("CredentialRetrievalError", "MetadataRetrievalError"), _SENTENCES.not_obtained),
        "ProfileNotFound": "The AWS configuration has no profile {detail}; check AWS_PROFILE and ~/.aws/config.",
        **dict.fromkeys(("SSOError", "TokenRetrievalError"), _SIGNED_OUT),
        **dict.fromkeys(("LoginRefreshRequired", "LoginTokenLoadError"), _SIGNED_OUT),  # only newer versions have them
        **dict.fromkeys(("ConfigParseError", "ConfigNotFound", "InvalidConfigError"), _BAD_CONFIGURATION),
        "SSLError": UNTRUSTED,
        "ConnectionError": UNREACHABLE,
    }
    for name, sentence in sentences.items():
        if hasattr(aws, name) and isinstance(error, getattr(aws, name)):
            return sentence, _detail(error)
    return None


def _detail(error: BaseException) -> str:
    """Return the variable or profile that an error of botocore names, else the first line of its text."""
    fields: dict[str, str] = getattr(error, "kwargs", {})
    return fields.get("cred_var") or fields.get("profile") or str(error).partition("\n")[0]
