"""Azure Blob Storage on this machine: Azurite, Microsoft's emulator, which checks signatures."""

from __future__ import annotations

import base64
import os
import re
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

import pytest

from raytrain.demo.s3_server import START_TIMEOUT_S
from tests.helpers.waiting import wait_for

ACCOUNT = "raytrain"


@dataclass(frozen=True)
class Azurite:
    """An emulator that runs, with a container ``tests``."""

    endpoint_url: str
    key: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """The variables with which a process reaches it. They contain the account's key."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ENDPOINT": self.endpoint_url,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
        }

    def create_container(self, name: str) -> None:
        from azure.storage.blob import BlobServiceClient  # takes half a second, and few tests need it

        BlobServiceClient(self.endpoint_url, credential=self.key).create_container(name)

    def signature(self, permissions: str) -> str:
        """A shared access signature of the container ``tests`` with permissions such as ``rl``."""
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        allowed = ContainerSasPermissions.from_string(permissions)
        return generate_container_sas(ACCOUNT, "tests", account_key=self.key, permission=allowed, expiry="2199-01-01")


@contextmanager
def azurite() -> Iterator[Azurite]:
    """Run the emulator; skip the test if it is not installed."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("azurite is not installed; see CONTRIBUTING.md")
    key = base64.b64encode(secrets.token_bytes(64)).decode()
    address = ["--blobHost", "127.0.0.1", "--blobPort", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [program, *address, "--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck"],
            env=os.environ | {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            server = Azurite(f"{_announced_url(process, log)}/{ACCOUNT}", key)
            server.create_container("tests")
            yield server
        finally:
            process.terminate()
            process.wait()


def _announced_url(process: subprocess.Popen[bytes], log: IO[str]) -> str:
    """The URL that it writes to its log when it listens."""

    def written() -> str:
        log.seek(0)
        return log.read()

    pattern = re.compile(r"successfully listens on (http://\S+)")
    wait_for(lambda: pattern.search(written()) or process.poll() is not None, "azurite does not start", START_TIMEOUT_S)
    found = pattern.search(written())
    assert found, f"azurite did not start: {written()}"
    return found[1]
