"""Ray Train's trainer in a thread: fewer processes, an end on request, failures in one line."""

from __future__ import annotations

import logging
import os
import re
import threading
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, WorkerCrashedError
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytrain.errors import RaytrainError, UsageError
from raytrain.launch.placement import Placement
from raytrain.launch.ray.coordinator import WATCHER, CoordinatorHandle, stop_coordinator
from raytrain.launch.ray.nodes import worker_resources
from raytrain.launch.ray.private_api import CONTROLLER
from raytrain.monitor.events import WorkerFailed
from raytrain.runs.redact import redact

_log = logging.getLogger(__name__)
_CLASS_OF_OURS = re.compile(r"^raytrain\.errors\.\w+: ")


def root_cause(error: BaseException) -> str:
    """Return the one line that matters, out of the chain of exceptions that Ray wraps around it.

    Example: of a RayTaskError whose text is a traceback of three processes, ``the bucket "photos" does not exist``.
    """
    # Our own errors are sentences already, and of a death Ray knows more than the exceptions around it.
    cause: BaseException | None = error
    while cause is not None:
        # Ray's wrapper may be of the same class as what it wraps; Ray Train's names what it noticed.
        wrapped = getattr(cause, "cause", None) or getattr(cause, "health_check_failure", None)
        if isinstance(cause, RaytrainError) and wrapped is None:
            return str(cause)
        if isinstance(cause, (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)):
            # Ray's own text is a paragraph about all that it may have been.
            text = str(cause)
            if "node has died" in text or "node was terminated" in text:
                return "its machine is gone"
            if "low on memory" in text:
                return "Ray has ended its process because the machine's memory was nearly full"
            return "its process has died: it crashed, or something killed it, such as the system for lack of memory"
        cause = wrapped or cause.__cause__

    # If several workers have failed, the others mostly failed because the first one did.
    failures = getattr(error, "worker_failures", None)
    if failures:
        return root_cause(failures[min(failures)])

    # Anything else is a traceback, whose last line says what happened.
    text = str(error)
    if "UserCodeException" in text:  # Ray Data passes on what a task raised as text alone, followed by its own advice
        text = text.rpartition("The above exception was the direct cause")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    return _CLASS_OF_OURS.sub("", lines[-1].strip()).rstrip(".") if lines else type(error).__name__


# A run's data reaches its workers in another way, and this process frees what a dead controller has reserved.
_CALLBACKS_LEFT_OUT = {"DatasetsCallback", "PlacementGroupCleanerCallback"}
_RESIZE_EVERY = "elastic_resize_monitor_interval_s"
_RESIZE_EVERY_S = 30.0  # how often an elastic run looks for room for more workers
_ENDS_WITHIN_S = 10.0
# A controller that starts workers answers when they have started. Killed before, it leaves their CPUs reserved.
_WORKERS_START_WITHIN_S = 180.0
_SETTINGS = "RAY_TRAIN_", "RAY_CHDIR_"  # begin with these: Ray Train's, which workers get from their controller


def check_elastic(placement: Placement) -> None:
    """Raise UsageError if the number of workers may change, and this Ray can't change it."""
    fewest, most = placement.min_workers, placement.num_workers
    if fewest < most and not hasattr(ScalingConfig, _RESIZE_EVERY):
        raise UsageError(
            f"--workers is {fewest}..{most}, and Ray {ray.__version__} cannot change the number of workers of a run; "
            "give one number, or use Ray 2.55 or newer."
        )


class TrainerThread:
    """Runs ``work`` on every worker of ``placement`` from now on, and again if it fails, up to ``max_failures`` times.

    It needs a thread of its own: in the main thread, Ray Train would answer signals with an abort. Ray Train keeps its
    own notes in ``folder``.
    """

    def __init__(
        self,
        work: Callable[[], None],
        coordinator: CoordinatorHandle,
        placement: Placement,
        folder: str,
        *,
        max_failures: int,
        one_node: bool,
    ) -> None:
        self.ended: Future[str | None] = Future()
        """Done when the workers have ended: None, or why Ray Train gave up."""
        self._coordinator = coordinator
        self._reserved: Any = None
        self._reserved_prefix = f"raytrain-{uuid.uuid4().hex}-"
        fewest, most = placement.min_workers, placement.num_workers
        resizing: dict[str, Any] = {} if fewest == most else {_RESIZE_EVERY: _RESIZE_EVERY_S}
        trainer = _Trainer(
            work,
            coordinator=coordinator,
            reserved_prefix=self._reserved_prefix,
            grows=fewest < most,
            one_node=one_node,
            scaling_config=ScalingConfig(
                num_workers=most if fewest == most else (fewest, most),
                use_gpu=placement.device == "cuda",
                resources_per_worker=worker_resources(placement.device, placement.cpus, placement.accelerator_type),
                **resizing,
            ),
            run_config=RunConfig(
                storage_path=folder,
                failure_config=FailureConfig(max_failures=max_failures),
                callbacks=[_FailureReporter(coordinator)],
            ),
        )
        # The thread alone holds the trainer, and with it the run's images in the object store.
        self._thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True, name="trainer")
        self._thread.start()

    def remember_reserved(self) -> None:
        """Ask the coordinator what the newest attempt has reserved. To be called now and then: it may die."""
        with suppress(RayActorError):
            self._reserved = ray.get(self._coordinator.reserved.remote())

    def end(self, *, cluster_ends: bool) -> None:
        """End the workers and the coordinator, and free what they have reserved, unless their cluster ends with them.

        The thread that waits for them must end, too: it would ask a cluster that is gone, and may end this process.
        """
        if not (cluster_ends or self.ended.done()):
            # The coordinator ends by this, and the exception that ray.get raises would keep the run's images.
            ray.wait([self._coordinator.abort.remote()], timeout=_WORKERS_START_WITHIN_S)
        stop_coordinator(self._coordinator)
        # What workers have reserved outlives a coordinator that has died: Ray keeps it for as long as this process is
        # in the cluster. Another attempt would find no room for its workers, or for reading images. By its name it is
        # found also if the coordinator died before it could say what it was.
        if not cluster_ends:
            if self._reserved is not None:
                remove_placement_group(self._reserved)
            with suppress(RayError):  # the head does not answer
                _remove_placement_groups(self._reserved_prefix)
        self._thread.join(_ENDS_WITHIN_S)

    def _fit(self, trainer: TorchTrainer) -> None:
        try:
            trainer.fit()
            self.ended.set_result(None)
        except BaseException as error:
            _log.debug("the workers failed: %s", redact(str(error)))  # with the traceback of each
            traceback.clear_frames(error.__traceback__)  # they hold the run's images, in a cycle of references
            self.ended.set_result(root_cause(error))


class _Trainer(TorchTrainer):
    """A TorchTrainer that starts no processes which no run here needs, if this Ray would; FEWER_PROCESSES says how."""

    def __init__(
        self,
        *args: Any,
        coordinator: CoordinatorHandle,
        reserved_prefix: str,
        grows: bool,
        one_node: bool,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._coordinator = coordinator
        self._reserved_prefix = reserved_prefix
        self._grows = grows
        # It tells workers of nodes that will be taken away: with one node, that would take all of Ray away.
        self._settings = {WATCHER: "0"} if one_node and not grows else {}

    def _create_default_callbacks(self) -> list[Any]:
        defaults = super()._create_default_callbacks()
        return [callback for callback in defaults if type(callback).__name__ not in _CALLBACKS_LEFT_OUT]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        """Run the controller in the coordinator's process, or in one of its own if this Ray has another controller."""
        # Ask nobody for machines: the workers fit, and a placement group that waits is a demand, too.
        policy = None if self._grows else options.get("scaling_policy")
        for name in _ASKS_FOR_MACHINES:
            if hasattr(policy, name):
                setattr(policy, name, lambda: None)
        if (api := CONTROLLER.find()) is None:
            return super()._initialize_and_run_controller(**options)
        users_settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
        settings = self._settings | users_settings
        return ray.get(self._coordinator.control.remote(api[0], options, settings, self._reserved_prefix))


_ASKS_FOR_MACHINES = "_send_resource_request", "_maybe_send_resource_request", "_cancel_resource_request"


class _FailureReporter(UserCallback):
    """Reports why an attempt failed. Ray Train then begins another one, up to ``--max-failures`` times."""

    def __init__(self, coordinator: CoordinatorHandle) -> None:
        self._coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Report the failure of the lowest rank; Ray Train calls this."""
        rank, error = min(worker_exceptions.items())
        self._coordinator.event.remote(WorkerFailed(root_cause(error), rank))


def _remove_placement_groups(prefix: str) -> None:
    """Free what is reserved in placement groups whose names begin with ``prefix``; their workers end."""
    groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
    for group_id, group in groups.items():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
