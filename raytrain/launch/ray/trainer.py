"""Ray Train's trainer in a thread: fewer processes, an end on request, failures in one line."""

from __future__ import annotations

import logging
import os
import threading
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray import PlacementGroupID
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer
from ray.util import remove_placement_group
from ray.util.placement_group import PlacementGroup

from raytrain.errors import UsageError
from raytrain.launch.placement import Placement
from raytrain.launch.ray.coordinator import WATCHER, CoordinatorHandle, stop_coordinator
from raytrain.launch.ray.head_queries import head_answers
from raytrain.launch.ray.nodes import worker_resources
from raytrain.launch.ray.private_api import CONTROLLER
from raytrain.launch.ray.ray_errors import LOST_ACTOR, root_cause
from raytrain.monitor.events import WorkerFailed
from raytrain.runs.redact import redact

_log = logging.getLogger(__name__)


# A run's data reaches its workers in another way, and this process frees what a dead controller has reserved.
_CALLBACKS_LEFT_OUT = {"DatasetsCallback", "PlacementGroupCleanerCallback"}
_DASHBOARD_CALLBACK = "StateManagerCallback"  # it tells the dashboard of a run, if Ray Train is asked to keep track
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
    own notes in ``folder``. With ``in_dashboard``, the Train tab of the cluster's dashboard lists the run by ``name``.
    """

    def __init__(
        self,
        work: Callable[[], None],
        coordinator: CoordinatorHandle,
        placement: Placement,
        folder: str,
        *,
        name: str,
        in_dashboard: bool,
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
            in_dashboard=in_dashboard,
            scaling_config=ScalingConfig(
                num_workers=most if fewest == most else (fewest, most),
                use_gpu=placement.device == "cuda",
                resources_per_worker=worker_resources(placement.device, placement.cpus, placement.accelerator_type),
                **resizing,
            ),
            run_config=RunConfig(
                name=name,
                storage_path=folder,
                failure_config=FailureConfig(max_failures=max_failures),
                callbacks=[_FailureReporter(coordinator)],
            ),
        )
        # The thread alone holds the trainer, and with it the run's images in the object store.
        self._thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True, name="trainer")
        self._thread.start()

    def remember_reserved(self) -> None:
        """Ask the coordinator for the placement group of the newest attempt. To be called now and then: it may die."""
        with suppress(*LOST_ACTOR):
            self._reserved = ray.get(self._coordinator.reserved.remote())

    def end(self, *, cluster_ends: bool) -> None:
        """End the workers and the coordinator, and free their placement groups, unless their cluster ends with them.

        The thread that waits for them must end, too: it would ask a cluster that is gone, and may end this process.
        """
        if not (cluster_ends or self.ended.done()):
            # The coordinator ends by this, and the exception that ray.get raises would keep the run's images.
            ray.wait([self._coordinator.abort.remote()], timeout=_WORKERS_START_WITHIN_S)
        stop_coordinator(self._coordinator)
        # What workers have reserved outlives a coordinator that has died: Ray keeps it for as long as this process is
        # in the cluster. Another attempt would find no room for its workers, or for reading images. By its name it is
        # found also if the coordinator died before it could say what it was.
        if not cluster_ends and head_answers(_ENDS_WITHIN_S):
            if self._reserved is not None:
                remove_placement_group(self._reserved)
            with suppress(RayError):  # the head is gone since
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
        in_dashboard: bool,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._coordinator = coordinator
        self._reserved_prefix = reserved_prefix
        self._grows = grows
        self._callbacks_left_out = _CALLBACKS_LEFT_OUT | (set() if in_dashboard else {_DASHBOARD_CALLBACK})
        # It tells workers of nodes that will be taken away: with one node, that would take all of Ray away.
        self._settings = {WATCHER: "0"} if one_node and not grows else {}

    def _create_default_callbacks(self) -> list[Any]:
        defaults = super()._create_default_callbacks()
        return [callback for callback in defaults if type(callback).__name__ not in self._callbacks_left_out]

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
    """Remove the placement groups whose names begin with ``prefix``; their workers end."""
    groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
    for group_id, group in groups.items():
        if group["name"].startswith(prefix) and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
