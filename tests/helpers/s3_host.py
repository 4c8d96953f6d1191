"""An S3 server for other hosts: ``python -m tests.helpers.s3_host FOLDER ADDRESS`` prints the variables to reach it."""

from __future__ import annotations

import json
import sys

from raytrain.demo.s3_server import S3Server
from tests.helpers.dropping_proxy import DroppingProxy

_PORT = 9000


def main(folder: str, address: str) -> None:
    """Serve the buckets in ``folder`` at ``ADDRESS:9000`` until standard input ends."""
    with S3Server(folder) as server:
        inside = int(server.endpoint_url.rpartition(":")[2])
        with DroppingProxy(inside, (address, _PORT)):
            print(json.dumps(server.environment() | {"AWS_ENDPOINT_URL": f"http://{address}:{_PORT}"}), flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
