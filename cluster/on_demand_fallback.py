"""Has Ray's autoscaler (version 1) start on-demand machines if there are no spot ones. Runs on the head.

Ray notes for half an hour that it got no machine of a type, and by default goes on to ask for the same type.
"""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer


def score(
    node_resources: dict[str, float],
    resources: list[dict[str, float]],
    node_type: str,
    *,
    node_availability_summary: Any,
) -> tuple[Any, ...] | None:
    """Return Ray's own score of a node type for the resources that tasks wait for; None if nothing fits.

    A type of which Ray got machines lately comes before the others. Only Ray's first criterion counts more: tasks that
    need no GPU get no machine with GPUs.
    """
    options = {"node_availability_summary": node_availability_summary}
    scored = _default_utilization_scorer(node_resources, resources, node_type, **options)
    if scored is None:
        return None
    record = node_availability_summary.node_availabilities.get(node_type)
    return scored[0], record is None or record.is_available, *scored[1:]
