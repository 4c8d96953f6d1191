"""Errors of requests to storage: whether to repeat the request, and one sentence for the user.

obstore has types for a few errors and raises GenericError for all others; only its text contains the server's answer.
"""

from __future__ import annotations

import re
from typing import Any, cast

from obstore.exceptions import InvalidPathError, PermissionDeniedError, UnauthenticatedError

from raytrain.errors import ObjectArchived, StorageError
from raytrain.storage.clouds.cloud import UNREACHABLE, UNTRUSTED, Cloud
from raytrain.storage.credentials import NoCredentials
from raytrain.storage.folder import TOO_MANY_FILES, explain_os_error, has_too_many_files

_TRANSIENT_STATUSES = {408, 429}  # and all of 5xx
_TRANSIENT_CODES = {
    "RequestTimeout",
    "NoSuchUpload",  # the upload had been completed, but S3's answer was lost
}
_BROKEN_CONNECTION = re.compile(r"HTTP error|response body|Content-Range")
_CREDENTIAL_CODES = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "RequestExpired",
    "InvalidAccessKeyId",
    "InvalidToken",
    "AuthenticationFailed",  # this and the next: Azure
    "InvalidAuthenticationInfo",
}
_NO_BUCKET_CODES = {"NoSuchBucket", "ContainerNotFound"}
_REGION_CODES = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}

_BUSY = "{endpoint} is too busy for {url}, also after retries; try again later, or with fewer workers."
_WRONG_CLOCK = "This machine's clock is wrong, so {endpoint} refuses its requests; set the clock."
_OTHER_PROTOCOL = "{endpoint} does not answer as {protocol} does; check {endpoint_variable}."
_REGION = "The bucket {bucket} is in the region {detail}; set AWS_REGION={detail}."
_OTHER_REGION = (
    "The bucket {bucket} is in another region than the one configured; set AWS_REGION to the bucket's region."
)
_UNUSABLE_NAME = "An object below {url} has a name that cannot be used ({detail}); rename it."
_OTHER = "{url} cannot be used: {detail}."

_BY_CODE: dict[str, str] = {
    "NoSuchBucket": "There is no bucket {bucket} at {endpoint}; check the name, or create it.",
    "ContainerNotFound": "There is no container {bucket} at {endpoint}; check the name, or create it.",
    "InvalidBucketName": "{bucket} is not a valid bucket name; check {url}.",
    "InvalidResourceName": "{bucket} is not a valid container name; check {url}.",
    "RequestTimeTooSkewed": _WRONG_CLOCK,
    **dict.fromkeys(("SlowDown", "TooManyRequests", "ServerBusy", "OperationTimedOut"), _BUSY),
}
_BY_STATUS = {404: _OTHER_PROTOCOL, 429: _BUSY, 503: _BUSY}
_ARCHIVED_CODES = ("InvalidObjectState", "BlobArchived")
_BY_TEXT: dict[str, str] = {
    "Too many open files": TOO_MANY_FILES,
    "dns error": "{endpoint} cannot be reached: there is no such host; check {host_variables} and the network.",
    "ConnectionRefused": (
        "{endpoint} cannot be reached: nothing answers there; check {endpoint_variable}, and that the server runs."
    ),
    "InvalidCertificate": UNTRUSTED,
    "InvalidContentType": (
        "{endpoint} does not speak https; check {endpoint_variable}, which may have to start with http://."
    ),
    "kind: Connect": UNREACHABLE,
    "TimedOut": UNREACHABLE,
    "HTTP error": UNREACHABLE,
    "invalid list response": _OTHER_PROTOCOL,
}
"""Sentences by a part of the text of an error without an answer, from obstore or a library below it.

More specific texts come first.
"""


def explain(error: BaseException, url: str, cloud: Cloud | None = None, identity: str | None = None) -> StorageError:
    """Return a StorageError of one sentence for an ``error`` of obstore, boto3 or the system, at ``url``.

    It is an ObjectArchived if the object must be restored first. A StorageError is returned as it is. ``identity``
    names the credentials that were used, without a secret.
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        return explain_os_error(error, url)
    if cloud is None:
        return StorageError(_OTHER.format(url=url, detail=_first_line(error)))
    sentence, detail = _sentence_and_detail(error, cloud)
    values = vars(cloud.sentences) | {
        "url": url,
        "bucket": url.partition("://")[2].partition("/")[0],
        "endpoint": cloud.endpoint_url or cloud.sentences.endpoint,
        "identity": identity or cloud.sentences.any_identity,
        "detail": detail,
    }
    kind = ObjectArchived if error_code(error) in _ARCHIVED_CODES else StorageError
    return kind(sentence.format(**values))


def _sentence_and_detail(error: BaseException, cloud: Cloud) -> tuple[str, str]:
    """Return the sentence for an error of obstore or of the cloud's library, and the text for its ``{detail}``."""
    sentences, text = cloud.sentences, str(error)
    # The type of some errors says what happened.
    if isinstance(error, NoCredentials):
        return sentences.no_credentials, ""
    if of_cloud := cloud.sentence_and_detail(error):
        return of_cloud
    if isinstance(error, InvalidPathError):
        return _UNUSABLE_NAME, text.partition("\n")[0]
    if failure := _credential_source_failure(error):
        return sentences.not_obtained, failure
    # The bucket may be in another region. obstore describes a redirect in its own words; few answers name the region.
    code = error_code(error) or ""
    if code in _REGION_CODES or "incorrectly configured region" in text:
        region = re.search(r"expecting '([\w-]+)'|\bbe sent to.*?s3[.-]([\w-]+)\.amazonaws", text)
        return (_REGION, region[1] or region[2]) if region else (_OTHER_REGION, "")
    # The code in the server's answer says more than the status. Without an answer, the text says what failed.
    statuses = {401: sentences.refuses_credentials, 403: sentences.no_permission, **_BY_STATUS}
    sentence = sentences.by_code.get(code) or _BY_CODE.get(code) or statuses.get(http_status(error) or 0)
    sentence = sentence or next((by_text for part, by_text in _BY_TEXT.items() if part in text), None)
    return (sentence, "") if sentence else (_OTHER, _first_line(error))


def error_code(error: BaseException) -> str | None:
    """Return the cloud's error code, such as ``SlowDown``; None if the server sent none."""
    if response := _boto_response(error):
        return response.get("Error", {}).get("Code")
    # The second form comes from deleting an object.
    match = re.search(r"<Code>([\w.]+)</Code>|\(code: ([\w.]+)\)", str(error))
    return match and (match[1] or match[2])


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer, such as 503; None if there was no answer, or it was a good one."""
    if isinstance(error, PermissionDeniedError):
        return 403
    if isinstance(error, UnauthenticatedError):
        return 401
    if response := _boto_response(error):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    match = re.search(r"status code: (\d{3})\b", str(error))
    return int(match[1]) if match else None


def names_no_bucket(error: BaseException) -> bool:
    """Return True if the error says that the bucket itself does not exist."""
    return error_code(error) in _NO_BUCKET_CODES


def is_transient(error: BaseException) -> bool:
    """Return True if the cloud was busy or a connection broke, so that the same request may succeed later.

    The same holds if this process had as many files and connections open as it may: some will be closed soon.
    """
    if has_too_many_files(error) or "Too many open files" in str(error) or error_code(error) in _TRANSIENT_CODES:
        return True
    status = http_status(error)
    if status is None:
        return _BROKEN_CONNECTION.search(str(error)) is not None
    return status in _TRANSIENT_STATUSES or status >= 500


def refuses_credentials(error: BaseException) -> bool:
    """Return True if the cloud refuses the credentials themselves, so that new ones from their source may help."""
    if isinstance(error, UnauthenticatedError):  # obstore raises it also if the source had none to send
        return _credential_source_failure(error) is None
    return error_code(error) in _CREDENTIAL_CODES


def _credential_source_failure(error: BaseException) -> str | None:
    """Return why the source of credentials failed, if obstore raised ``error`` because of that; None otherwise."""
    if not isinstance(error, UnauthenticatedError):
        return None
    match = re.search(r"External \w+ credential provider: (.+)", str(error))
    return match and match[1]


def _boto_response(error: BaseException) -> dict[str, dict[str, Any]]:
    """Return S3's answer in boto3's ClientError; an empty one for any other error."""
    response: object = getattr(error, "response", None)
    return cast("dict[str, dict[str, Any]]", response) if isinstance(response, dict) else {}


def _first_line(error: BaseException) -> str:
    """Return the first line of the server's explanation, if it sent one, or of the error's text; at most 300 signs."""
    message = re.search(r"<Message>(.*?)</Message>", str(error), re.DOTALL)
    text = message[1] if message else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0].strip(" .")[:300]
