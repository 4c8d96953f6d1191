"""Opens the trackers of a run, which are given by name or as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TypeAlias, cast

from raytrain.config.extras import require_package
from raytrain.config.named_functions import load_function
from raytrain.errors import UsageError, did_you_mean
from raytrain.trackers.tracker import Tracker
from raytrain.trackers.tracker_threads import NamedTracker

Trackers: TypeAlias = "str | Tracker | Sequence[str | Tracker]"
"""A name of a tracker, an object that is one, or several of these."""
_BUILT_IN = {
    "tensorboard": ("raytrain.trackers.tensorboard", "TensorBoardTracker", "tensorboardX"),
    "mlflow": ("raytrain.trackers.mlflow", "MLflowTracker", "mlflow"),
    "wandb": ("raytrain.trackers.wandb", "WandbTracker", "wandb"),
    "prometheus": ("raytrain.trackers.prometheus", "PrometheusTracker", "prometheus_client"),
}
"""Module, class, and required package of each tracker. The extra called like the tracker installs the package."""


def open_trackers(*several: Trackers) -> list[NamedTracker]:
    """Return the trackers of a run, each under a name of its own; each is opened later, in its thread.

    A repeated name counts once, and the second object of one class is called ``Class#2``. Raises UsageError for what is
    no tracker, and for a tracker whose package or module cannot be imported::

        open_trackers(["tensorboard", "mlflow"], CSVLogger("logs"))
    """
    trackers = [tracker for names_or_objects in several for tracker in as_list(names_or_objects)]
    named_trackers: list[NamedTracker] = []
    for index, tracker in enumerate(trackers):
        if isinstance(tracker, str) and tracker in trackers[:index]:
            continue
        named = _named_tracker(tracker)
        num_earlier = sum(earlier.name.partition("#")[0] == named.name for earlier in named_trackers)
        if num_earlier:
            named = replace(named, name=f"{named.name}#{num_earlier + 1}")
        named_trackers.append(named)
    return named_trackers


def as_list(trackers: object) -> list[object]:
    """Return the elements of ``trackers``. A name, a tracker, or an object that cannot be iterated is the only one."""
    if isinstance(trackers, (str, Tracker)) or not isinstance(trackers, Iterable):
        return [trackers]
    return list(cast("Iterable[object]", trackers))


def _named_tracker(tracker: object) -> NamedTracker:
    """Return a tracker, which may be given as an object or by name, with its name.

    Raises UsageError if ``tracker`` is neither a tracker nor the name of one, if the package that it needs is missing,
    or if the user's module cannot be imported.
    """
    # An object of the user's.
    if not isinstance(tracker, str):
        if isinstance(tracker, type) or not isinstance(tracker, Tracker):
            raise UsageError(
                f"trackers has {tracker!r}, which is no tracker: it needs the methods log_hyperparams, log_metrics and "
                "finalize."
            )
        return NamedTracker(type(tracker).__name__, lambda run: tracker)

    # The name of a built-in tracker, whose package may be missing.
    if tracker in _BUILT_IN:
        module, class_name, package = _BUILT_IN[tracker]
        require_package(f"--track {tracker}", package, tracker)
        return NamedTracker(tracker, lambda run: getattr(import_module(module), class_name)(run))

    # The name of a class of the user's.
    if ":" not in tracker:
        hint = did_you_mean(tracker, _BUILT_IN)
        built_in = ", ".join(_BUILT_IN)
        raise UsageError(f"There is no tracker {tracker!r}{hint}; give {built_in}, or package.module:Class.")
    make = load_function("--track", tracker)
    return NamedTracker(tracker, lambda run: _make_tracker(make))


def _make_tracker(make: Callable[[], object]) -> Tracker:
    """Call a class or a function of the user's; raise UsageError unless it returns a tracker."""
    tracker = make()
    if isinstance(tracker, type) or not isinstance(tracker, Tracker):
        returned = "nothing" if tracker is None else f"{tracker!r}, which is no tracker"
        raise UsageError(
            f"it returned {returned}; return an object with the methods log_hyperparams, log_metrics and finalize"
        )
    return tracker
