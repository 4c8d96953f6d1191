"""`raytrain.attach`: a run in processes that somebody else has started, such as Ray Train, `torchrun` or a notebook.

The processes of the default group of `torch.distributed` are the run's workers; without a group, this one is. What
:func:`raytrain.train` does in a driver, process 0 does in a thread beside its loop::

    process 0    the loop    AttachedCoordinator <-- RunSession, in a thread: documents, trackers, views, a stop
    process 1    the loop    MessageReporter --> through the group's store, twice a second
    ...

1. Process 0 names the run, lists its images, takes ownership of it, and sends :class:`AttachedInputs` to the others.
2. Each process puts its part of the run together, as a worker of any backend does; the ``with`` block of the user gets
   it as ``run``. The code in that block is the run's loop.
3. At the end of the block, all processes finish the run together. If one leaves the block by an error, it reports that
   to process 0, which marks the run as failed, even while its own loop still waits for that process. The launcher may
   kill all processes as soon as the first has ended, so the process with the error waits some seconds for process 0.

Processes are never restarted here. That is up to the launcher; ``resume=True`` goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from raytrain.config import ResolvedConfig, TrainConfig
from raytrain.config.option_calls import takes_config
from raytrain.data.dataset import Dataset
from raytrain.errors import LoopFailed, StorageError, UsageError
from raytrain.launch.attached_launch import AttachedCoordinator, AttachedLaunch, GroupMessages, MessageReporter
from raytrain.launch.option_checks import check_options_of_attach
from raytrain.launch.prepare import TrainRequest, prepare, settle_options
from raytrain.launch.resumed_options import already_trained
from raytrain.loader.decoder_processes import NewProcess
from raytrain.loader.machine import gpu_decoder_problem
from raytrain.loader.process_group import ProcessGroup
from raytrain.loader.restarting_batches import RestartingBatches, machine_cache, start_decoding
from raytrain.loader.transform_processes import transformed
from raytrain.monitor.events import Note
from raytrain.monitor.snapshot import View
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.logs import ProcessLog
from raytrain.runs.outcome import StopReason
from raytrain.storage.store import Store
from raytrain.trackers.open_trackers import Trackers, open_trackers
from raytrain.training.assembly import load_initial_weights, make_run, training
from raytrain.training.loop_errors import errors_of_loop
from raytrain.training.run import Run
from raytrain.training.run_spec import RunSpec

if TYPE_CHECKING:
    from raytrain.launch.ray.train_reports import RayReports, Report


@takes_config
def attach(
    config: TrainConfig, *, view: View | None = None, trackers: Trackers = ()
) -> AbstractContextManager[Run, bool | None]:
    """Return a context in which this process is a worker of a run, without starting anything.

    Call it on every process of a group of ``torch.distributed``: in a ``train_loop_per_worker`` of Ray Train, or under
    ``torchrun`` after ``init_process_group()``. Without a group, as in a notebook or a trial of Ray Tune, the run has
    one worker. The run has the same loop, history, checkpoints, page and stop as one of :func:`raytrain.train`, and
    with ``resume=True`` it goes on with any number of workers, in the middle of an epoch, too.

    A stop raises nothing: the epochs end. When the block is left, the run is finished, and ``run.result`` is its
    :class:`TrainResult` on every worker. An error in the block fails the run, which keeps its checkpoints, and is
    raised as it is. In Ray Train and Ray Tune, what each evaluation measures also goes to ``ray.train.report`` or
    ``ray.tune.report``, and at the end the last checkpoint, unless the block's own code reports.

    Args:
        config: the options. Those about processes are the launcher's: workers, device numbers, max_failures, …
        view: called about twice a second with the run's :class:`Snapshot`, in a thread of process 0; by default nothing
            is shown.
        trackers: where else to send metrics, as for :func:`raytrain.train`.

    Raises:
        UsageError, StorageError: a setting or an input is wrong, or a resumed run has nothing to do, on all workers;
            nothing was written.
        TrainingFailed: the run has failed without an error of its loop, such as by a loss that is not finite.

    Example:
        >>> with raytrain.attach(TrainConfig(data="photos", batch_size=32, epochs=5)) as run:
        ...     model = run.prepare(torchvision.models.resnet18(num_classes=run.num_classes))
        ...     optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
        ...     for epoch in run.epochs():
        ...         for images, labels in epoch:
        ...             loss = cross_entropy(model(images), labels)
        ...             optimizer.zero_grad()
        ...             loss.backward()
        ...             optimizer.step()
        ...             run.log(loss=loss)
    """
    # The block is a part of the caller's code. Make a function of that code, so that its text can be checked as that of
    # any loop. The function is never called.
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("raytrain."):
        frame = frame.f_back
    closure = tuple(CellType(frame.f_locals.get(name)) for name in frame.f_code.co_freevars)
    loop = cast(Callable[[Run], None], FunctionType(frame.f_code, frame.f_globals, closure=closure))
    request = TrainRequest(loop=loop, view=view, command="attach")
    return _attached(config, request, trackers)


@dataclass(frozen=True, kw_only=True)
class AttachedInputs:
    """The record that process 0 sends to the other processes, from which each puts its part of the run together.

    ``first_step`` counts the completed steps of the checkpoint from which the run resumes. ``key`` is random, and keeps
    this run's :class:`GroupMessages` apart from those of an earlier run in the same group.
    """

    config: ResolvedConfig
    data: Dataset
    store: Store
    first_step: int
    key: str


@contextmanager
def _attached(config: TrainConfig, request: TrainRequest, trackers: Trackers) -> Iterator[Run]:
    """Be a worker of the run in this context; see :func:`attach`."""
    group = ProcessGroup()
    rank, world_size = group.rank_and_size()
    report: Report | None = None  # to Ray Train or Ray Tune, if one of them has started this process
    if "ray.train" in sys.modules:  # as in all processes of theirs; elsewhere, its import would take seconds
        from raytrain.launch.ray.train_reports import report_to_ray

        report = report_to_ray()
    device = _meet(config, group, in_ray=report is not None)

    with ExitStack() as opened:
        # Process 0 prepares the run and has a launch, whose session sees the run to its end in a thread. All processes
        # report to it.
        signals = opened.enter_context(request.signals)
        processes = group.everywhere(lambda: start_decoding(config.data, opened))
        inputs, launch = _prepare_on_first(config, request, trackers, group, device, opened)
        messages = GroupMessages(inputs.key) if world_size > 1 else None
        if launch is not None:
            launch.start_session(messages)
        reporter = launch.coordinator if launch is not None else MessageReporter(messages, rank, signals)

        # Now the run trains: the block is its loop.
        reports: RayReports | None = None
        try:
            spec, run = _make_run(inputs, request, group, device, reporter, processes, opened)
            if launch is not None:
                launch.send_files = run.files.send_rest
            if report is not None:
                reports = _start_reports(report, run, spec, launch, messages, signals)
            with training(spec, run):
                with errors_of_loop(spec, run):
                    yield run
                outcome = run.finish()
        except BaseException as error:
            # An error by which the block is left is first reported to process 0, which writes how the run ends.
            failure = error
            if reports is not None:
                reports.abort()
            reporter.fail(error)
            if launch is not None:
                launch.wait_for_session()
        else:
            # All workers have finished. Worker 0 has the session write the result, and sends it to all.
            failure = None
            run.result = group.from_first(lambda: cast(AttachedLaunch, launch).conclude(outcome))
            if reports is not None:
                checkpoint = None
                if rank == 0 and outcome.checkpoint is not None:
                    with suppress(StorageError):  # which may have gone away since
                        checkpoint = inputs.store.get(outcome.checkpoint)
                reports.finish({"status": run.result.status, "run_dir": run.result.run_dir}, checkpoint)

        if failure is not None:  # outside of the except clause, so that the error is raised without a context
            # errors_of_loop makes a LoopFailed of the block's own error. The caller gets the own error.
            own_error = failure.__cause__ if isinstance(failure, LoopFailed) else None
            raise own_error or failure


def _meet(config: TrainConfig, group: ProcessGroup, *, in_ray: bool) -> torch.device:
    """Check that all processes are in one group, and have the same options; return the device of this one.

    Raises UsageError on all processes if they do not, or if an attached run cannot obey the options.
    """
    _, world_size = group.rank_and_size()
    if world_size > 1 and not group.can_talk:
        raise UsageError(
            f"This is one of {world_size} processes, and would train alone: call "
            "torch.distributed.init_process_group() first, and raytrain.attach after it."
        )
    group.everywhere(lambda: check_options_of_attach(config, in_ray=in_ray))
    group.check_equal("other options for raytrain.attach", config.to_json())
    device = group.everywhere(lambda: _own_device(config, in_ray=in_ray))
    if config.threads_per_worker is not None:
        torch.set_num_threads(config.threads_per_worker)
    return device


def _own_device(config: TrainConfig, *, in_ray: bool) -> torch.device:
    """Return the device of this process: its GPU if it has one, unless the options say ``cpu``.

    Ray Train has chosen a GPU for the process already. torchrun only numbers the processes of a machine, by LOCAL_RANK:
    here, process i makes GPU i its current one, unless its code has chosen a GPU before.

    Raises UsageError if the options ask for a GPU and there is none, if the process group needs GPUs and the options
    say ``cpu``, or if LOCAL_RANK is no number.
    """
    if config.device_type == "cpu" or (config.device_type == "auto" and not torch.cuda.is_available()):
        if dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL:
            raise UsageError(
                f"device is {config.device!r}, and the process group has the backend nccl, which works on GPUs only: "
                "call init_process_group() without a backend, or choose another device."
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(f"device is {config.device!r}, and this process has no GPU; omit it, or give it one.")
    number = os.environ.get("LOCAL_RANK") or "0"
    if not number.isdecimal():
        raise UsageError(
            f"LOCAL_RANK is {number!r} in the environment, and is the number of this process on its machine, from 0 "
            "on; set it as torchrun does, or leave it out."
        )
    # GPU 0 is current until somebody chooses one. If a launcher shows each process one GPU alone, that is GPU 0, too.
    none_is_chosen = not in_ray and torch.cuda.current_device() == 0
    if none_is_chosen and int(number) < torch.cuda.device_count():
        torch.cuda.set_device(int(number))
    return torch.device("cuda", torch.cuda.current_device())


def _prepare_on_first(
    config: TrainConfig,
    request: TrainRequest,
    trackers: Trackers,
    group: ProcessGroup,
    device: torch.device,
    opened: ExitStack,
) -> tuple[AttachedInputs, AttachedLaunch | None]:
    """Have process 0 prepare the run; return the inputs on all processes, and the launch on process 0, else None.

    Process 0 owns the run until ``opened`` is closed. If the preparation fails, UsageError or StorageError is raised on
    all processes.
    """
    launch: AttachedLaunch | None = None
    # GPUs decode images only if those of all processes can: the first reason why one cannot, or None.
    decoder_problem = next(filter(None, group.gather(gpu_decoder_problem(device.type))), None)

    def prepare_run() -> AttachedInputs:
        nonlocal launch
        tracked = replace(request, trackers=open_trackers(config.track, trackers))
        settled = settle_options(config)
        if (ended := already_trained(settled)) is not None:
            _, sentence = ended  # no loop can be given an earlier result in place of its steps
            raise UsageError(sentence)
        prepared = opened.enter_context(prepare(settled, tracked))
        _, world_size = group.rank_and_size()
        resolved = prepared.resolve(world_size, device.type, decoder_problem=lambda _: decoder_problem)
        launch = AttachedLaunch(prepared, resolved, world_size)
        return AttachedInputs(
            config=resolved,
            data=prepared.data.decoded_as(resolved),
            store=prepared.store,
            first_step=prepared.first_step,
            key=secrets.token_hex(8),
        )

    return group.from_first(prepare_run), launch


def _make_run(
    inputs: AttachedInputs,
    request: TrainRequest,
    group: ProcessGroup,
    device: torch.device,
    reporter: AttachedCoordinator | MessageReporter,
    processes: Sequence[NewProcess],
    opened: ExitStack,
) -> tuple[RunSpec, Run]:
    """Return the spec of the run, and this process's part of it, put together as a worker of any backend does.

    The images, and on the processes but the first a log, are open until ``opened`` is closed. The coordinator learns
    that the network, its weights and the options fit together, so that documents of the run may be written. If the code
    or the weights cannot be loaded on one process, its UsageError or StorageError is raised on all.
    """
    rank, world_size = group.rank_and_size()
    config, data, first_step = inputs.config, inputs.data, inputs.first_step
    if rank > 0:
        log = ProcessLog(inputs.store, rank)
        log.__enter__()
        # Leave the log without the error that ends the process: the launcher prints it.
        opened.callback(log.__exit__, None, None)

    # Load code and weights first: nothing is written before all processes have succeeded.
    spec = RunSpec.of(config, data, inputs.store, request.loop, world_size)
    spec = group.everywhere(spec.with_functions)
    weights = group.everywhere(lambda: load_initial_weights(spec, first_step))

    # Then open the images. A bad image may have ended the attempt before, so a run that resumes decodes in isolation.
    cache = machine_cache(config, data, first_step, group, opened)
    loads = config.loads(world_size)
    source = RestartingBatches(config, data, rank, loads, cache, reporter, processes, isolated=config.resume)
    opened.enter_context(source)
    note = (lambda text: reporter.note_event(Note(text))) if rank == 0 else None
    images = opened.enter_context(transformed(source, config, spec.transforms, note))
    if isinstance(reporter, AttachedCoordinator):
        reporter.note_checked()
    return spec, make_run(spec, images, reporter, device, weights)


def _start_reports(
    report: Report,
    run: Run,
    spec: RunSpec,
    launch: AttachedLaunch | None,
    messages: GroupMessages | None,
    signals: StopSignals,
) -> RayReports | None:
    """Start the thread of this worker that reports the run's evaluations to Ray, and return its :class:`RayReports`.

    They come from the ``launch`` of process 0. If Ray Tune ends the trial at a report, the run is asked to stop. Return
    None, and report nothing, if the code in the user's ``with`` block calls Ray's ``report`` itself, or another
    function of Ray that all workers call together: Ray counts such calls, and would take a report from this thread for
    one of them.
    """
    from raytrain.launch.ray.train_reports import RayReports, meets_in_ray

    if meets_in_ray(spec.loop):
        return None
    stopped = StopReason("caller", "Ray Tune has ended the trial")
    reports = RayReports(report, run.worker, messages, run.plan.num_steps, lambda: signals.request_stop(stopped))
    if launch is not None:
        launch.coordinator.on_row = reports.add
    return reports
