"""From names to trackers: ``tensorboard``, ``mlflow``, ``wandb``, ``prometheus``, or one of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec

from raytrain.config.user_function import load_function
from raytrain.errors import UsageError, did_you_mean
from raytrain.runs.trackers.protocol import TrackedRun, Tracker
from raytrain.runs.trackers.tracker_thread import NamedTracker

_BUILT_IN = {
    "tensorboard": ("raytrain.runs.trackers.tensorboard", "TensorBoardTracker", "tensorboardX"),
    "mlflow": ("raytrain.runs.trackers.mlflow", "MLflowTracker", "mlflow"),
    "wandb": ("raytrain.runs.trackers.wandb", "WandbTracker", "wandb"),
    "prometheus": ("raytrain.runs.trackers.prometheus", "PrometheusTracker", "prometheus_client"),
}
"""Module, class, and the package that it needs, which the extra of the tracker's name installs."""


def open_trackers(trackers: Sequence[str | Tracker]) -> list[NamedTracker]:
    """The trackers of a run, each under a name of its own; nothing is sent or opened yet.

    Raises UsageError if a name means nothing, if a package is not installed, or if an object is no tracker.
    """
    opened: list[NamedTracker] = []
    for place, tracker in enumerate(trackers):
        if isinstance(tracker, str) and tracker in trackers[:place]:
            continue
        named = _by_name(tracker) if isinstance(tracker, str) else _of_object(tracker)
        number = sum(other.name.partition("#")[0] == named.name for other in opened) + 1
        opened.append(named if number == 1 else named._replace(name=f"{named.name}#{number}"))
    return opened


def _by_name(name: str) -> NamedTracker:
    if name in _BUILT_IN:
        return NamedTracker(name, _built_in(name, *_BUILT_IN[name]))
    if ":" not in name:
        hint = did_you_mean(name, _BUILT_IN)
        known = ", ".join(_BUILT_IN)
        raise UsageError(f"There is no tracker {name!r}{hint}; give {known}, or package.module:Class.")
    own = load_function("--track", name)

    def make(run: TrackedRun) -> Tracker:
        return own()

    return NamedTracker(name, make)


def _built_in(name: str, module: str, kind: str, needs: str) -> Callable[[TrackedRun], Tracker]:
    if find_spec(needs) is None:
        raise UsageError(f"--track {name} needs the package {needs}: `pip install 'raytrain[{name}]'`.")
    return lambda run: getattr(import_module(module), kind)(run)


def _of_object(tracker: object) -> NamedTracker:
    if isinstance(tracker, type) or not isinstance(tracker, Tracker):
        raise UsageError(
            f"trackers has {tracker!r}, which is no tracker: it needs the methods log_hyperparams, log_metrics and "
            "finalize."
        )

    def make(run: TrackedRun) -> Tracker:
        return tracker

    return NamedTracker(type(tracker).__name__, make)
