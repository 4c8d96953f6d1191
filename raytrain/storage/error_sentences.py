"""Turn errors of storage and of the AWS configuration into one sentence that says what to do."""

from __future__ import annotations

import errno
from functools import cache

from raytrain.errors import StorageError

_BUSY = "{endpoint} is too busy for {url}, also after retries; try again later, or with fewer workers."
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
_NOT_S3 = "{endpoint} does not answer as S3 does; check AWS_ENDPOINT_URL."
_REGION = "The bucket {bucket} is in the region {detail}; set AWS_REGION={detail}."
_OTHER_REGION = (
    "The bucket {bucket} is in another region than the one configured; set AWS_REGION to the bucket's region."
)
_UNREACHABLE = "{endpoint} cannot be reached, or does not answer in time; check AWS_ENDPOINT_URL and the network."
_UNTRUSTED = (
    "The certificate of {endpoint} cannot be trusted; "
    "set AWS_CA_BUNDLE to the file with the certificate of its authority."
)
_NO_CREDENTIALS = (
    "There are no AWS credentials for {url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, "
    "or give the node a role."
)
_NOT_OBTAINED = (
    "The credentials of this machine's AWS configuration could not be obtained ({detail}); check its role or profile."
)
_BAD_CONFIGURATION = "The AWS configuration is broken ({detail}); check ~/.aws/config."
_OTHER = "{url} cannot be used: {detail}."
_SIGNED_OUT = "The AWS sign-in has expired; sign in again (for example: aws sso login) and repeat the command."

_BY_S3_CODE: dict[str, str] = {
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
    "RequestTimeTooSkewed": "This machine's clock is wrong, so {endpoint} refuses its requests; set the clock.",
    "SlowDown": _BUSY,
    "TooManyRequests": _BUSY,
    "AccessDenied": _NO_PERMISSION,
    "AllAccessDisabled": _NO_PERMISSION,
    "AccountProblem": _NO_PERMISSION,
}

_BY_HTTP_STATUS: dict[int, str] = {
    401: _NO_PERMISSION,
    403: _NO_PERMISSION,
    404: _NOT_S3,
    429: _BUSY,
    503: _BUSY,
}

_BY_TEXT: dict[str, str] = {
    "dns error": (
        "{endpoint} cannot be reached: there is no such host; check AWS_ENDPOINT_URL, AWS_REGION and the network."
    ),
    "ConnectionRefused": (
        "{endpoint} cannot be reached: nothing answers there; check AWS_ENDPOINT_URL, and that the server runs."
    ),
    "InvalidCertificate": _UNTRUSTED,
    "InvalidContentType": (
        "{endpoint} does not speak https; check AWS_ENDPOINT_URL, which may have to start with http://."
    ),
    "kind: Connect": _UNREACHABLE,
    "TimedOut": _UNREACHABLE,
    "HTTP error": _UNREACHABLE,
    "invalid list response": _NOT_S3,
}
"""What obstore and the libraries below it write when there was no answer, or none of S3; the more specific first."""

_BY_ERRNO: dict[int, str] = {
    errno.ENOENT: "There is no folder {url}; check the path, on every machine that uses it.",
    errno.ENOTDIR: "{url} is below a file, not below a folder; check the path.",
    errno.EISDIR: "{url} is a folder, but should be a file; remove it or choose another place.",
    errno.EACCES: "This user has no permission for {url}; change the permissions or choose another place.",
    errno.EPERM: "This user has no permission for {url}; change the permissions or choose another place.",
    errno.EROFS: "{url} is on a read-only disk; choose another place.",
    errno.ENOSPC: "The disk of {url} is full; free space or choose another place.",
    errno.EDQUOT: "The disk quota for {url} is used up; free space or choose another place.",
}


def explain(
    error: BaseException, url: str, *, endpoint_url: str | None = None, identity: str = "in use"
) -> StorageError:
    """Return a StorageError that says in one sentence what went wrong at ``url`` and what to do.

    Args:
        error: an exception of obstore, botocore or the file system; a StorageError is returned as it is.
        url: what was read or written.
        endpoint_url: the S3 endpoint, if it is not Amazon's.
        identity: what may be shown of the access key, if that is known.
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        sentence = _BY_ERRNO.get(error.errno, _OTHER)
        return StorageError(sentence.format(url=url, detail=error.strerror))
    sentence, detail = _s3_sentence(error)
    bucket = url.removeprefix("s3://").partition("/")[0]
    endpoint = endpoint_url or "Amazon S3"
    return StorageError(sentence.format(url=url, bucket=bucket, endpoint=endpoint, identity=identity, detail=detail))


def _s3_sentence(error: BaseException) -> tuple[str, str]:
    """Return the sentence for an error of obstore or botocore, and what its ``{detail}`` is."""
    from raytrain.storage import s3_errors  # imported here because a folder does not need obstore

    if sentence := next((found for kind, found in _by_type().items() if isinstance(error, kind)), None):
        return sentence, _detail(error)
    if failure := s3_errors.credential_source_failure(error):
        return _NOT_OBTAINED, failure
    if s3_errors.is_wrong_region(error):
        region = s3_errors.bucket_region(error)
        return (_REGION, region) if region else (_OTHER_REGION, "")
    code, status = s3_errors.s3_error_code(error), s3_errors.http_status(error)
    if sentence := _BY_S3_CODE.get(code or "") or _BY_HTTP_STATUS.get(status or 0) or _by_text(str(error)):
        return sentence, ""
    return _OTHER, _shortened(s3_errors.server_message(error) or f"{type(error).__name__}: {error}")


@cache
def _by_type() -> dict[type[BaseException], str]:
    """Sentences for errors whose type says what happened; the ``{detail}`` is from :func:`_detail`."""
    from botocore import exceptions as aws  # pyright: ignore[reportMissingTypeStubs]
    from obstore.exceptions import InvalidPathError

    sentences: dict[type[BaseException], str] = {
        aws.NoCredentialsError: _NO_CREDENTIALS,
        aws.PartialCredentialsError: "The AWS credentials for {url} are incomplete: {detail} is missing.",
        aws.CredentialRetrievalError: _NOT_OBTAINED,
        aws.MetadataRetrievalError: _NOT_OBTAINED,
        aws.ProfileNotFound: "The AWS configuration has no profile {detail}; check AWS_PROFILE and ~/.aws/config.",
        aws.SSOError: _SIGNED_OUT,
        aws.TokenRetrievalError: _SIGNED_OUT,
        aws.ConfigParseError: _BAD_CONFIGURATION,
        aws.ConfigNotFound: _BAD_CONFIGURATION,
        aws.InvalidConfigError: _BAD_CONFIGURATION,
        aws.SSLError: _UNTRUSTED,
        aws.ConnectionError: _UNREACHABLE,
        InvalidPathError: "An object below {url} has a name that cannot be used ({detail}); rename it.",
    }
    for name in ("LoginRefreshRequired", "LoginTokenLoadError"):  # only in newer versions of botocore
        if kind := getattr(aws, name, None):
            sentences[kind] = _SIGNED_OUT
    return sentences


def _detail(error: BaseException) -> str:
    """Return the variable or profile that an error of botocore names, else the first line of its text."""
    fields: dict[str, str] = getattr(error, "kwargs", {})
    return fields.get("cred_var") or fields.get("profile") or str(error).partition("\n")[0]


def _by_text(text: str) -> str | None:
    return next((sentence for part, sentence in _BY_TEXT.items() if part in text), None)


def _shortened(text: str) -> str:
    return text.partition("\n")[0].strip(" .")[:300]
