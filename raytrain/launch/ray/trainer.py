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
from raytrain.launch.ray.ray_errors import first_failed, root_cause
from raytrain.monitor.events import WorkerFailed
from raytrain.runs.redact import redact

_log = logging.getLogger(__name__)


# A run's data reaches its workers in another way, and this process frees what a dead controller has reserved.
_CALLBACKS_LEFT_OUT = {"DatasetsCallback", "PlacementGroupCleanerCallback"}
_DASHBOARD_CALLBACK = "StateManagerCallback"  # shows the run on the dashboard, if Ray Train is asked to keep track
_RESIZE_OPTION = "elastic_resize_monitor_interval_s"  # of ScalingConfig: how often an elastic run looks for more room
_RESIZE_EVERY_S = 30.0
_ENDS_WITHIN_S = 10.0
# A controller that starts workers answers when they have started. Killed before, it leaves their CPUs reserved.
_WORKERS_START_WITHIN_S = 180.0
_SETTINGS = "RAY_TRAIN_", "RAY_CHDIR_"  # prefixes of Ray Train's variables, which workers get from their controller
_ASKS_FOR_MACHINES = "_send_resource_request", "_maybe_send_resource_request", "_cancel_resource_request"
"""Methods of Ray Train's scaling policies by which they ask the autoscaler; each version has some of them."""


def check_elastic(placement: Placement) -> None:
    """Raise UsageError if the number of workers may change, and this Ray can't change it."""
    fewest, most = placement.min_workers, placement.num_workers
    if fewest < most and not hasattr(ScalingConfig, _RESIZE_OPTION):
        raise UsageError(
            f"--workers is {fewest}..{most}, and Ray {ray.__version__} cannot change the number of workers of a run; "
            "give one number, or use Ray 2.55 or newer."
        )


class TrainerThread:
    """Runs ``work`` on every worker of ``placement`` from now on, and again if it fails, up to ``max_failures`` times.

    It needs a thread of its own: in the main thread, Ray Train would answer signals with an abort. Ray Train keeps its
    own notes in ``folder``. With ``in_dashboard``, the Train tab of the cluster's dashboard lists the run by ``name``.
    ``one_node``: the cluster has a single node, so no workers need to hear that theirs will be taken away.
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
        self._reserved_prefix = f"raytrain-{uuid.uuid4().hex}-"  # of the names of the placement groups of all attempts
        fewest, most = placement.min_workers, placement.num_workers
        resizing: dict[str, Any] = {} if fewest == most else {_RESIZE_OPTION: _RESIZE_EVERY_S}
        trainer = _Trainer(
            work,
            coordinator=coordinator,
            reserved_prefix=self._reserved_prefix,
            is_elastic=fewest < most,
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

    def end(self, *, cluster_ends: bool) -> None:
        """End the workers and the coordinator, and free their placement groups, unless their cluster ends with them.

        The thread that waits for them must end, too: it would ask a cluster that is gone, and may end this process.
        """
        if not (cluster_ends or self.ended.done()):
            # This ends the coordinator's process. ray.get would raise an exception, which would keep the run's images.
            ray.wait([self._coordinator.abort.remote()], timeout=_WORKERS_START_WITHIN_S)
        stop_coordinator(self._coordinator)
        # What workers have reserved outlives a coordinator that has died: Ray keeps it for as long as this process is
        # in the cluster. Another attempt would find no room for its workers, or for reading images. So remove all
        # placement groups whose names have the prefix of this run.
        if not cluster_ends and head_answers(_ENDS_WITHIN_S):
            with suppress(RayError):  # the head is gone since
                groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
                for group_id, group in groups.items():
                    if group["name"].startswith(self._reserved_prefix) and group["state"] != "REMOVED":
                        remove_placement_group(PlacementGroup(PlacementGroupID(bytes.fromhex(group_id))))
        self._thread.join(_ENDS_WITHIN_S)

    def _fit(self, trainer: TorchTrainer) -> None:
        """Train, in the thread, until the workers have ended for good; then complete ``ended``."""
        try:
            trainer.fit()
            self.ended.set_result(None)
        except BaseException as error:
            _log.debug("the workers failed: %s", redact(str(error)))  # with the traceback of each
            traceback.clear_frames(error.__traceback__)  # they hold the run's images, in a cycle of references
            self.ended.set_result(root_cause(error))


class _Trainer(TorchTrainer):
    """A TorchTrainer that starts no processes which no run needs, and whose controller is in the coordinator's process.

    It overrides two undocumented methods of Ray's, which ``FEWER_PROCESSES`` in ``private_api.py`` names. A Ray without
    them never calls these, and starts the processes. The arguments are those of :class:`TrainerThread`, and in
    ``options`` those of TorchTrainer.
    """

    def __init__(
        self,
        *args: Any,
        coordinator: CoordinatorHandle,
        reserved_prefix: str,
        is_elastic: bool,
        one_node: bool,
        in_dashboard: bool,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._coordinator = coordinator
        self._reserved_prefix = reserved_prefix
        self._is_elastic = is_elastic
        self._callbacks_left_out = _CALLBACKS_LEFT_OUT | (set() if in_dashboard else {_DASHBOARD_CALLBACK})
        # The watcher tells workers of nodes that will be taken away. A single node would take all of Ray with it, so
        # none is needed, unless an elastic run may get workers on further nodes.
        self._settings = {WATCHER: "0"} if one_node and not is_elastic else {}

    def _create_default_callbacks(self) -> list[Any]:
        defaults = super()._create_default_callbacks()
        return [callback for callback in defaults if type(callback).__name__ not in self._callbacks_left_out]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        """Run the controller in the coordinator's process, or in one of its own if this Ray has another controller."""
        # Have the scaling policy ask nobody for machines, unless the run is elastic: the workers fit, and if they wait
        # after all, the autoscaler takes their placement group as a request.
        policy = None if self._is_elastic else options.get("scaling_policy")
        for name in _ASKS_FOR_MACHINES:
            if hasattr(policy, name):
                setattr(policy, name, lambda: None)
        if (api := CONTROLLER.find()) is None:
            return super()._initialize_and_run_controller(**options)
        (controller_class,) = api
        users_settings = {name: value for name, value in os.environ.items() if name.startswith(_SETTINGS)}
        settings = self._settings | users_settings
        return ray.get(self._coordinator.control.remote(controller_class, options, settings, self._reserved_prefix))


class _FailureReporter(UserCallback):
    """Reports to the coordinator why an attempt failed. Ray Train then begins another one, ``--max-failures`` times."""

    def __init__(self, coordinator: CoordinatorHandle) -> None:
        self._coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Report the failure that explains the others; Ray Train calls this."""
        rank = first_failed(worker_exceptions)
        self._coordinator.note_event.remote(WorkerFailed(root_cause(worker_exceptions[rank]), rank))
