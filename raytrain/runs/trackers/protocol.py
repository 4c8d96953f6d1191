"""What a tracker is: three methods with Lightning's names, so that Lightning's loggers are trackers too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from raytrain.storage.base import Store

TrackerStatus = Literal["success", "failed"]


@runtime_checkable
class Tracker(Protocol):
    """Gets what a run measures, from one thread. Whatever it raises, and however long it takes, the run goes on.

    A tracker may have more methods, which are called if they exist:

    - ``save()`` after each group of calls of ``log_metrics``, to send or flush what it has gathered;
    - ``log_image(key, images, step, caption)``, as Lightning's, after an evaluation: a list of images, each of uint8,
      (H, W, 3), and a list of their captions, which may have two lines;
    - ``log_network(file)`` at the end, with the path of the run's last checkpoint.
    """

    def log_hyperparams(self, params: dict[str, str | int | float]) -> None:
        """Take the options of the run, in a flat dictionary. Called once in each start of the run."""
        ...

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Take numbers by name, after ``step`` completed steps. A number may be NaN or infinite."""
        ...

    def finalize(self, status: TrackerStatus) -> None:
        """The run has ended: ``success`` if it finished or was stopped, otherwise ``failed``. It may resume later."""
        ...


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for: its name and storage, and the ``id`` that an earlier start had there."""

    name: str
    store: Store
    id: str | None = None
