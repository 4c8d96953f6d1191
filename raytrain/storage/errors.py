"""What storage and the AWS configuration complain of, each as one sentence that says what to do."""

from __future__ import annotations

import errno
import re

from raytrain.errors import StorageError

_SENTENCES: tuple[tuple[str, str], ...] = (
    # What gives out keys; first, for it says in S3's words why it does not. {0} is what the pattern's group found.
    (
        r"(?:CredentialRetrievalError|MetadataRetrievalError): (.+)",
        "The credentials of this machine's AWS configuration could not be obtained ({0}); check its role or profile.",
    ),
    # S3's error codes.
    (r"\bNoSuchBucket\b", "There is no bucket {bucket} at {endpoint}; check the name, or create it."),
    (
        r"\bInvalidAccessKeyId\b",
        "{endpoint} does not know the access key {identity}; check AWS_ACCESS_KEY_ID, or the profile that AWS_PROFILE names.",
    ),
    (
        r"\bSignatureDoesNotMatch\b",
        "The secret key does not belong to the access key {identity}; check AWS_SECRET_ACCESS_KEY, or the profile that AWS_PROFILE names.",
    ),
    (
        r"\b(?:ExpiredToken(?:Exception)?|TokenRefreshRequired|RequestExpired)\b",
        "The session of the access key {identity} has expired; sign in to AWS again (such as: aws sso login) and repeat the command.",
    ),
    (
        r"\bInvalidToken\b|\bInvalidClientTokenId\b",
        "The session token does not belong to the access key {identity}; sign in to AWS again, or remove AWS_SESSION_TOKEN.",
    ),
    (
        r"expecting '([\w-]+)'|\bbe sent to.*?s3[.-]([\w-]+)\.amazonaws",
        "The bucket {bucket} is in the region {0}; set AWS_REGION={0}.",
    ),
    (
        r"incorrectly configured region|\bAuthorizationHeaderMalformed\b|\bPermanentRedirect\b|\bIllegalLocationConstraintException\b",
        "The bucket {bucket} is in another region than the one configured; set AWS_REGION to the bucket's region.",
    ),
    (r"\bRequestTimeTooSkewed\b", "This machine's clock is wrong, so {endpoint} refuses its requests; set the clock."),
    (r"\bInvalidBucketName\b", "{bucket} cannot be a bucket's name; check {url}."),
    (
        r"\bSlowDown\b|\bTooManyRequests\b|: 503\b|: 429\b",
        "{endpoint} went on answering that it is too busy for {url}; try again later, or with fewer workers.",
    ),
    (
        r"\bAccessDenied\b|: 401 |: 403 |\bAllAccessDisabled\b|\bAccountProblem\b",
        "The access key {identity} has no permission for {url}; give it s3:ListBucket and s3:GetObject, and to write s3:PutObject.",
    ),
    # The AWS configuration of this machine (botocore).
    (
        r"\bNoCredentials",
        "There are no AWS credentials for {url}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or give the node a role.",
    ),
    (r"ProfileNotFound.*\((.+?)\)", "The AWS configuration has no profile {0}; check AWS_PROFILE and ~/.aws/config."),
    (r"PartialCredentialsError.*missing: (\S+)", "The AWS credentials for {url} are incomplete: {0} is missing."),
    (
        r"SSOToken|UnauthorizedSSOToken|TokenRetrievalError|LoginRefreshRequired|LoginTokenLoad",
        "The AWS sign-in has expired; sign in again (such as: aws sso login) and repeat the command.",
    ),
    (r"(?:ConfigParseError|InvalidConfigError|ConfigNotFound): (.+)", "The AWS configuration is broken ({0}); check ~/.aws/config."),
    # The way there.
    (r"dns error", "{endpoint} cannot be reached: there is no such host; check AWS_ENDPOINT_URL, AWS_REGION and the network."),
    (r"ConnectionRefused", "{endpoint} cannot be reached: nothing answers there; check AWS_ENDPOINT_URL, and that the server runs."),
    (r"[Cc]ertificate", "The certificate of {endpoint} cannot be trusted; set AWS_CA_BUNDLE to the file with its authority's certificate."),
    (r"InvalidContentType", "{endpoint} does not speak https; check AWS_ENDPOINT_URL, which may have to begin with http://."),
    (
        r"\bkind: Connect\b|EndpointConnectionError|ConnectTimeout|HTTP error|TimedOut",
        "{endpoint} cannot be reached, or does not answer in time; check AWS_ENDPOINT_URL and the network.",
    ),
    (r"InvalidPathError: (.+)", "An object below {url} has a name that cannot be used ({0}); rename it."),
    (r"invalid list response|: 404 ", "{endpoint} does not answer as S3 does; check AWS_ENDPOINT_URL."),
)

_FILE_SENTENCES: dict[int, str] = {
    errno.ENOENT: "There is no folder {url}; check the path, on every machine that uses it.",
    errno.ENOTDIR: "{url} lies below a file, not below a folder; check the path.",
    errno.EISDIR: "{url} is a folder where a file should be; remove it or choose another place.",
    errno.EACCES: "This user has no permission for {url}; change the permissions or choose another place.",
    errno.EPERM: "This user has no permission for {url}; change the permissions or choose another place.",
    errno.EROFS: "{url} lies on a disk that can only be read; choose another place.",
    errno.ENOSPC: "The disk of {url} is full; free space or choose another place.",
    errno.EDQUOT: "The disk quota for {url} is used up; free space or choose another place.",
}


def explain(error: BaseException, url: str, *, endpoint_url: str | None = None, identity: str = "in use") -> StorageError:
    """One sentence for what went wrong at ``url``: an exception of obstore, botocore or the file system.

    ``endpoint_url`` and ``identity`` (what may be shown of the access key) make it exacter where they are known.
    A StorageError is given back as it is; its sentence is final.
    """
    if isinstance(error, StorageError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        sentence = _FILE_SENTENCES.get(error.errno, "{url} cannot be used: {reason}.")
        return StorageError(sentence.format(url=url, reason=error.strerror))
    text = f"{type(error).__name__}: {error}"
    known = {
        "url": url,
        "bucket": url.removeprefix("s3://").partition("/")[0],
        "endpoint": endpoint_url or "Amazon S3",
        "identity": identity,
    }
    for pattern, sentence in _SENTENCES:
        if found := re.search(pattern, text):
            return StorageError(sentence.format(*filter(None, found.groups()), **known))
    return StorageError(f"{url} cannot be used: {_plain(text)}.")


def refuses_credentials(error: BaseException) -> bool:
    """Whether S3 refuses the keys themselves, so that asking their source again may help."""
    return re.search(r"\b(?:ExpiredToken|TokenRefreshRequired|InvalidAccessKeyId|InvalidToken|RequestExpired)", str(error)) is not None


def _plain(text: str) -> str:
    """What the server says in its own words, else the first line of the text."""
    said = re.search(r"<Message>(.*?)</Message>", text, re.DOTALL)
    return (said[1] if said else text.splitlines()[0]).strip(" .")[:300]
