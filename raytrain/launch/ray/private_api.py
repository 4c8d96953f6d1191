"""Everything that raytrain uses of Ray which Ray does not document, in one list: what it is, and what it is for.

Ray may change these in any release, so ``pyproject.toml`` allows one minor version only, and a test loads each of them.
Nothing is imported before it is used: ``ray.train`` alone takes seconds, and most processes need none of it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True)
class PrivateApi:
    """Something undocumented: ``name`` (dotted, below ``module``), and what it is used for."""

    module: str
    name: str
    purpose: str

    def load(self) -> Any:
        """The thing itself; raises ImportError that says what this version of Ray lacks."""
        try:
            return reduce(getattr, self.name.split("."), importlib.import_module(self.module))
        except (ImportError, AttributeError) as error:
            import ray

            raise ImportError(
                f"Ray {ray.__version__} has no {self.module}.{self.name}, which raytrain uses to {self.purpose}."
            ) from error


NODE_ID_LABEL = PrivateApi("ray._raylet", "RAY_NODE_ID_KEY", "place an actor on the driver's node")
GCS_CLIENT = PrivateApi(
    "ray._raylet", "GcsClient", "ask a cluster for an answer at once, where ray.init tries for minutes"
)
ENABLE_TOKEN = PrivateApi(
    "ray._private.authentication.authentication_token_setup",
    "maybe_enable_token_auth_if_token_available",
    "show this machine's token to a cluster at a plain HOST:PORT, as Ray does only for one that it finds by itself",
)
READ_VARIABLES = PrivateApi(
    "ray._raylet", "Config.initialize", "set variables in a process that has imported Ray, which reads them only once"
)
CONSTANTS = PrivateApi("ray._private", "ray_constants", READ_VARIABLES.purpose)
CONNECTS_BY_ITSELF = PrivateApi("ray._private.auto_init_hook", "enable_auto_connect", READ_VARIABLES.purpose)
NODE = PrivateApi(
    "ray._private.node", "Node", "start a cluster on this machine without the processes that show and scale it"
)
NODE_PARAMETERS = PrivateApi("ray._private.parameter", "RayParams", NODE.purpose)
TRAIN_CONTEXT = PrivateApi(
    "ray.train.v2._internal.execution.context",
    "get_train_context",
    "see an announced preemption without the barrier that ray.train.get_preemption_info is",
)
CONTROLLER_CALLBACK = PrivateApi(
    "ray.train.v2._internal.execution.callback",
    "ControllerCallback",
    "get the controller's handle, which is the only way to end workers that Ray Train would restart",
)
DEFAULT_CALLBACKS = PrivateApi(
    "ray.train.torch",
    "TorchTrainer._create_default_callbacks",
    "leave out callbacks that each start a process no run here needs",
)
RUN_CONTROLLER = PrivateApi(
    "ray.train.torch",
    "TorchTrainer._initialize_and_run_controller",
    "give a run whose workers fit a policy that asks for no machines, which takes a process",
)
FIXED_SCALING_POLICY = PrivateApi(
    "ray.train.v2._internal.execution.scaling_policy.fixed", "FixedScalingPolicy", RUN_CONTROLLER.purpose
)
EXECUTION_CALLBACK = PrivateApi(
    "ray.data._internal.execution.execution_callback",
    "ExecutionCallback",
    "give Ray Data's scheduling loop a pause, which otherwise takes a whole core",
)
REF_BUNDLES = PrivateApi(
    "ray.data", "Dataset.iter_internal_ref_bundles", "pass blocks on by reference, without a copy in the driver"
)
WORKER = PrivateApi(
    "ray._private.worker",
    "global_worker",
    "see that a task is repeated, because its process died, that the head of the cluster does not answer, and how full "
    "the object stores are",
)
AUTOSCALER_STATUS = PrivateApi(
    "ray._private.ray_constants", "DEBUG_AUTOSCALING_STATUS", "say why no more machines come, such as a cloud's quota"
)
WORKER_PROGRAM = PrivateApi(
    "ray._private.workers.default_worker", "__file__", "fork Ray's processes from one that has imported what they need"
)
ACTOR_CLASS_ID = PrivateApi("ray.actor", "ActorClassID", WORKER_PROGRAM.purpose)
JOB_SERVER_REQUEST = PrivateApi(
    "ray.dashboard.modules.dashboard_sdk", "SubmissionClient._do_request", "ask a job server for its version of Ray"
)

PRIVATE_APIS = tuple(each for each in dict(globals()).values() if isinstance(each, PrivateApi))
_OBJECT_STORE = "object_store_memory"
CURRENT_CLUSTER_FILE = "ray_current_cluster"
"""Below Ray's temporary folder: the address of the cluster that ``ray start --head`` started on this machine."""
LOOPBACK_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With this, Ray uses 127.0.0.1 as the node's address, as it does by default on macOS, and listens nowhere else."""


def on_this_node() -> dict[str, str]:
    """The label selector of actors and tasks that must run on the node of this process."""
    import ray

    return {NODE_ID_LABEL.load(): ray.get_runtime_context().get_node_id()}


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process, so that Ray sees them, too, if it has been imported already."""
    os.environ.update(variables)
    if "ray" in sys.modules:
        read_variables()


def read_variables() -> None:
    """Have Ray read this process's variables, which it otherwise does only when it is imported."""
    READ_VARIABLES.load()("")
    importlib.reload(CONSTANTS.load())
    hook = importlib.import_module(CONNECTS_BY_ITSELF.module)
    setattr(hook, CONNECTS_BY_ITSELF.name, os.environ.get("RAY_ENABLE_AUTO_CONNECT") != "0")


@contextmanager
def on_loopback() -> Iterator[None]:
    """While open, this process is a node of a cluster that was started with :data:`LOOPBACK_ENVIRONMENT`."""
    (name,) = LOOPBACK_ENVIRONMENT
    before = os.environ.get(name)
    set_variables(LOOPBACK_ENVIRONMENT)
    try:
        yield
    finally:
        del os.environ[name]
        set_variables({} if before is None else {name: before})


@contextmanager
def unseeded_ids() -> Iterator[None]:
    """While open, a class that is declared an actor gets an ID from the system instead of Ray's random generator.

    Ray seeds its generator once, at the first use. Processes forked later would all draw the same IDs for their tasks,
    and an actor that gets two tasks with one ID crashes.
    """
    module = importlib.import_module(ACTOR_CLASS_ID.module)
    id_type = ACTOR_CLASS_ID.load()
    setattr(module, ACTOR_CLASS_ID.name, SimpleNamespace(from_random=lambda: id_type(os.urandom(id_type.size()))))
    try:
        yield
    finally:
        setattr(module, ACTOR_CLASS_ID.name, id_type)


def start_head() -> Any:
    """Start a cluster on this machine, at the ``gcs_address`` of what is returned. It ends with this process.

    ``ray.init`` would start three more Python processes: a server for a dashboard even without a dashboard, one that
    sends logs to drivers, and an autoscaler. Each takes two to four seconds of a core.
    """
    node_type: Any = NODE.load()

    class Head(node_type):
        def start_api_server(self, **_: Any) -> None:
            """Start none."""

    parameters = NODE_PARAMETERS.load()(include_dashboard=False, include_log_monitor=False, no_monitor=True)
    return Head(parameters, head=True, shutdown_at_exit=True, spawn_reaper=True)


def announced_preemption() -> Any:
    """What Ray Train has told this worker of nodes that will be taken away; None as long as there is nothing."""
    return TRAIN_CONTEXT.load()().preemption_context.preemption_info


def is_repeated_task() -> bool:
    """Whether this task was begun before, by a process that died, or is repeated because its result was lost."""
    import ray

    return ray.is_initialized() and WORKER.load().core_worker.get_current_task_attempt_number() > 0


def object_store_use(timeout_s: float) -> dict[str, tuple[int, int]]:
    """The bytes that each node's object store holds, and has room for, by node ID; RayError without an answer."""
    reply: Any = WORKER.load().gcs_client.get_all_resource_usage(timeout=timeout_s)
    uses: dict[str, tuple[int, int]] = {}
    for node in reply.resource_usage_data.batch:
        total = node.resources_total.get(_OBJECT_STORE, 0.0)
        uses[node.node_id.hex()] = int(total - node.resources_available.get(_OBJECT_STORE, 0.0)), int(total)
    return uses


def autoscaler_problems() -> list[str]:
    """Why machines do not start, in the cloud's words, for each type of them; empty if Ray's autoscaler knows none."""
    from ray.experimental.internal_kv import _internal_kv_get  # pyright: ignore

    written: bytes | None = _internal_kv_get(AUTOSCALER_STATUS.load().encode())
    report: Any = json.loads(written or b"{}").get("autoscaler_report") or {}
    types = report.get("node_availability_summary", {}).get("node_availabilities", {}).values()
    problems = [(each["node_type"], each.get("unavailable_node_information")) for each in types]
    return [f"{name}: {problem['description']}" for name, problem in problems if problem]
