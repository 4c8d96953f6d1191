from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """The URL of an S3 server that knows conditional writes, as Amazon's does."""
    # Here, comparing the condition of a write and writing are one step, as on Amazon's servers. By itself, moto lets
    # another write come in between, so that two writers with the same condition may win.
    write, writing = S3Response.put_object, threading.Lock()

    def write_alone(response: S3Response) -> Any:
        with writing:
            return write(response)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "testing")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "testing")
        client: Any = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="tests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", write_alone)
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def moto_url(moto_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto_server)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://tests/{uuid.uuid4().hex[:8]}"
