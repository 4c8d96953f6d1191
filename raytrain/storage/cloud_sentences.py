"""What S3, Azure and Google answer, as sentences that say what to do, and what their configuration is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytrain.storage.base import cloud_name

BUSY = "{endpoint} is too busy for {url}, also after retries; try again later, or with fewer workers."
WRONG_CLOCK = "This machine's clock is wrong, so {endpoint} refuses its requests; set the clock."


@dataclass(frozen=True)
class CloudSentences:
    """Sentences with ``{endpoint}``, ``{bucket}``, ``{url}`` and ``{identity}``, by the code or status of an answer."""

    endpoint: str
    """What it is called if no endpoint is configured."""
    endpoint_variable: str
    host_variables: str
    """What the name of its host depends on."""
    certificates_variable: str
    """The environment variable that names the file with certificates to trust."""
    any_identity: str
    """What ``{identity}`` is if that is not known."""
    no_credentials: str
    not_obtained: str
    """Likewise with the reason as ``{detail}``."""
    by_code: Mapping[str, str]
    by_status: Mapping[int, str]


_EXPIRED = (
    "The session of the access key {identity} has expired; sign in to AWS again (for example: aws sso login) "
    "and repeat the command."
)
_BAD_TOKEN = (
    "The session token does not belong to the access key {identity}; sign in to AWS again, or remove AWS_SESSION_TOKEN."
)
_NO_PERMISSION = (
    "The access key {identity} has no permission for {url}; "
    "grant it s3:ListBucket and s3:GetObject, and to write also s3:PutObject."
)

S3 = CloudSentences(
    endpoint="Amazon S3",
    endpoint_variable="AWS_ENDPOINT_URL",
    host_variables="AWS_ENDPOINT_URL, AWS_REGION",
    certificates_variable="AWS_CA_BUNDLE",
    any_identity="in use",
    no_credentials=(
        "There are no AWS credentials for {url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
        "or give the node a role."
    ),
    not_obtained=(
        "The credentials of this machine's AWS configuration could not be obtained ({detail}); "
        "check its role or profile."
    ),
    by_code={
        "NoSuchBucket": "There is no bucket {bucket} at {endpoint}; check the name, or create it.",
        "InvalidBucketName": "{bucket} is not a valid bucket name; check {url}.",
        "InvalidAccessKeyId": (
            "{endpoint} does not know the access key {identity}; "
            "check AWS_ACCESS_KEY_ID, or the profile that AWS_PROFILE names."
        ),
        "SignatureDoesNotMatch": (
            "The secret key does not belong to the access key {identity}; "
            "check AWS_SECRET_ACCESS_KEY, or the profile that AWS_PROFILE names."
        ),
        "ExpiredToken": _EXPIRED,
        "ExpiredTokenException": _EXPIRED,
        "TokenRefreshRequired": _EXPIRED,
        "RequestExpired": _EXPIRED,
        "InvalidToken": _BAD_TOKEN,
        "InvalidClientTokenId": _BAD_TOKEN,
        "RequestTimeTooSkewed": WRONG_CLOCK,
        "SlowDown": BUSY,
        "TooManyRequests": BUSY,
        "AccessDenied": _NO_PERMISSION,
        "AllAccessDisabled": _NO_PERMISSION,
        "AccountProblem": _NO_PERMISSION,
    },
    by_status={
        401: _NO_PERMISSION,
        403: _NO_PERMISSION,
        404: "{endpoint} does not answer as S3 does; check AWS_ENDPOINT_URL.",
        429: BUSY,
        503: BUSY,
    },
)

_AZURE_REFUSES = (
    "{endpoint} does not accept the {identity}; check AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, "
    "or sign in again (az login)."
)
_AZURE_NO_PERMISSION = (
    "The {identity} has no permission for {url}; give it the role Storage Blob Data Reader, "
    "and to write Storage Blob Data Contributor."
)
_AZURE_TOO_EARLY = "The container {bucket} is being deleted; try again later, or choose another one."

AZURE = CloudSentences(
    endpoint="Azure Blob Storage",
    endpoint_variable="AZURE_STORAGE_ENDPOINT",
    host_variables="AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ENDPOINT",
    certificates_variable="REQUESTS_CA_BUNDLE",  # which Azure's own command line and azure-identity read
    any_identity="credentials",
    no_credentials=(
        "There are no Azure credentials for {url}; set AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN, or "
        "install raytrain[azure] and sign in (az login), or give the machine an identity."
    ),
    not_obtained="The Azure credentials for {url} could not be obtained ({detail}); check them, or sign in (az login).",
    by_code={
        "ContainerNotFound": "There is no container {bucket} at {endpoint}; check the name, or create it.",
        "ContainerBeingDeleted": _AZURE_TOO_EARLY,
        "InvalidResourceName": "{bucket} is not a valid container name; check {url}.",
        "AuthenticationFailed": _AZURE_REFUSES,
        "InvalidAuthenticationInfo": _AZURE_REFUSES,
        "AuthorizationFailure": _AZURE_REFUSES[:-1] + ", and the firewall of the storage account.",
        "NoAuthenticationInformation": _AZURE_REFUSES,
        "KeyBasedAuthenticationNotPermitted": (
            "{endpoint} allows no account keys; install raytrain[azure], remove AZURE_STORAGE_ACCOUNT_KEY "
            "and sign in (az login)."
        ),
        "ServerBusy": BUSY,
        "OperationTimedOut": BUSY,
    },
    by_status={
        401: _AZURE_REFUSES,
        403: _AZURE_NO_PERMISSION,
        404: "{endpoint} does not answer as Azure Blob Storage does; check AZURE_STORAGE_ENDPOINT.",
        429: BUSY,
        503: BUSY,
    },
)

_GOOGLE_REFUSES = (
    "{endpoint} does not accept the {identity}; check GOOGLE_APPLICATION_CREDENTIALS, or sign in again "
    "(gcloud auth application-default login)."
)
_GOOGLE_NO_PERMISSION = (
    "The {identity} has no permission for {url}; give whom it belongs to the role Storage Object Viewer, "
    "and to write Storage Object User."
)

GOOGLE = CloudSentences(
    endpoint="Google Cloud Storage",
    endpoint_variable="STORAGE_EMULATOR_HOST",
    host_variables="STORAGE_EMULATOR_HOST",
    certificates_variable="REQUESTS_CA_BUNDLE",  # which google-auth reads
    any_identity="access token",
    no_credentials=(
        "There are no Google credentials for {url}; install raytrain[gcs] and set GOOGLE_APPLICATION_CREDENTIALS, or "
        "sign in (gcloud auth application-default login), or give the machine a service account."
    ),
    not_obtained=(
        "The Google credentials for {url} could not be obtained ({detail}); check GOOGLE_APPLICATION_CREDENTIALS, "
        "or sign in (gcloud auth application-default login)."
    ),
    by_code={
        "NoSuchBucket": "There is no bucket {bucket} at {endpoint}; check the name, or create it.",
        "InvalidBucketName": "{bucket} is not a valid bucket name; check {url}.",
        "AccessDenied": _GOOGLE_NO_PERMISSION,
        "SlowDown": BUSY,
    },
    by_status={
        401: _GOOGLE_REFUSES,
        403: _GOOGLE_NO_PERMISSION,
        404: "{endpoint} does not answer as Google Cloud Storage does; check STORAGE_EMULATOR_HOST.",
        429: BUSY,
        503: BUSY,
    },
)


def sentences_of(url: str) -> CloudSentences:
    """Return those of the cloud that ``url`` is in; those of S3 for a folder."""
    return {"az": AZURE, "gs": GOOGLE}.get(cloud_name(url), S3)
