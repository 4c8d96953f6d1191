"""Lets the objects of ``torchmetrics`` that a loop has prepared measure the images of all workers.

Their own way to join the workers would wait for ever if a worker has no image yet. So their states are gathered here,
and merged by each metric's ``merge_state``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist

from raytrain.errors import UsageError

_PREPARED = "leaves_out_placeholders"  # an attribute that marks the method ``update`` of a prepared metric


def is_metric(thing: object) -> bool:
    """Return whether ``thing`` is a metric or a collection of ``torchmetrics``, by its methods.

    So ``torchmetrics`` is not imported, and need not be installed.
    """
    methods = {name for name in ("persistent", "increment", "compute", "reset") if callable(getattr(thing, name, None))}
    return {"compute", "reset"} < methods  # a MetricTracker has increment, all others have persistent


def prepare_metric(metric: Any, is_placeholder: Callable[[], bool]) -> None:
    """Change ``metric`` in place: checkpoints then hold its state, and it learns nothing from a placeholder.

    ``is_placeholder`` tells, when the loop updates the metric, whether this worker has a placeholder at the moment.
    Raises UsageError for a ``MinMaxMetric`` and a ``MetricTracker``.
    """
    for part in metric.modules():  # wrappers hold other metrics, which have the states
        if type(part).__name__ == "MinMaxMetric":
            raise UsageError(
                "run.prepare got a MinMaxMetric, whose minimum and maximum are in no state, so that a resumed run "
                "would lose them; prepare the metric in it: the metrics history has all of its values."
            )
        if type(part).__name__ == "MetricTracker":
            raise UsageError(
                "run.prepare got a MetricTracker, whose list of metrics grows, so that a resumed run would lose them; "
                "prepare the metric in it: the metrics history has all of its values."
            )
        if is_metric(part):
            part.persistent(True)
    for member in _members(metric).values():
        member.update = _without_placeholders(member.update, is_placeholder)


def _without_placeholders(update: Callable[..., Any], is_placeholder: Callable[[], bool]) -> Callable[..., Any]:
    """Return a method that calls ``update`` of a metric, unless the worker has a placeholder."""

    @wraps(update)
    def update_with_images(*arguments: Any, **options: Any) -> None:
        if not is_placeholder():
            update(*arguments, **options)

    setattr(update_with_images, _PREPARED, True)
    return update_with_images


def joined_values(metric: Any, world_size: int) -> dict[str, Any]:
    """Return the values of ``metric`` over all workers' images, by their names in a collection, or "" for a single one.

    Every worker calls this. Raises UsageError if the metric is not prepared, because it would learn from placeholders,
    and lose its state in a resume.
    """
    if not all(hasattr(member.update, _PREPARED) for member in _members(metric).values()):
        raise UsageError(
            f"run.log got a {type(metric).__name__} that is not prepared, so a resumed run would lose what it has "
            "counted; give it to run.prepare before the first batch."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns of a metric that has seen no image yet
        return {name: _joined(member, world_size).compute() for name, member in _members(metric).items()}


def joined_state(metric: Any, world_size: int) -> dict[str, Any]:
    """Return the ``state_dict`` of ``metric`` with the states of all workers. Every worker calls this."""
    states = {name: _joined(member, world_size).state_dict() for name, member in _members(metric).items()}
    return {f"{name}.{key}" if name else key: value for name, state in states.items() for key, value in state.items()}


def _members(metric: Any) -> dict[str, Any]:
    """Return the metrics of a collection by name; a single one has the name ""."""
    return dict(metric.items()) if hasattr(metric, "items") else {"": metric}


def _joined(metric: Any, world_size: int) -> Any:
    """Return a copy of ``metric`` with the states of all workers, which no longer communicates itself.

    Every worker calls this. Raises UsageError if the metric has a state that cannot be merged.
    """
    joined = copy.deepcopy(metric)
    joined.distributed_available_fn = bool  # bool() is False: no process group for it
    if world_size == 1:
        return joined
    metrics_of_workers: list[Any] = [metric] * world_size
    dist.all_gather_object(metrics_of_workers, metric)
    joined.reset()
    try:
        for of_worker in metrics_of_workers:
            _merge(joined, of_worker.to(joined.device))
    except RuntimeError as error:
        raise UsageError(
            f"The states of {type(metric).__name__} on several workers cannot be merged ({error}); log sums of this "
            "worker's images as (numerator, denominator), or train on one worker."
        ) from None
    return joined


def _merge(metric: Any, other: Any) -> None:
    """Add the states of ``other`` to those of ``metric``, which is of the same class."""
    parts, parts_of_other = ([part for part in tree.modules() if is_metric(part)] for tree in (metric, other))
    for part, part_of_other in zip(parts, parts_of_other, strict=True):
        # A wrapper such as ClasswiseWrapper, or the sum of two metrics, has no states but those of the metrics in it.
        inner = [layer for layer in part.modules() if layer is not part and is_metric(layer)]
        states_of_inner = {name for layer in inner for name in layer.metric_state}
        if not inner or part.metric_state.keys() - states_of_inner:
            part.merge_state(part_of_other)
