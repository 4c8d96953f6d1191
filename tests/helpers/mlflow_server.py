"""An MLflow server: ``python -m tests.helpers.mlflow_server FOLDER`` prints its URL, and serves until it is killed."""

from __future__ import annotations

import os
import sys

from werkzeug.serving import make_server


def main(folder: str) -> None:
    os.environ["_MLFLOW_SERVER_FILE_STORE"] = f"sqlite:///{folder}/mlflow.db"
    os.environ["_MLFLOW_SERVER_ARTIFACT_ROOT"] = f"{folder}/artifacts"
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow.server import app

    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
