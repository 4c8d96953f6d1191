"""Turn errors of storage and of its configuration into one sentence that says what to do."""

from __future__ import annotations

import errno
from functools import cache

from raytrain.errors import StorageError
from raytrain.storage.cloud_sentences import S3, CloudSentences, sentences_of
from raytrain.storage.credentials import NoCredentials

_REGION = "The bucket {bucket} is in the region {detail}; set AWS_REGION={detail}."
_OTHER_REGION = (
    "The bucket {bucket} is in another region than the one configured; set AWS_REGION to the bucket's region."
)
_UNREACHABLE = "{endpoint} cannot be reached, or does not answer in time; check {endpoint_variable} and the network."
_UNTRUSTED = (
    "The certificate of {endpoint} cannot be trusted; "
    "set {certificates_variable} to the file with the certificate of its authority."
)
_BAD_CONFIGURATION = "The AWS configuration is broken ({detail}); check ~/.aws/config."
_OTHER = "{url} cannot be used: {detail}."
_SIGNED_OUT = "The AWS sign-in has expired; sign in again (for example: aws sso login) and repeat the command."

_BY_TEXT: dict[str, str] = {
    "dns error": ("{endpoint} cannot be reached: there is no such host; check {host_variables} and the network."),
    "ConnectionRefused": (
        "{endpoint} cannot be reached: nothing answers there; check {endpoint_variable}, and that the server runs."
    ),
    "InvalidCertificate": _UNTRUSTED,
    "InvalidContentType": (
        "{endpoint} does not speak https; check {endpoint_variable}, which may have to start with http://."
    ),
    "kind: Connect": _UNREACHABLE,
    "TimedOut": _UNREACHABLE,
    "HTTP error": _UNREACHABLE,
}
"""What obstore and the libraries below it write when there was no answer; the more specific first."""

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
    error: BaseException, url: str, *, endpoint_url: str | None = None, identity: str | None = None
) -> StorageError:
    """Return a StorageError that says in one sentence what went wrong at ``url`` and what to do.

    Args:
        error: an exception of obstore, botocore or the file system; a StorageError is returned as it is.
        url: what was read or written.
        endpoint_url: the endpoint, if it is not that of Amazon's S3.
        identity: what may be shown of the credentials, if that is known.
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        sentence = _BY_ERRNO.get(error.errno, _OTHER)
        return StorageError(sentence.format(url=url, detail=error.strerror))
    cloud = sentences_of(url)
    sentence, detail = _sentence(error, cloud)
    words = {
        "url": url,
        "bucket": url.partition("://")[2].partition("/")[0],
        "endpoint": endpoint_url or cloud.endpoint,
        "identity": identity or cloud.any_identity,
        "detail": detail,
        "endpoint_variable": cloud.endpoint_variable,
        "host_variables": cloud.host_variables,
        "certificates_variable": cloud.certificates_variable,
    }
    return StorageError(sentence.format(**words))


def _sentence(error: BaseException, cloud: CloudSentences) -> tuple[str, str]:
    """Return the sentence for an error of obstore or botocore, and what its ``{detail}`` is."""
    from raytrain.storage import request_errors  # imported here because a folder does not need obstore

    if isinstance(error, NoCredentials):
        return cloud.no_credentials, ""
    if sentence := next((found for kind, found in _by_type().items() if isinstance(error, kind)), None):
        return sentence, _detail(error)
    if failure := request_errors.credential_source_failure(error):
        return cloud.not_obtained, failure
    if request_errors.is_wrong_region(error):
        region = request_errors.bucket_region(error)
        return (_REGION, region) if region else (_OTHER_REGION, "")
    code, status = request_errors.error_code(error), request_errors.http_status(error)
    if sentence := cloud.by_code.get(code or "") or cloud.by_status.get(status or 0) or _by_text(str(error), cloud):
        return sentence, ""
    return _OTHER, _shortened(request_errors.server_message(error) or f"{type(error).__name__}: {error}")


@cache
def _by_type() -> dict[type[BaseException], str]:
    """Sentences for errors whose type says what happened; the ``{detail}`` is from :func:`_detail`."""
    from botocore import exceptions as aws  # pyright: ignore[reportMissingTypeStubs]
    from obstore.exceptions import InvalidPathError

    sentences: dict[type[BaseException], str] = {
        aws.NoCredentialsError: S3.no_credentials,
        aws.PartialCredentialsError: "The AWS credentials for {url} are incomplete: {detail} is missing.",
        aws.CredentialRetrievalError: S3.not_obtained,
        aws.MetadataRetrievalError: S3.not_obtained,
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


def _by_text(text: str, cloud: CloudSentences) -> str | None:
    sentences = _BY_TEXT | {"invalid list response": cloud.by_status[404]}
    return next((sentence for part, sentence in sentences.items() if part in text), None)


def _shortened(text: str) -> str:
    return text.partition("\n")[0].strip(" .")[:300]
