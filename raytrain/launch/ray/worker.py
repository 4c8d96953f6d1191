"""One worker, as Ray Train starts it, with the user's modules that travel to it."""

from __future__ import annotations

import importlib.metadata
import inspect
import logging
import os
import pickle
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import ray
import ray.train.torch
import torch
import torch.distributed as dist

import raytrain
from raytrain.config.pickled_code import pickle_own_code, sending
from raytrain.config.user_code import trace_of
from raytrain.data.blocks import CachedBlocks, LocalBatch, batches_from_cache, batches_from_stream
from raytrain.data.labels.manifest import Manifest
from raytrain.data.labels.part_names import Part
from raytrain.data.plan.partition import CacheOrder, Partition
from raytrain.errors import LoopFailed, RaytrainError, UsageError, some_of
from raytrain.launch.debugger import open_at_breakpoints
from raytrain.launch.ray.coordinator import CoordinatorHandle
from raytrain.launch.ray.feed.block_cache import RemoteBlocks
from raytrain.launch.ray.feed.ingest import ImageSet
from raytrain.launch.ray.feed.streaming import FeederHandle, Stream, stream_blocks
from raytrain.launch.ray.private_api import announced_preemption
from raytrain.launch.ray.ray_errors import LOST_ACTOR
from raytrain.launch.script_end import ends_as_a_script
from raytrain.loader.transform_processes import transformed
from raytrain.monitor.events import Event, NodeLeaving, Note
from raytrain.runs.logs import PrintedLine, ProcessLog
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow, SkippedImage, SuspiciousLabel
from raytrain.training.assembly import make_run, train_run
from raytrain.training.run_spec import RunSpec
from raytrain.training.script_logging import LoggedRecord, log_as
from raytrain.training.waiting import wait_for_all

_POLL_S = 20.0


# In the driver: what travels.


def pickle_functions(spec: RunSpec, *, with_imports: bool) -> bytes:
    """Pickle the loop and the transforms of a run, with the modules of the user's that they are defined in.

    ``with_imports``: the workers may have no copy of the files beside these modules, so what was imported from there
    travels, too. Raises UsageError if something cannot be pickled.
    """
    # cloudpickle pickles a function by the name of its module, unless the module is registered here.
    functions = spec.loop, spec.transforms
    for function in functions:
        module = inspect.getmodule(getattr(function, "func", function))
        if module is None or (file := _users_file(module)) is None:
            continue  # it is installed on the workers, or travels by value anyway
        travelling = [module]
        if with_imports:
            # The folder from which the module was imported. A package is a folder itself.
            name = module.__spec__.name if module.__spec__ else module.__name__  # `python -m a.b` calls a.b __main__
            folder = file.parents[name.count(".") + hasattr(module, "__path__")]
            for imported in list(sys.modules.values()):
                imported_file = _users_file(imported)
                if imported_file is not None and imported_file.is_relative_to(folder):
                    travelling.append(imported)
        for travelling_module in travelling:
            if travelling_module.__name__ != "__main__":  # which is pickled by value anyway
                cloudpickle.register_pickle_by_value(travelling_module)  # pyright: ignore
    with sending({"The loop": spec.loop, "--transforms": spec.transforms}):
        return pickle_own_code(functions)


_INSTALLED_IN = (*set(sysconfig.get_paths().values()), *raytrain.__path__)
_installed_packages = cache(importlib.metadata.packages_distributions)  # also editable ones, in the user's own folders


def _users_file(module: ModuleType) -> Path | None:
    """Return the file of a module that the user has written and not installed; None for any other module."""
    file: str | None = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] in _installed_packages():
        return None
    if any(Path(file).is_relative_to(folder) for folder in _INSTALLED_IN):
        return None
    return Path(file)


@dataclass(frozen=True)
class RayWorkerInputs:
    """Handles by which the workers of a run get its images, and report. Holds no secret."""

    images: Mapping[str, ImageSet]  # of each part
    orders: Mapping[str, CacheOrder]  # in which they are kept; those without one are streamed
    weights: Any  # ObjectRef of the initial weights; None if the seed or a checkpoint decides
    functions: bytes  # the pickled loop and transforms of the spec, which may need modules of module_path
    module_path: tuple[str, ...]  # where the driver looks for modules: some workers have the same folders
    threads: int
    arguments: tuple[str, ...]  # sys.argv, for a loop that reads its options
    node: str  # ID of the driver's node
    working_folder: str  # of the driver
    variables: frozenset[str]  # names of the driver's environment variables
    feeders: tuple[FeederHandle, ...]  # from which workers get what is streamed
    coordinator: CoordinatorHandle


# In a worker.


def work(spec: RunSpec, inputs: RayWorkerInputs) -> None:
    """Train on this worker until the run ends or stops; worker 0 reports the outcome to the coordinator.

    If an error of the user's would end each attempt, the coordinator learns of it, and this returns. Any other
    exception is raised: then Ray Train ends this attempt, and may begin another one.
    """
    # Make this process like the driver, as far as the user's functions may notice.
    logging.getLogger("ray").setLevel(logging.ERROR)
    open_at_breakpoints(None, lambda is_open: None)
    torch.set_num_threads(inputs.threads)
    sys.argv = list(inputs.arguments)
    is_on_drivers_node = ray.get_runtime_context().get_node_id() == inputs.node
    has_drivers_folder = is_on_drivers_node and os.path.isdir(inputs.working_folder)  # no container apart
    if has_drivers_folder:
        os.chdir(inputs.working_folder)  # a loop or a model may read and write files by relative paths
    missing_folders = [folder for folder in inputs.module_path if folder not in sys.path]
    sys.path.extend(missing_folders)  # a loop may import what is beside it

    # What the user's functions print is shown, and what they leave open is written, before anything else ends.
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    reporter = RayReporter(inputs.coordinator, watch=rank == 0)
    try:
        note_of_files = nullcontext() if has_drivers_folder else noting_files_left(reporter)
        with ProcessLog(spec.store, rank, reporter.add_printed), note_of_files, ends_as_a_script():
            loop, transforms = unpickle_functions(inputs.functions)
            spec = replace(spec, loop=loop, transforms=transforms)

            # Bring together what a run needs of Ray: its images, its weights, its coordinator.
            config = spec.config
            device = ray.train.torch.get_device() if config.device_type == "cuda" else torch.device("cpu")
            source = RayBatches(spec, inputs, rank, config.loads(world_size))
            weights: Any = None if inputs.weights is None else ray.get(inputs.weights)
            note = (lambda text: reporter.note_event(Note(text))) if rank == 0 else None  # one worker speaks for all
            log_as(spec.loggers, rank, reporter.logged)
            with transformed(source, config, transforms, note) as batches:
                outcome = train_run(spec, make_run(spec, batches, reporter, device, weights))
    except RaytrainError as error:
        error_with_hint = with_machine_hint(error, inputs.working_folder, inputs.variables)
        give_up: Any = inputs.coordinator.give_up  # Ray's types of a method leave out arguments with defaults
        if ray.get(give_up.remote(error_with_hint, trace_of(error), rank)):
            return  # the driver ends the run; an exception would have Ray Train start other workers
        raise
    wait_for_all()  # every worker's log must be there before the driver ends them
    if rank == 0:
        ray.get(inputs.coordinator.conclude.remote(outcome))


def unpickle_functions(pickled: bytes) -> tuple[Any, Any]:
    """Return the loop and the transforms; raise UsageError if a module that they import cannot be imported here.

    Any other exception than UsageError would have Ray Train start further attempts, which would end the same way.
    """
    try:
        return pickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        machine = f"the Python of this worker's machine, {ray.util.get_node_ip_address()}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            reason = f"imports {error.name}, which {machine}, lacks; install it on all machines of the cluster"
        else:
            reason = (
                f"cannot be imported by {machine} ({str(error).rstrip('.')}); install the same versions of its "
                "packages on all machines of the cluster"
            )
        raise UsageError(f"Your code {reason}.") from error


def with_machine_hint(error: RaytrainError, drivers_folder: str, drivers_variables: frozenset[str]) -> RaytrainError:
    """Return ``error``, with a hint if the loop failed because its machine lacks a variable or a file of the driver's.

    A KeyError counts as one of ``os.environ[NAME]`` if its key is a variable that the driver has and this process does
    not. A file may be missing because the loop does not run in ``drivers_folder``.
    """
    if not isinstance(error, LoopFailed):
        return error
    cause = error.__cause__
    hint = ""
    key = str(cause.args[0]) if isinstance(cause, KeyError) and cause.args else ""
    if key in drivers_variables and key not in os.environ:
        hint = (
            f"{key} is set for the command, and the workers have the variables of `ray start`: set it there, or pass "
            "it by `ray job submit --runtime-env-json`"
        )
    elif isinstance(cause, FileNotFoundError):
        with suppress(FileNotFoundError):  # the working folder itself has been removed
            if (folder := os.getcwd()) != drivers_folder:
                hint = f"on the machine of this worker, {ray.util.get_node_ip_address()}, the loop runs in {folder}"
    return LoopFailed(f"{error}; {hint}", error.restart_may_help) if hint else error


@contextmanager
def noting_files_left(reporter: RayReporter) -> Generator[None]:
    """Report which files the ``with`` block leaves in the working folder of this machine, which is not the driver's.

    Report nothing if the folder cannot be listed: it may belong to another user, or be removed.
    """
    try:
        folder = os.getcwd()
        before = set(os.listdir(folder))
    except OSError:
        yield
        return
    try:
        yield
    finally:
        new_files: list[str] = []
        with suppress(OSError):
            new_files = sorted(set(os.listdir(folder)) - before - {"__pycache__"})
        rank = ray.train.get_context().get_world_rank()
        if new_files and ray.train.get_context().get_local_rank() == 0:  # the workers of a machine share the folder
            machine = ray.util.get_node_ip_address()
            reporter.note_event(
                Note(
                    f"while worker {rank} trained, {some_of(new_files)} came into {folder} of its machine, {machine}: "
                    "what a loop writes into run.folder is kept in the run's storage"
                )
            )


class RayBatches:
    """A :class:`raytrain.training.protocols.BatchSource` over blocks in the object store, or the feeders' streams.

    The constructor begins an attempt on all workers together. ``loads`` are the shares of the workers, relative to each
    other.
    """

    def __init__(self, spec: RunSpec, inputs: RayWorkerInputs, rank: int, loads: tuple[float, ...]) -> None:
        # All workers learn the number of their attempt from worker 0, which alone asks for it.
        number: list[Any] = [0]
        if rank == 0:
            number = [ray.get(inputs.coordinator.begin_attempt.remote())]
        if dist.is_initialized():
            dist.broadcast_object_list(number, src=0)
        self._attempt: int = number[0]

        self._inputs = inputs
        self._num_streams: Counter[str] = Counter()
        self._partitions = {
            part: Partition(plan, rank, loads) for part, plan in {"train": spec.plan, **spec.held_out_plans}.items()
        }
        self._caches = {
            dataset: CachedBlocks(
                RemoteBlocks(images.coordinator, dataset, images.format.shape), inputs.orders[dataset]
            )
            for dataset, images in inputs.images.items()
            if dataset in inputs.orders
        }

    def train(self, first_step: int) -> Iterator[LocalBatch]:
        return self._batches("train", first_step)

    def held_out(self, part: Part) -> Iterator[LocalBatch]:
        return self._batches(part, 0)

    def keys(self, part: Part, samples: Sequence[int]) -> list[str]:
        manifest: Manifest = ray.get(self._inputs.images[part].manifest)
        return manifest.keys_of(samples)

    def _batches(self, dataset: str, first_step: int) -> Iterator[LocalBatch]:
        """Return the batches of a part from ``first_step`` on: from the cache if it is kept, else from a new stream."""
        partition = self._partitions[dataset]
        if dataset in self._caches:
            return batches_from_cache(partition, self._caches[dataset], first_step)
        stream = Stream(self._attempt, self._num_streams[dataset], dataset, first_step, len(partition.loads))
        self._num_streams[dataset] += 1
        blocks = stream_blocks(self._inputs.feeders, stream, self._inputs.images[dataset], partition)
        return batches_from_stream(partition, blocks, first_step)


class RayReporter:
    """A :class:`raytrain.training.protocols.Reporter` that calls the run's coordinator without waiting for it.

    With ``watch``, a thread waits for a stop request at the coordinator. Calls that must not get lost, ``add_printed``
    and ``flush``, wait for its answer.
    """

    def __init__(self, coordinator: CoordinatorHandle, *, watch: bool) -> None:
        self._coordinator = coordinator
        self._stop_requested = threading.Event()
        self._preemption: Any = None  # the last one that was reported
        if watch:
            threading.Thread(target=self._wait_for_stop_request, daemon=True, name="stop-watch").start()

    def note_start(self, num_workers: int, step: int, measures_again: bool = False) -> None:
        self._coordinator.note_start.remote(num_workers, step, measures_again)

    def record(self, row: MetricRow) -> None:
        self._coordinator.record.remote(row)

    def note_machine_use(self, use: MachineUse) -> None:
        self._coordinator.measured_on.remote(use, ray.get_runtime_context().get_node_id())

    def note_event(self, event: Event) -> None:
        self._coordinator.note_event.remote(event)

    def note_wait(self, rank: int, num_workers: int, place: str | None) -> None:
        self._coordinator.note_wait.remote(rank, num_workers, place)

    def replace_suspicious_labels(self, labels: Sequence[SuspiciousLabel]) -> None:
        self._coordinator.replace_suspicious_labels.remote(labels)

    def note_skipped(self, images: Sequence[SkippedImage]) -> None:
        self._coordinator.note_skipped.remote(images)

    def note_decoded_on_cpu(self, num_images: int, reason: str) -> None:
        self._coordinator.note_decoded_on_cpu.remote(num_images, reason)

    def add_printed(self, lines: Sequence[PrintedLine]) -> None:
        """Have the driver show ``lines``; return once the coordinator has them, so that the run may end."""
        with suppress(*LOST_ACTOR):  # the loop finds out by its next report that needs an answer
            ray.get(self._coordinator.add_printed.remote(lines))

    def logged(self, record: LoggedRecord) -> None:
        """Have the driver write ``record`` into the files of its loggers."""
        self._coordinator.add_printed.remote([record])

    def flush(self) -> None:
        # The coordinator's flush runs in a thread beside its other calls, so it must not begin before the rows have
        # arrived.
        ray.get(self._coordinator.received.remote())
        ray.get(self._coordinator.flush.remote())

    def stop_requested(self) -> bool:
        return self._stop_requested.is_set()

    def checkpoint_requested(self) -> bool:
        """Return True once for each announcement of Ray's that a node of these workers will be taken away.

        The announcement is reported to the coordinator, too.
        """
        preemption = announced_preemption()
        if preemption is None or preemption is self._preemption:
            return False
        self._preemption = preemption
        self.note_event(NodeLeaving(len(preemption.preempted_node_ids)))
        return True

    def _wait_for_stop_request(self) -> None:
        """Wait at the coordinator, in a thread, until a stop is requested or the coordinator has died."""
        with suppress(*LOST_ACTOR):  # the run is over
            while ray.get(self._coordinator.wait_for_stop_request.remote(_POLL_S)) is None:
                pass
            self._stop_requested.set()
