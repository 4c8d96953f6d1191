"""A run in Weights & Biases, in the project that ``WANDB_PROJECT`` and the like name."""

# wandb is typed in parts only.
# pyright: basic
from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from raytrain.trackers.pictures import Pixels
from raytrain.trackers.tracker import TrackedRun

_EXIT_CODES = {"success": 0, "failed": 1}


class WandbTracker:
    """One run of W&B. Its standard variables, such as WANDB_API_KEY and WANDB_ENTITY, are read by wandb itself.

    ``place`` is the URL of the run's page, or, without a connection to W&B, the command that sends the run there.
    """

    def __init__(self, run: TrackedRun) -> None:
        # Without stop_fn, "Stop run" on W&B's page sends a SIGINT to this process, as older versions always do. That
        # stops a run in the main thread, too, but it would also end a notebook's cell or a script around the run.
        self._is_to_stop = threading.Event()
        settings: dict[str, Any] = {"console": "off", "silent": True}  # the terminal shows the run
        if "stop_fn" in wandb.Settings.model_fields:
            settings["stop_fn"] = lambda: self._is_to_stop.set()  # wandb copies it deeply, which a method cannot be
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "raytrain"),
            name=run.name,
            group=run.sweep.name if run.sweep else None,  # None: the group that W&B's own variable names, if any
            id=run.id,
            resume="allow",
            reinit="create_new",  # a notebook may have a run of its own
            settings=wandb.Settings(**settings),
        )
        self.run_id: str = self._run.id
        sync = shlex.join(["wandb", "sync", self._run.settings.sync_dir])
        self.place = sync if self._run.offline else self._run.url or sync

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Send the options; a resume may change them."""
        self._run.config.update(params, allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue a row, which wandb sends in a process of its own."""
        self._run.log(dict(metrics), step=step)

    def log_image(self, key: str, images: Sequence[Pixels], step: int, caption: Sequence[str]) -> None:
        """Queue images. They are sent with W&B's latest step, because it drops everything for an earlier step."""
        shown = [wandb.Image(pixels, caption=text) for pixels, text in zip(images, caption, strict=True)]
        self._run.log({key: shown}, step=max(step, self._run.step))

    def log_network(self, file: str) -> None:
        """Send the last checkpoint, as an artifact."""
        artifact = wandb.Artifact(f"network-{self.run_id}", type="model")
        artifact.add_file(file)
        self._run.log_artifact(artifact)

    def stop_requested(self) -> bool:
        """Return True if somebody has pressed "Stop run"."""
        return self._is_to_stop.is_set()

    def finalize(self, status: str) -> None:
        """End the run; a resume opens it again."""
        self._run.finish(exit_code=_EXIT_CODES[status])
