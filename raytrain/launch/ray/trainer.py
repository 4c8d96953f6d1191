"""Ray Train's trainer in a thread: fewer processes, an end on request, failures in one line."""

from __future__ import annotations

import concurrent.futures
import logging
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer
from ray.util import remove_placement_group

from raytrain.errors import RaytrainError, UsageError
from raytrain.launch.placement import Placement
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.hardware import worker_resources
from raytrain.launch.ray.private_api import CONTROLLER
from raytrain.monitor.events import WorkerFailed
from raytrain.runs.redact import redact

_logger = logging.getLogger(__name__)
_OWN = re.compile(r"^raytrain\.errors\.\w+: ")


def root_cause(error: BaseException) -> str:
    """The one line that matters, out of the chain of exceptions that Ray wraps around it."""
    cause: BaseException | None = error
    while cause is not None:
        # Ray's wrapper may be of the same class as what it wraps; Ray Train's names what it noticed.
        wrapped = getattr(cause, "cause", None) or getattr(cause, "health_check_failure", None)
        if isinstance(cause, RaytrainError) and wrapped is None:
            return str(cause)
        if isinstance(cause, _DEATHS):
            return _what_killed(str(cause))
        cause = wrapped or cause.__cause__
    failures = getattr(error, "worker_failures", None)
    if failures:
        return root_cause(failures[min(failures)])
    text = str(error)
    if "UserCodeException" in text:  # Ray Data passes on what a task raised as text alone, followed by its own advice
        text = text.rpartition("The above exception was the direct cause")[0]
    lines = [line for line in text.splitlines() if line.strip()]
    return _OWN.sub("", lines[-1].strip()).rstrip(".") if lines else type(error).__name__


_DEATHS = RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError


def _what_killed(text: str) -> str:
    """What Ray knows of a process that died, without its paragraph about all that it may have been."""
    if "node has died" in text or "node was terminated" in text:
        return "its machine is gone"
    if "low on memory" in text:
        return "Ray has ended its process because the machine's memory was nearly full"
    return "its process has died: it crashed, or something killed it, such as the system for lack of memory"


# A run's data reaches its workers in another way, and this process frees what a dead controller has reserved.
_LEFT_OUT = {"DatasetsCallback", "PlacementGroupCleanerCallback"}
_RESIZE_EVERY = "elastic_resize_monitor_interval_s"
_RESIZE_EVERY_S = 30.0  # how often an elastic run looks for room for more workers
_ABORTED_WITHIN_S = 10.0
_NOTICED_WITHIN_S = 10.0  # Ray Train asks the workers every two seconds
_CONTROLLER_STARTS_WITHIN_S = 60.0
# A controller that starts workers answers when they have started. Killed before, it leaves their CPUs reserved.
_WORKERS_START_WITHIN_S = 180.0


def check_elastic(placement: Placement) -> None:
    """Raise UsageError if the number of workers may change, and this Ray can't change it."""
    fewest, most = placement.min_workers, placement.num_workers
    if fewest < most and not hasattr(ScalingConfig, _RESIZE_EVERY):
        raise UsageError(
            f"--workers is {fewest}..{most}, and Ray {ray.__version__} cannot change the number of workers of a run; "
            "give one number, or use Ray 2.55 or newer."
        )


class TrainerThread:
    """Runs ``work`` on every worker of ``placement``, and restarts failed workers up to ``max_failures`` times.

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
    ) -> None:
        self.ended: Future[None] = Future()
        self._coordinator = coordinator
        self._controller: Any = None
        fewest, most = placement.min_workers, placement.num_workers
        resizing: dict[str, Any] = {} if fewest == most else {_RESIZE_EVERY: _RESIZE_EVERY_S}
        trainer = _Trainer(
            work,
            grows=fewest < most,
            scaling_config=ScalingConfig(
                num_workers=most if fewest == most else (fewest, most),
                use_gpu=placement.device == "cuda",
                resources_per_worker=worker_resources(placement.device, placement.cpus, placement.accelerator_type),
                **resizing,
            ),
            run_config=RunConfig(
                storage_path=folder,
                failure_config=FailureConfig(max_failures=max_failures),
                callbacks=[_FailureReporter(coordinator), *_controller_reporters(coordinator)],
            ),
        )
        # The thread alone holds the trainer, and with it the run's images in the object store.
        self._thread = threading.Thread(target=self._fit, args=(trainer,), daemon=True, name="trainer")

    def start(self) -> None:
        """Start the workers."""
        self._thread.start()

    def remember_controller(self) -> None:
        """Get the controller's handle from the coordinator, to be called now and then: the coordinator may die."""
        if self._controller is None:
            self._controller = self._ask_for_controller()

    def wait(self) -> None:
        """Let Ray Train notice that the workers are done, and free their CPUs."""
        concurrent.futures.wait([self.ended], timeout=_NOTICED_WITHIN_S)

    def abort(self, *, cluster_ends: bool = True) -> None:
        """End workers that Ray Train would restart, if the cluster outlives the run; others end with their cluster.

        The thread that waits for them must end, too: it would ask a cluster that is gone, and may end this process.
        """
        if self.ended.done():
            return
        controller = None
        with suppress(RayError):  # the controller ends by this; GetTimeoutError is a RayError
            controller = self._find_controller(0.0 if cluster_ends else _CONTROLLER_STARTS_WITHIN_S)
            if controller is not None and not cluster_ends:
                ray.get(controller.abort.remote(), timeout=_WORKERS_START_WITHIN_S)
        if controller is not None:
            ray.kill(controller)
            concurrent.futures.wait([self.ended], timeout=_ABORTED_WITHIN_S)

    def _find_controller(self, timeout_s: float) -> Any:
        """The controller's handle, if it starts within ``timeout_s``: it may just be starting; otherwise None."""
        until = time.monotonic() + timeout_s
        while self._controller is None and not self.ended.done():
            with suppress(GetTimeoutError):  # the machine is busy starting the run
                self._controller = self._ask_for_controller(_ABORTED_WITHIN_S)
            if time.monotonic() >= until:
                break
            concurrent.futures.wait([self.ended], timeout=0.1)
        return self._controller

    def _ask_for_controller(self, timeout_s: float | None = None) -> Any:
        put_away: list[Any] = ray.get(self._coordinator.controller.remote(), timeout=timeout_s)
        for ref in put_away:
            with suppress(ObjectLostError):  # it has died
                return ray.get(ref, timeout=timeout_s)
        return None

    def failure(self) -> str | None:
        """Why Ray Train gave up; None if it has not ended, or ended normally."""
        raised = self.ended.exception() if self.ended.done() else None
        if isinstance(raised, _DEATHS):
            return f"Ray Train's controller is lost: {root_cause(raised)}"
        return root_cause(raised) if raised else None

    def _fit(self, trainer: TorchTrainer) -> None:
        try:
            trainer.fit()
            self._end_controller()
            self.ended.set_result(None)
        except BaseException as error:
            _logger.debug("the workers failed: %s", redact(str(error)))  # with the traceback of each
            self._end_controller()
            self._free_reserved()
            self.ended.set_exception(error)

    def _end_controller(self) -> None:
        """End the controller, which stays as long as anybody has its handle."""
        controller, self._controller = self._controller, None
        if controller is not None:
            with suppress(Exception):  # this process has left the cluster
                ray.kill(controller)

    def _free_reserved(self) -> None:
        """Free the workers' CPUs and GPUs, which a controller that was killed has left reserved."""
        with suppress(Exception):  # the coordinator has died, or this process has left the cluster
            reserved: Any = ray.get(self._coordinator.reserved.remote(), timeout=_ABORTED_WITHIN_S)
            if reserved is not None:
                remove_placement_group(reserved)


class _Trainer(TorchTrainer):
    """A TorchTrainer that starts no processes which no run here needs, if this Ray would; FEWER_PROCESSES says how."""

    def __init__(self, *args: Any, grows: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self._grows = grows

    def _create_default_callbacks(self) -> list[Any]:
        defaults = super()._create_default_callbacks()
        return [callback for callback in defaults if type(callback).__name__ not in _LEFT_OUT]

    def _initialize_and_run_controller(self, **options: Any) -> Any:
        """Ask nobody for machines: the workers fit, and a placement group that waits is a demand, too."""
        policy = None if self._grows else options.get("scaling_policy")
        for name in _ASKS_FOR_MACHINES:
            if hasattr(policy, name):
                setattr(policy, name, lambda: None)
        return super()._initialize_and_run_controller(**options)


_ASKS_FOR_MACHINES = "_send_resource_request", "_maybe_send_resource_request", "_cancel_resource_request"


def _controller_reporters(coordinator: CoordinatorHandle) -> list[Any]:
    """A callback of Ray Train's controller that gives the coordinator its handle: the process that starts workers."""
    found = CONTROLLER.find()
    if found is None:
        return []
    callback: Any = found[0]

    class Reporter(callback):
        def after_controller_start(self, *_: Any, **__: Any) -> None:
            """Called by Ray Train, in the controller's process."""
            # Put away, and in a list: whoever is given the handle itself imports all of Ray Train.
            coordinator.set_controller.remote([ray.put(ray.get_runtime_context().current_actor)])

    return [Reporter()]


class _FailureReporter(UserCallback):
    """Reports why a worker group failed. Ray Train then starts another one, up to ``--max-failures`` times."""

    def __init__(self, coordinator: CoordinatorHandle) -> None:
        self._coordinator = coordinator

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called by Ray Train."""
        rank, error = min(worker_exceptions.items())
        self._coordinator.event.remote(WorkerFailed(root_cause(error), rank))
