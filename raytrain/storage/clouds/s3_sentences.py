"""S3's answers and boto3's errors as sentences that say what to do."""

# boto3 and botocore have no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from raytrain.storage.clouds.cloud import UNREACHABLE, UNTRUSTED, CloudSentences

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
    "if its requesters pay for the bucket, set AWS_REQUEST_PAYER=requester."
)
KMS = "S3 cannot use the KMS key that encrypts {url}; enable that key, and grant kms:Decrypt and kms:GenerateDataKey."
BAD_CONFIGURATION = "The AWS configuration is broken ({detail}); check ~/.aws/config."
BREAKS_OFF = (
    "{endpoint} breaks off its listing of {url} after {number} names, which are not all: it sends IsTruncated=true and "
    "{fault}; update that server, or copy the objects to another one."
)
_SIGNED_OUT = "The AWS sign-in has expired; sign in again (for example: aws sso login) and repeat the command."

DAMAGED_SIGN_IN = (
    "The AWS sign-in that is kept below ~/.aws/sso/cache cannot be read; sign in again (for example: aws sso login) "
    "and repeat the command."
)

SENTENCES = CloudSentences(
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
        **dict.fromkeys(("KMS.DisabledException", "KMS.NotFoundException", "KMS.KMSInvalidStateException"), KMS),
    },
)


def botocore_sentence(error: BaseException) -> tuple[str, str] | None:
    """Return the sentence and its ``{detail}`` for an error of boto3 whose type says what happened; None for others."""
    from botocore import exceptions as aws

    sentences: dict[str, str] = {
        "NoCredentialsError": SENTENCES.no_credentials,
        "PartialCredentialsError": "The AWS credentials for {url} are incomplete: {detail} is missing.",
        **dict.fromkeys(("CredentialRetrievalError", "MetadataRetrievalError"), SENTENCES.not_obtained),
        "ProfileNotFound": "The AWS configuration has no profile {detail}; check AWS_PROFILE and ~/.aws/config.",
        **dict.fromkeys(("SSOError", "TokenRetrievalError"), _SIGNED_OUT),
        **dict.fromkeys(("LoginRefreshRequired", "LoginTokenLoadError"), _SIGNED_OUT),  # only newer versions have them
        **dict.fromkeys(("ConfigParseError", "ConfigNotFound", "InvalidConfigError"), BAD_CONFIGURATION),
        "SSLError": UNTRUSTED,
        "ConnectionError": UNREACHABLE,
    }
    for name, sentence in sentences.items():
        if hasattr(aws, name) and isinstance(error, getattr(aws, name)):
            return sentence, detail_of(error)
    return None


def detail_of(error: BaseException) -> str:
    """Return the variable or profile that an error of botocore names; without one, the first line of its text."""
    fields: dict[str, str] = getattr(error, "kwargs", {})
    return fields.get("cred_var") or fields.get("profile") or str(error).partition("\n")[0]
