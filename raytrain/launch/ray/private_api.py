"""Undocumented parts of Ray that raytrain uses, in one list: what each is, and what is lost without it.

Ray may change these in any release. Each is an :class:`Improvement`: a Ray that lacks one trains without it, and
`raytrain doctor` says what that costs. Whoever uses one asks for it, and goes on without if there is none::

    if api := RESERVED.find():
        ...

The functions below the list change something inside of Ray, in this process. No other module of raytrain names Ray's
private modules. Nothing is imported before it is used: ``ray.train`` alone takes seconds, and most processes need none
of it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shlex
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from raytrain.errors import UsageError

OLDEST, NEWEST_TESTED = (2, 53), (2, 60)
_AGENT = "--dashboard_agent_command="  # an option of the raylet
_log = logging.getLogger("raytrain")


@dataclass(frozen=True)
class Improvement:
    """Something that needs undocumented ``names`` of Ray, each ``module:name``; ``lost`` says what happens without."""

    lost: str
    names: tuple[str, ...]

    def find(self) -> tuple[Any, ...] | None:
        """Return the objects with these names; None if this Ray lacks one of them."""
        objects = [_load(name) for name in self.names]
        return None if _MISSING in objects else tuple(objects)

    def missing(self) -> str | None:
        """Return the sentence on the names that this Ray lacks, and what is lost with them; None if it lacks none."""
        import ray

        lacking = [name.replace(":", ".") for name in self.names if _load(name) is _MISSING]
        return f"Ray {ray.__version__} lacks {' and '.join(lacking)}, so {self.lost}." if lacking else None


_MISSING = object()


def _load(name: str) -> Any:
    """Return the object called ``name``, such as ``ray.data:DataContext.get_current``; _MISSING if there is none."""
    module, _, attributes = name.partition(":")
    try:
        loaded: Any = importlib.import_module(module)
        for attribute in attributes.split("."):
            # A field of a dataclass that has no default is no attribute of the class.
            fields: dict[str, Any] = getattr(loaded, "__dataclass_fields__", {})
            loaded = fields[attribute] if attribute in fields else getattr(loaded, attribute)
        return loaded
    except (ImportError, AttributeError):
        return _MISSING


ANSWER_AT_ONCE = Improvement(
    "an --address at which no cluster answers is noticed after minutes", ("ray._raylet:GcsClient",)
)
LATE_VARIABLES = Improvement(
    "raytrain's settings have no effect in a process that imported Ray before, and Ray's processes are not forked",
    ("ray._raylet:Config.initialize", "ray._private:ray_constants", "ray._private.auto_init_hook:enable_auto_connect"),
)
SMALL_HEAD = Improvement(
    "a Ray that raytrain starts has processes that no run needs, forks none, and starts seconds later",
    ("ray._private.node:Node", "ray._private.parameter:RayParams"),
)
NO_AGENT = Improvement(
    "a Ray that raytrain starts has an agent for a dashboard that it has not, which takes a second of a core",
    (
        "ray._private.services:start_ray_process",
        "ray._private.utils:get_dashboard_dependency_error",
        "ray._raylet:persist_port",
        "ray._raylet:METRICS_AGENT_PORT_NAME",
        "ray._raylet:METRICS_EXPORT_PORT_NAME",
        "ray._raylet:DASHBOARD_AGENT_LISTEN_PORT_NAME",
    ),
)
PREEMPTION = Improvement(
    "a machine that will be taken away causes no checkpoint: the run resumes from the one before",
    (
        "ray.train.v2._internal.execution.context:get_train_context",
        "ray.train.v2._internal.execution.context:TrainContext.preemption_context",
        "ray.train.v2._internal.execution.preemption:PreemptionContext.preemption_info",
    ),
)
FEWER_PROCESSES = Improvement(
    "each run starts up to three processes that it does not need",
    (
        "ray.train.torch:TorchTrainer._create_default_callbacks",
        "ray.train.torch:TorchTrainer._initialize_and_run_controller",
    ),
)
CONTROLLER = Improvement(
    "each run starts a process more, and workers of an aborted run stay in a shared cluster until its driver ends",
    ("ray.train.v2._internal.execution.controller:TrainController",),
)
BARRIER = Improvement(
    "workers start later, after a process that only a loop with Ray Train's own barrier needs",
    ("ray.train.v2._internal.execution.worker_group.worker_group:SynchronizationActor",),
)
RESERVED = Improvement(
    "the CPUs of workers whose coordinator dies stay reserved until the driver ends",
    ("ray.train.v2._internal.execution.worker_group.worker_group:placement_group",),
)
PAUSE = Improvement(
    "streaming takes a whole core of the driver's machine, and reads with half as many tasks",
    (
        "ray.data._internal.execution.execution_callback:ExecutionCallback",
        "ray.data:DataContext.custom_execution_callback_classes",
    ),
)
TRIAL = Improvement(
    "the metrics of raytrain.attach in a trial of Ray Tune do not reach Tune",
    ("ray.tune.trainable.trainable_fn_utils:_in_tune_session",),
)
WORKER = Improvement(
    "an image that kills the process that reads it may kill the next one, and neither a head that does not answer, nor "
    "full object stores, nor data tasks that wait for CPUs are reported",
    ("ray._private.worker:global_worker",),
)
MESSAGES = Improvement(
    "Ray's paragraphs about a process that died appear between the lines of a run",
    ("ray._private.worker:print_to_stdstream",),
)
AUTOSCALER_STATUS = Improvement(
    "why no more machines come is not said; `ray status` does", ("ray.experimental.internal_kv:_internal_kv_get",)
)
FORKED_PROCESSES = Improvement(
    "each of Ray's processes imports Ray and torch itself, so that a run starts three times as slowly",
    ("ray._private.workers.default_worker:__file__", "ray.actor:ActorClassID"),
)
JOB_SERVER_VERSION = Improvement(
    "submit notices a cluster whose Ray is too old only when the job has started",
    ("ray.dashboard.modules.dashboard_sdk:SubmissionClient._do_request",),
)

IMPROVEMENTS = tuple(value for value in dict(globals()).values() if isinstance(value, Improvement))
"""All of the above."""


# The version of Ray.


@cache
def check_version() -> None:
    """Raise UsageError if this Ray is too old; warn, once, if it is newer than the newest one that was tested."""
    import ray

    version = minor_version(ray.__version__)
    if version < OLDEST:
        raise UsageError(f"Ray {ray.__version__} is too old; raytrain needs {OLDEST[0]}.{OLDEST[1]} or newer.")
    if version > NEWEST_TESTED:
        _log.warning(
            "Ray %s is newer than %d.%d, the newest that raytrain was tested with; it does without what this Ray "
            "lacks, and `raytrain doctor` says what that is.",
            ray.__version__,
            *NEWEST_TESTED,
        )


def minor_version(version: str) -> tuple[int, int]:
    """Return the major and minor version: of ``2.60.0``, (2, 60)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def version_error(address: str, text: str) -> UsageError | None:
    """Return the error for a cluster of other versions, if ``text`` is Ray's message about one; None otherwise."""
    versions = re.findall(r"(?:Ray|Python): (\S+)", text)
    if len(versions) != 4:
        return None
    theirs, ours = "Ray {} and Python {}".format(*versions[:2]), "Ray {} and Python {}".format(*versions[2:])
    return UsageError(
        f"The cluster at {address} runs {theirs}, and this process {ours}; install the cluster's versions here, or use "
        "`raytrain submit`, which works with other ones."
    )


def missing() -> list[str]:
    """Return a sentence for each improvement that this Ray does not allow."""
    return [sentence for improvement in IMPROVEMENTS if (sentence := improvement.missing())]


# Variables of this process that Ray reads, also if it has been imported already.


LOOPBACK_ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""With this, Ray uses 127.0.0.1 as the node's address, as it does by default on macOS, and listens nowhere else.
Whoever joins such a cluster needs it, too, while it joins; it may join a cluster of several machines afterwards."""


def in_ray() -> bool:
    """Return whether this process is in a Ray cluster, without importing Ray.

    Another thread may still be importing it: ``sys.modules`` then has a module without this function, and nobody can
    have joined a cluster.
    """
    is_initialized: Callable[[], bool] | None = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and is_initialized()


def loopback_environment() -> dict[str, str]:
    """Return the variables of a cluster on the loopback interface; {} if they have no effect in this process."""
    return LOOPBACK_ENVIRONMENT if "ray" not in sys.modules or LATE_VARIABLES.find() else {}


@contextmanager
def variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables, for Ray too, and restore the former ones at the end of the ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    set_variables(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)  # Ray may have removed it
        set_variables({name: value for name, value in before.items() if value is not None})


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables of this process, so that Ray sees them, too, if it has been imported already."""
    os.environ.update(variables)
    if "ray" in sys.modules:
        importlib.import_module("ray")  # waits if another thread is still importing it
        read_variables()


def read_variables() -> None:
    """Have Ray read this process's variables, which it otherwise does only when it is imported.

    Nothing happens if this Ray has no way to do so; see ``LATE_VARIABLES``.
    """
    if api := LATE_VARIABLES.find():
        # Ray has read variables in three places: the settings of its C++ code, its constants, and the hook that starts
        # a Ray at the first call.
        initialize_settings, constants, _ = api
        initialize_settings("")
        importlib.reload(constants)
        hook = importlib.import_module("ray._private.auto_init_hook")
        hook.enable_auto_connect = os.environ.get("RAY_ENABLE_AUTO_CONNECT") != "0"  # pyright: ignore


# Ray's processes.


CURRENT_CLUSTER_FILE = "ray_current_cluster"
"""Below Ray's temporary folder: the address of the cluster that ``ray start --head`` started on this machine."""


def on_this_node() -> dict[str, str]:
    """Return the label selector of actors and tasks that must run on the node of this process."""
    import ray

    return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}


def can_fork() -> bool:
    """Return whether this Ray's processes can be forked from one that has imported their packages."""
    return bool(FORKED_PROCESSES.find() and LATE_VARIABLES.find())


@contextmanager
def no_agent(session_folder: str, node_id: str) -> Iterator[None]:
    """Keep a raylet that is started in this context, on this node of a session, from starting the dashboard's agent.

    A raylet waits for the ports of this agent, and ends with it. So the ports get the number -1, with which the agent
    itself says that it serves none, and in its place the raylet starts a process that does nothing until its standard
    input, a pipe of the raylet, ends.
    """
    api = NO_AGENT.find()
    if api is None or sys.platform != "linux":
        yield
        return
    start, dependency_error, persist_port, *ports = api
    for port in ports:
        persist_port(session_folder, node_id, port, -1)
    idle = shlex.join([sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"])

    def start_with_idle_process(command: list[str], *arguments: Any, **options: Any) -> Any:
        command = [f"{_AGENT}{idle}" if word.startswith(_AGENT) else word for word in command]
        return start(command, *arguments, **options)

    services: Any = importlib.import_module("ray._private.services")
    utils: Any = importlib.import_module("ray._private.utils")
    services.start_ray_process = start_with_idle_process
    # Ray asks which agent it can start by importing the dashboard's packages, which takes half a second of a core.
    utils.get_dashboard_dependency_error = lambda: None
    try:
        yield
    finally:
        services.start_ray_process, utils.get_dashboard_dependency_error = start, dependency_error


@contextmanager
def messages_in_log() -> Iterator[None]:
    """Log Ray's messages to this driver during the ``with`` block: printed, they are long, and name no run."""

    def log_message(data: Mapping[str, Any], *_: object, **__: object) -> None:
        logging.getLogger("raytrain.ray").info("%s", "\n".join(data["lines"]))

    api = MESSAGES.find()
    if api is None:
        yield
        return
    (print_message,) = api
    module: Any = importlib.import_module("ray._private.worker")
    module.print_to_stdstream = log_message
    try:
        yield
    finally:  # the user may join another Ray afterwards, and want to see what its workers print
        module.print_to_stdstream = print_message


# Ray Train and tasks.


def delay_barrier(later: Callable[[Any], Any]) -> None:
    """Have workers start before the actor of Ray Train's barrier, which only a loop of the user's may call.

    ``later`` gets each argument of the actor's constructor, and returns a reference to it, which decides when the
    argument is there. The actor's process waits for these arguments, and calls of the actor wait for its process.
    """
    if api := BARRIER.find():
        (barrier_class,) = api
        module = importlib.import_module("ray.train.v2._internal.execution.worker_group.worker_group")

        # Ray Train only calls Class.options(…).remote(…), so the object in place of the class needs no more than that.
        def options(**actor_options: Any) -> SimpleNamespace:
            start = barrier_class.options(**actor_options).remote
            return SimpleNamespace(
                remote=lambda **arguments: start(**{name: later(value) for name, value in arguments.items()})
            )

        module.SynchronizationActor = SimpleNamespace(options=options)  # pyright: ignore


def name_placement_groups(prefix: str) -> None:
    """Have Ray Train's controller, in this process, name its placement groups: ``prefix``, and a random number."""
    if api := RESERVED.find():
        (placement_group,) = api
        # Ray Train calls the function under the name that this module has imported.
        module: Any = importlib.import_module("ray.train.v2._internal.execution.worker_group.worker_group")
        module.placement_group = lambda **options: placement_group(name=f"{prefix}{uuid.uuid4().hex}", **options)


def is_tune_trial() -> bool:
    """Return whether this process runs a function for a trial of Ray Tune."""
    if api := TRIAL.find():
        (in_tune_session,) = api
        return bool(in_tune_session())
    return False


def announced_preemption() -> Any:
    """Return Ray Train's newest announcement that nodes of this worker's run will be taken away; None without one."""
    if api := PREEMPTION.find():
        get_train_context, _, _ = api
        return get_train_context().preemption_context.preemption_info
    return None


def is_repeated_task() -> bool:
    """Return whether this task was begun before, by a process that died, or is repeated as its result was lost.

    False outside of a task, and if this Ray cannot tell.
    """
    import ray

    if ray.is_initialized() and (api := WORKER.find()):
        (worker,) = api
        with suppress(AttributeError):
            return worker.core_worker.get_current_task_attempt_number() > 0
    return False


# Ray Serve.


_SERVE_REPLICA = "ray.serve._private.replica"


def check_serve() -> None:
    """Raise UsageError if a replica of this Ray Serve unpickles a request before it asks for the cluster's token.

    Each replica has a gRPC server for other replicas, at a port of its own. Since ray-project/ray#65189, the server is
    made by a function that all of Ray's servers are made by, and asks for the token. So a Ray whose replica has such a
    server, but not this function, is refused.
    """
    import ray

    has_server = _load(f"{_SERVE_REPLICA}:add_ASGIServiceServicer_to_server") is not _MISSING
    if has_server and _load(f"{_SERVE_REPLICA}:create_grpc_server_with_interceptors") is _MISSING:
        raise UsageError(
            f"Ray {ray.__version__} cannot be used by raytrain serve: its replicas run code of anybody who reaches a "
            "port of theirs, with or without the cluster's token; install Ray 2.60 or newer."
        )


def can_bind_replica() -> bool:
    """Return whether :func:`bind_replica` has an effect: otherwise replicas listen for others on all interfaces."""
    # The function that opens a port, where it is defined, and where the replica looks for it.
    names = "ray._common.tls_utils:add_port_to_grpc_server", f"{_SERVE_REPLICA}:add_port_to_grpc_server"
    return _MISSING not in [_load(name) for name in names]


def bind_replica(address: str) -> None:
    """Have the Ray Serve replica of this process listen at ``address`` alone for other replicas, if this Ray can."""
    if can_bind_replica():
        module: Any = importlib.import_module(_SERVE_REPLICA)
        add_port = _load("ray._common.tls_utils:add_port_to_grpc_server")
        host = f"[{address}]" if ":" in address else address
        module.add_port_to_grpc_server = lambda server, _address: add_port(server, f"{host}:0")


def asks_for_token() -> bool:
    """Return whether the Ray of this process asks whoever calls it for a token; False if this Ray cannot tell."""
    is_enabled = _load("ray._private.authentication.authentication_utils:is_token_auth_enabled")
    return is_enabled is not _MISSING and is_enabled()
