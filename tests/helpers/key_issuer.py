"""Expiring credentials: an issuer for ``credential_process``, and an S3 server that accepts them while valid."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from raytrain.demo.s3_server import S3Server
from tests.helpers.faulty_s3 import faulty_s3

LIFE_S = 20
_ISSUER = """
import json, os, secrets, sys, time
folder, life_s = sys.argv[1], float(sys.argv[2])
if os.path.exists(os.path.join(folder, "revoked")):
    sys.exit("An error occurred (AccessDenied) when calling the AssumeRole operation: not any more")
now = time.time()
name, secret, token = "ASIA" + secrets.token_hex(8).upper(), secrets.token_hex(20), secrets.token_hex(60)
keys = {"AccessKeyId": name, "SecretAccessKey": secret, "SessionToken": token}
with open(os.path.join(folder, keys["AccessKeyId"] + ".new"), "w") as file:
    json.dump({**keys, "expires": now + life_s}, file)
os.rename(file.name, file.name[:-4] + ".json")
print(json.dumps({"Version": 1, **keys, "Expiration": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now + life_s))}))
"""


class Issuer:
    """Issues credentials that last ``LIFE_S`` seconds to all processes that run its program, until it is revoked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "issuer.py").write_text(_ISSUER)
        command = f"{sys.executable} -I -S {folder}/issuer.py {folder} {LIFE_S}"
        (folder / "config").write_text(f"[default]\nregion = us-east-1\ncredential_process = {command}\n")

    def environment(self, endpoint_url: str) -> dict[str, str]:
        """Return the AWS configuration of a process that uses these credentials."""
        return {"AWS_CONFIG_FILE": str(self.folder / "config"), "AWS_ENDPOINT_URL": endpoint_url}

    def issued(self) -> list[dict[str, str]]:
        """Return all credentials issued so far."""
        return [json.loads(file.read_text()) for file in self.folder.glob("*.json")]

    def revoke(self, revoked: bool = True) -> None:
        """Revoke all credentials and issue no more, or issue them again."""
        (self.folder / "revoked").touch() if revoked else (self.folder / "revoked").unlink()

    def refusal(self, request: BaseHTTPRequestHandler, body: bytes) -> bytes | None:
        """Return S3's response to a request with invalid credentials; None if they are valid."""
        name = request.headers.get("Authorization", "").partition("Credential=")[2].partition("/")[0]
        file = self.folder / f"{name}.json"
        if not file.exists() or (self.folder / "revoked").exists():
            return b"<Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist.</Message></Error>"
        keys = json.loads(file.read_text())
        if request.headers.get("x-amz-security-token") != keys["SessionToken"]:
            return b"<Error><Code>InvalidToken</Code><Message>The provided token is malformed.</Message></Error>"
        expired = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
        return expired if time.time() > keys["expires"] else None


@contextmanager
def issuing_s3(server: S3Server, issuer: Issuer) -> Iterator[str]:
    """Yield the URL of an S3 server that accepts the issuer's credentials, and forwards to ``server``."""
    known = server.environment()
    signer = S3SigV4Auth(
        Credentials(known["AWS_ACCESS_KEY_ID"], known["AWS_SECRET_ACCESS_KEY"]), "s3", known["AWS_REGION"]
    )

    def sign(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
        kept = {
            name: value
            for name, value in headers.items()
            if name.lower() in ("content-length", "content-type", "range")
        }
        request = AWSRequest(method, server.endpoint_url + path, kept, body)
        signer.add_auth(request)
        return {"Host": server.endpoint_url.removeprefix("http://"), **dict(request.headers.items())}

    with faulty_s3(server.endpoint_url, interfere=issuer.refusal, sign=sign) as proxy:
        yield proxy.url
