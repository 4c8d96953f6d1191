"""Read the HTTP status, the cloud's error code and the like from an error of obstore or botocore.

obstore has types for a few errors and raises GenericError for all others; only its text contains the server's answer.
"""

from __future__ import annotations

import re
from typing import Any, cast

from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

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


def error_code(error: BaseException) -> str | None:
    """Return the cloud's own code for what went wrong, such as ``SlowDown``; None if the server sent none."""
    if response := _botocore_response(error):
        return response.get("Error", {}).get("Code")
    found = re.search(
        r"<Code>(\w+)</Code>|\(code: (\w+)\)", str(error)
    )  # the second form comes from deleting an object
    return found and (found[1] or found[2])


def http_status(error: BaseException) -> int | None:
    """Return the status of the answer, such as 503; None if there was no answer or it was successful."""
    if isinstance(error, PermissionDeniedError):
        return 403
    if isinstance(error, UnauthenticatedError):
        return 401
    if response := _botocore_response(error):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    found = re.search(r"status code: (\d{3})\b", str(error))
    return int(found[1]) if found else None


def server_message(error: BaseException) -> str | None:
    """Return the server's explanation in its own words, if it sent one."""
    found = re.search(r"<Message>(.*?)</Message>", str(error), re.DOTALL)
    return found and found[1]


def names_no_bucket(error: BaseException) -> bool:
    """Whether the bucket itself does not exist."""
    return error_code(error) in _NO_BUCKET_CODES


def is_transient(error: BaseException) -> bool:
    """Whether the cloud was busy or a connection broke, so that the same request may succeed later."""
    status = http_status(error)
    if status is None:
        return _BROKEN_CONNECTION.search(str(error)) is not None or error_code(error) in _TRANSIENT_CODES
    return status in _TRANSIENT_STATUSES or status >= 500 or error_code(error) in _TRANSIENT_CODES


def refuses_credentials(error: BaseException) -> bool:
    """Whether the cloud refuses the credentials themselves, so that asking their source again may help."""
    if isinstance(error, UnauthenticatedError):  # or there were none to send
        return credential_source_failure(error) is None
    return error_code(error) in _CREDENTIAL_CODES


def is_wrong_region(error: BaseException) -> bool:
    """Whether the bucket is in another region than the one configured."""
    # The second is what obstore makes of a redirect.
    return error_code(error) in _REGION_CODES or "incorrectly configured region" in str(error)


def bucket_region(error: BaseException) -> str | None:
    """Return the region that the server names in an answer for which :func:`is_wrong_region` is true."""
    found = re.search(r"expecting '([\w-]+)'|\bbe sent to.*?s3[.-]([\w-]+)\.amazonaws", str(error))
    return found and (found[1] or found[2])


def credential_source_failure(error: BaseException) -> str | None:
    """Return why the source of credentials failed, if obstore raised ``error`` because of that."""
    found = (
        re.search(r"External \w+ credential provider: (.+)", str(error))
        if isinstance(error, UnauthenticatedError)
        else None
    )
    return found and found[1]


def _botocore_response(error: BaseException) -> dict[str, dict[str, Any]]:
    """What botocore's ClientError says of S3's answer; empty for any other error."""
    response: object = getattr(error, "response", None)
    return cast("dict[str, dict[str, Any]]", response) if isinstance(response, dict) else {}
