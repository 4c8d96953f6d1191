"""Questions to Ray: whether head and raylet answer, how full object stores are, which tasks and machines wait.

The calls are undocumented, so another version of Ray may lack them: each function says what it returns then.
"""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from functools import cache
from typing import Any

from raytrain.launch.ray.private_api import AUTOSCALER_STATUS, WORKER

_OBJECT_STORE = "object_store_memory"
_AUTOSCALER_STATUS = b"__autoscaling_status"
_CPU_STEP = 1e-4  # the smallest fraction of a CPU in Ray
_RAYLET_ANSWERS_WITHIN_S = 5.0


def head_answers(timeout_s: float) -> bool:
    """Return whether the cluster's head answers within ``timeout_s``; True if this Ray offers no way to ask it."""
    from ray.exceptions import RayError

    api = WORKER.find()
    try:
        with suppress(AttributeError):
            if api:
                (worker,) = api
                worker.gcs_client.check_alive([], timeout=timeout_s)
    except RayError:
        return False
    return True


def raylet_answers() -> bool:
    """Return whether this node's raylet, Ray's process on each node, is alive; True if its address is not known.

    Ray itself is not asked, because many of its calls silently end this process if the raylet is dead. The first call
    asks the head for the raylet's address, so it has to come while the raylet lives.
    """
    try:
        if client := connect_to_raylet():
            client.close()
    except (ConnectionRefusedError, FileNotFoundError):  # nobody listens
        return False
    except OSError:  # it may be busy, with a full queue, or this process may have no descriptor left
        return True
    return True


def connect_to_raylet() -> socket.socket | None:
    """Return a connection to this node's raylet, which ends with the raylet; None if its address is not known.

    The raylet logs a line for each connection that ends. Raises OSError if it does not answer within 5 seconds.
    """
    import ray

    path = _raylet_socket(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None
    if not path:
        return None
    client = socket.socket(socket.AF_UNIX)
    try:
        client.settimeout(_RAYLET_ANSWERS_WITHIN_S)
        client.connect(path)
    except OSError:
        client.close()
        raise
    return client


@cache
def _raylet_socket(node_id: str) -> str | None:
    """Return the path of the socket of a node's raylet; None if it is not known."""
    import ray
    from ray.exceptions import RayError

    records: Any = []
    with suppress(RayError):  # the head does not answer
        records = ray.nodes()
    return next((record.get("RayletSocketName") for record in records if record["NodeID"] == node_id), None)


def object_store_use(timeout_s: float) -> dict[str, tuple[int, int]]:
    """Return the used and the total bytes of each node's object store, by the node's ID; {} if this Ray cannot tell.

    The head has these numbers at hand, and answers within a millisecond. Raises RayError if it does not answer.
    """
    uses: dict[str, tuple[int, int]] = {}
    with suppress(AttributeError):
        for node in _resource_usage(timeout_s).batch:
            total = node.resources_total.get(_OBJECT_STORE, 0.0)
            uses[node.node_id.hex()] = int(total - node.resources_available.get(_OBJECT_STORE, 0.0)), int(total)
    return uses


def num_waiting_tasks(cpus: float, timeout_s: float) -> int:
    """Return the number of tasks in the cluster that need ``cpus`` CPUs and nothing else, and wait for room.

    0 if this Ray cannot tell. Raises RayError if the head does not answer.
    """
    waiting = 0
    with suppress(AttributeError):
        for demand in _resource_usage(timeout_s).resource_load_by_shape.resource_demands:
            if demand.shape.keys() == {"CPU"} and abs(demand.shape["CPU"] - cpus) < _CPU_STEP:
                waiting += demand.num_ready_requests_queued + demand.num_infeasible_requests_queued
    return waiting


def _resource_usage(timeout_s: float) -> Any:
    """Return the head's record of the nodes' resources.

    Raises AttributeError if this Ray has none of this form, and RayError if the head does not answer.
    """
    api = WORKER.find()
    if api is None:
        raise AttributeError(WORKER.lost)
    (worker,) = api
    reply: Any = worker.gcs_client.get_all_resource_usage(timeout=timeout_s)
    return reply.resource_usage_data


def autoscaler_problems() -> list[str]:
    """Return, for each type of machine that does not start, the reason in the cloud's words; [] without an autoscaler.

    [] also if this Ray cannot tell.

    Example: ``["gpu_8x: You have requested more vCPU capacity than your current vCPU limit allows."]``
    """
    status: bytes | None = None
    if api := AUTOSCALER_STATUS.find():
        (get_from_head,) = api
        status = get_from_head(_AUTOSCALER_STATUS)
    report: Any = json.loads(status or b"{}").get("autoscaler_report") or {}
    node_types = report.get("node_availability_summary", {}).get("node_availabilities", {}).values()
    problems = [(node_type["node_type"], node_type.get("unavailable_node_information")) for node_type in node_types]
    return [f"{name}: {problem['description']}" for name, problem in problems if problem]
