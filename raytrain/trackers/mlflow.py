"""MLflow: a run on the server that ``MLFLOW_TRACKING_URI`` names."""

# mlflow is typed in parts only.
# pyright: basic
from __future__ import annotations

import os
import shlex
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

from raytrain.trackers.pictures import Pixels, contact_sheet
from raytrain.trackers.tracker import TrackedRun

_MAX_KEY, _MAX_VALUE = 250, 500  # characters; newer servers take longer values
_MAX_METRICS, _MAX_PARAMS = 1000, 100  # of one request
_STATUS = {"success": "FINISHED", "failed": "FAILED"}
_STOP_TAG = "raytrain.stop"
_URL_TAG = "raytrain.run"  # the URL of the run in its storage
_SWEEP_TAG = "raytrain.sweep"  # groups the trials of a sweep on the page of MLflow


class MLflowTracker:
    """One run of MLflow. Metrics are kept until :meth:`save`, which sends a thousand at a time.

    ``place`` is the URL of the run's page, or, without a server, the command that shows it.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        mlflow_run = self._earlier_run(run)
        if mlflow_run is None:
            # The experiment that the environment names; MLflow's default without one.
            experiment_id = os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
            if name := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
                experiment_id = self._experiment_called(name)
            tags = {_URL_TAG: run.store.url, **({_SWEEP_TAG: run.sweep.name} if run.sweep else {})}
            mlflow_run = self._client.create_run(experiment_id, run_name=run.name, tags=tags)
        self.run_id: str = mlflow_run.info.run_id
        self._client.update_run(self.run_id, status="RUNNING")
        self._client.set_tag(self.run_id, _STOP_TAG, "false")  # undoes a stop of an earlier attempt
        self._params: dict[str, str] = mlflow_run.data.params
        self._tags: dict[str, str] = mlflow_run.data.tags  # among them options that a resume has changed
        self._metrics: list[Metric] = []
        page = f"/#/experiments/{mlflow_run.info.experiment_id}/runs/{self.run_id}"
        uri: str = self._client.tracking_uri
        command = shlex.join(["mlflow", "ui", "--backend-store-uri", uri])
        self.place = uri.rstrip("/") + page if uri.startswith("http") else command

    def _experiment_called(self, name: str) -> str:
        """Return the ID of an experiment; create it if needed, unless another trial does so at the same moment."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return self._client.create_experiment(name)
            except MlflowException:
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return experiment.experiment_id

    def _earlier_run(self, run: TrackedRun) -> Run | None:
        """Return MLflow's run of an earlier attempt; None if there is none.

        The ID in the folder of a run may be of somebody else's run, so the run must be tagged with our URL.
        """
        if run.id is not None:
            with suppress(MlflowException):
                stored = self._client.get_run(run.id)
                if stored.data.tags.get(_URL_TAG) == run.store.url and stored.info.lifecycle_stage == "active":
                    return stored
        return None

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Send the options. MLflow's parameters cannot change: one that a resume changed becomes a tag of its name."""
        text_of_option = {key[:_MAX_KEY]: str(value)[:_MAX_VALUE] for key, value in params.items()}
        new_params = iter([Param(key, text) for key, text in text_of_option.items() if key not in self._params])
        while group := list(islice(new_params, _MAX_PARAMS)):
            self._client.log_batch(self.run_id, params=group)

        # What MLflow has is the tag of an earlier change, or else the parameter; one sent just now is up to date.
        for key, text in text_of_option.items():
            stored_text = self._tags.get(key, self._params.get(key, text))
            if stored_text != text:
                self._client.set_tag(self.run_id, key, text)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the numbers of a row, with the time of day, until :meth:`save`."""
        time_ms = int(time.time() * 1000)
        self._metrics += [Metric(name, value, time_ms, step) for name, value in metrics.items()]

    def save(self) -> None:
        """Send the numbers that were kept. If that fails, they are lost here; the caller knows from which row on."""
        metrics = iter(self._metrics)
        self._metrics = []
        while group := list(islice(metrics, _MAX_METRICS)):
            self._client.log_batch(self.run_id, metrics=group)

    def log_image(self, key: str, images: Sequence[Pixels], step: int, caption: Sequence[str]) -> None:
        """Send images, joined into one, which MLflow shows with a slider over the steps."""
        self._client.log_image(self.run_id, contact_sheet(images, caption), key=key, step=step)

    def log_network(self, file: str) -> None:
        """Send the last checkpoint, as an artifact."""
        self._client.log_artifact(self.run_id, file, "checkpoints")

    def stop_requested(self) -> bool:
        """Return True if somebody has set the tag ``raytrain.stop`` to true."""
        return self._client.get_run(self.run_id).data.tags.get(_STOP_TAG, "").strip().lower() == "true"

    def finalize(self, status: str) -> None:
        """End the run; a resume opens it again."""
        self._client.set_terminated(self.run_id, _STATUS[status])
