"""MLflow: a run on the server that ``MLFLOW_TRACKING_URI`` names."""

# mlflow is typed in parts only.
# pyright: basic
from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # standard output belongs to the command
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # and standard error to the run's picture

from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from raytrain.trackers.pictures import Pixels, sheet
from raytrain.trackers.tracker import TrackedRun

_MAX_KEY, _MAX_VALUE = 250, 500  # characters; newer servers take longer values
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # of one request
_STATUS = {"success": "FINISHED", "failed": "FAILED"}
_URL_TAG = "raytrain.run"  # says which run of ours a run of MLflow is


class MLflowTracker:
    """One run of MLflow. Metrics are gathered until :meth:`save`, and sent by the thousand."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        known = self._find(run)
        if known is None:
            known = self._client.create_run(
                _experiment(self._client), run_name=run.name, tags={_URL_TAG: run.store.url}
            )
        self.run_id: str = known.info.run_id
        page = f"/#/experiments/{known.info.experiment_id}/runs/{self.run_id}"
        uri: str = self._client.tracking_uri
        self.place = uri.rstrip("/") + page if uri.startswith("http") else f"mlflow ui --backend-store-uri {uri}"
        self._client.update_run(self.run_id, status="RUNNING")
        self._logged: dict[str, str] = known.data.params
        self._metrics: list[Metric] = []

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Send the options. MLflow lets none change: one that a resume changed becomes a tag of the same name."""
        texts = {key[:_MAX_KEY]: str(value)[:_MAX_VALUE] for key, value in params.items()}
        new = iter([Param(key, text) for key, text in texts.items() if key not in self._logged])
        while group := list(islice(new, _MAX_PARAMS)):
            self._client.log_batch(self.run_id, params=group)
        for key, text in texts.items():
            if self._logged.get(key, text) != text:
                self._client.set_tag(self.run_id, key, text)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Gather a row."""
        now = int(time.time() * 1000)
        self._metrics += [Metric(name, value, now, step) for name, value in metrics.items()]

    def save(self) -> None:
        """Send the rows."""
        rows = iter(self._metrics)
        self._metrics = []
        while group := list(islice(rows, _MAX_METRICS)):
            self._client.log_batch(self.run_id, metrics=group)

    def log_image(self, key: str, images: Sequence[Pixels], step: int, caption: Sequence[str]) -> None:
        """Send images as one, for which MLflow has a slider over the steps."""
        self._client.log_image(self.run_id, sheet(images, caption), key=key, step=step)

    def log_network(self, file: str) -> None:
        """Send the last checkpoint, as an artifact."""
        self._client.log_artifact(self.run_id, file, "checkpoints")

    def finalize(self, status: str) -> None:
        """End the run; a resume opens it again."""
        self._client.set_terminated(self.run_id, _STATUS[status])

    def _find(self, run: TrackedRun) -> Run | None:
        """The run of an earlier start. A run's folder may name any ID: only one that is tagged with the run counts."""
        if run.id is not None:
            with suppress(MlflowException):
                found = self._client.get_run(run.id)
                if found.data.tags.get(_URL_TAG) == run.store.url and found.info.lifecycle_stage == "active":
                    return found
        return None


def _experiment(client: MlflowClient) -> str:
    """The ID of the experiment that the environment names; MLflow's default without one."""
    if name := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
        found = client.get_experiment_by_name(name)
        return found.experiment_id if found else client.create_experiment(name)
    return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
