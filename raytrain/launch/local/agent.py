"""The process of torch's elastic agent, which forks the workers of one run, and what each of them does."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # garbage collection takes a quarter of the import of torch, and finds next to nothing

import ctypes
import inspect
import io
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from raytrain.config.user_code import describe, trace_of
from raytrain.errors import RaytrainError, UsageError
from raytrain.launch.coordinator import Coordinator
from raytrain.launch.debugger import open_at_breakpoints
from raytrain.launch.local.coordinator_socket import CallAddress, Caller
from raytrain.launch.local.local_launch import WorkerInputs, detached_processes, note_on_detached
from raytrain.launch.script_end import ends_as_a_script
from raytrain.loader.machine import cores
from raytrain.loader.machine_batches import MachineBatches
from raytrain.loader.transform_processes import transformed
from raytrain.monitor.events import Note
from raytrain.runs.outcome import Outcome
from raytrain.training.assembly import load_initial_weights, make_run, train_run
from raytrain.training.run_spec import RunSpec
from raytrain.training.script_logging import LoggedRecord, log_as
from raytrain.training.waiting import wait_for_all

P = ParamSpec("P")
T = TypeVar("T")

_SHUTDOWN_S = 5  # that workers have to end after SIGTERM
_WAITS_AT_MOST = timedelta(minutes=30)  # for other workers in a collective, as with Ray Train; torch's for GPUs is 10
_POLL_S = 20.0  # after which a worker asks again whether the run is to stop
_SET_CHILD_SUBREAPER = 36  # of linux/prctl.h
_FAILED = 201  # exit code of a worker that has reported its error to the coordinator; hardly any loop exits with it


def main() -> None:
    """Start the workers of the run that standard input describes, and wait until they have ended.

    Standard input has two pickled objects: the current folder of the command, and the spec with the inputs of the run.
    It stays open, and its end means that the driver has ended.
    """
    gc.freeze()  # otherwise the first collection, here and in each worker, would go through all objects of the imports
    gc.enable()
    # Our own code reports errors, so torch must not log them as well.
    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Change to the command's folder first: unpickling the rest may import modules from it.
    try:
        folder = pickle.load(sys.stdin.buffer)
        os.chdir(folder)
        spec, inputs = pickle.load(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # the driver was killed before it had sent all of the run
        return
    threading.Thread(target=_end_with_starter, daemon=True).start()
    # Become the parent of processes whose parents end, so that the driver finds those that a loop has left. Only Linux
    # can do that.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        agent = _Agent(spec, inputs)
        result = cast(RunResult, agent.run())
        if result.is_failed():
            agent.report_detached_processes()
    except SignalException as error:
        # Somebody has sent the signal to this process alone, and torch has ended the workers. The driver learns of it
        # by the way in which this process ends.
        signal.signal(error.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), error.sigval)
    except Exception as error:  # such as a full /dev/shm, where torch's agent makes semaphores
        sentence = (
            f"The workers cannot be started: {describe(error)}; check that /dev/shm is there and has room, and the "
            "limits of this machine (ulimit -a)."
        )
        Caller(inputs.calls)(Coordinator.give_up, UsageError(sentence), traceback.format_exc())


def _end_with_starter() -> None:
    """End this process and all workers when the process that started them ends, which closes the pipe to it."""
    # Not sys.stdin.read(): it holds a lock while it waits, which the forked processes would inherit, held for ever.
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGKILL)


class _OnlyAgent(RendezvousHandler):
    """The rendezvous at which torch has the agents of a run meet, for a run with a single agent.

    torch's own rendezvous listens on all interfaces of this machine, or polls a file; and for each of its log messages
    it looks through all imported modules for its caller, which takes a quarter of a second of a core before the first
    step.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this agent's place: the only one, with a store that no other process needs."""
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "localhost"))

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def shutdown(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "only"

    def get_run_id(self) -> str:
        return "run"


class _Agent(LocalElasticAgent):
    """Starts the workers of a run, and starts them again if one fails, up to ``--max-failures`` times."""

    def __init__(self, spec: RunSpec, inputs: WorkerInputs) -> None:
        # torch writes files about exceptions of workers, and leaves them behind; this folder is removed.
        tempfile.tempdir = inputs.folder
        worker_spec = WorkerSpec(
            role="worker",
            local_world_size=inputs.num_workers,
            rdzv_handler=_OnlyAgent(),
            entrypoint=work,
            args=(spec, inputs),
            max_restarts=spec.config.max_failures,
            local_addr="localhost",
        )
        # Output goes into files, from which the driver shows it: this process is killed at the end of the run, and
        # would lose the last lines.
        logs = DefaultLogsSpecs(log_dir=inputs.folder, redirects=Std.ALL)
        # torch waits 30 s for workers that should end; versions after 2.8 let that be shortened.
        parameter_names = inspect.signature(LocalElasticAgent).parameters
        shorter: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_S} if "shutdown_timeout" in parameter_names else {}
        super().__init__(spec=worker_spec, logs_specs=logs, start_method="fork", **shorter)
        self._call = Caller(inputs.calls)

    def report_detached_processes(self) -> None:
        """Report the processes that outlive a run whose workers have failed; after any other end, the driver does."""
        if detached := detached_processes(os.getpid()):
            self._call(Coordinator.note_event, note_on_detached(detached))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers, which torch's agent does every 0.1 s, and report dead ones to the coordinator.

        If one is dead, return that the group has failed; then torch's agent ends the others and starts all again.
        """
        # Ask how workers have died before torch's agent reaps them, after which nobody can tell.
        dead = _dead_workers(worker_group.workers)
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue] ; it is decorated
        # A worker that exits before its loop has returned has failed, even with exit code 0. torch does not notice the
        # end of one whose loop has forked a process that still runs: it holds the pipe open that torch waits for.
        if dead and not result.is_failed():
            result = RunResult(WorkerState.FAILED)
        if result.is_failed():
            silent = {rank: how for rank, how in dead.items() if how is not None}
            self._call(Coordinator.note_lost_workers, silent)
            # gloo aborts a process that gets a tensor of another size: with this, the next attempt reports its shape.
            if any("SIGABRT" in how for how in silent.values()):
                dist.set_debug_level(dist.DebugLevel.DETAIL)  # pyright: ignore
        return result


def _dead_workers(workers: list[Worker]) -> dict[int, str | None]:
    """Return, by rank, how each worker died that a signal has killed or that exited; None if it reported an error.

    Empty if Python cannot ask without reaping a process: on macOS before Python 3.13.
    """
    dead: dict[int, str | None] = {}
    for worker in workers if hasattr(os, "waitid") else []:
        try:
            state = os.waitid(os.P_PID, worker.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # torch's agent has reaped it before
            continue
        if state is not None and state.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            dead[worker.global_rank] = f"was killed by {signal.Signals(state.si_status).name}"
        elif state is not None:
            how = f"exited with code {state.si_status} before its loop had returned"
            dead[worker.global_rank] = None if state.si_status == _FAILED else how
    return dead


def work(spec: RunSpec, inputs: WorkerInputs) -> None:
    """Train as one of the workers until the run ends or stops.

    An error of the user's ends the run. After any other error, the agent starts all workers again: this process reports
    the error and exits with a code that says so.
    """
    # Restore the default handlers: those of the agent, which forked this process, would raise in the loop, as if the
    # loop had failed. The agent sends SIGTERM if another worker has failed, the system SIGINT if the agent has died.
    for ends_worker in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ends_worker, signal.SIG_DFL)
    sys.argv = list(inputs.arguments)
    tempfile.tempdir = None  # temporary files of the loop are not for the agent's folder, which the fork has inherited
    # Output to a file is buffered by default, but the driver shows lines at once.
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    rank = int(os.environ["RANK"])
    reporter = SocketReporter(inputs.calls)
    open_at_breakpoints(inputs.terminal, reporter.note_debugger)
    try:
        with ends_as_a_script():
            outcome = _train(spec, inputs, rank, reporter)
    except RaytrainError as error:
        run_has_ended = reporter.give_up(error, trace_of(error), rank)
        if not run_has_ended:  # another attempt may help
            os._exit(_FAILED)
        return
    except Exception as error:
        reporter.note_worker_failure(rank, describe(error), traceback.format_exc())
        os._exit(_FAILED)
    wait_for_all()  # until every worker has written everything: after the report, the driver ends them all
    if rank == 0:
        reporter.conclude(outcome)


def _train(spec: RunSpec, inputs: WorkerInputs, rank: int, reporter: SocketReporter) -> Outcome:
    """Put this worker's part of the run together, train, and return the outcome; only worker 0 has its checkpoint."""
    config, num_workers, attempt = spec.config, inputs.num_workers, os.environ["TORCHELASTIC_RESTART_COUNT"]
    loads = config.loads(num_workers)
    isolated = config.resume or attempt != "0"  # a bad image may have ended an earlier attempt
    with MachineBatches(inputs.data, spec.plan, rank, loads, inputs.cache, reporter, isolated=isolated) as source:
        # The user's code is imported after the decoding processes are forked, because it may start threads.
        spec = spec.with_functions()

        # The worker gets a GPU of its own, or a share of the cores.
        if config.device_type == "cpu" or not torch.cuda.is_available():
            workers_here = int(os.environ["LOCAL_WORLD_SIZE"])
            torch.set_num_threads(config.threads_per_worker or max(1, cores() // workers_here))
            device = torch.device("cpu")
        else:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)

        # The workers of each attempt meet in a file of their own.
        if num_workers > 1:
            store = f"file://{inputs.folder}/workers-{attempt}"
            backend = dist.Backend.NCCL if device.type == "cuda" else dist.Backend.GLOO
            dist.init_process_group(backend, store, rank=rank, world_size=num_workers, timeout=_WAITS_AT_MOST)

        # The weights are the last thing that may not fit the options; then documents of the run may be written.
        weights = load_initial_weights(spec, inputs.first_step)
        if rank == 0:
            reporter.watch_for_stop()
            reporter.note_checked()
        note = (lambda text: reporter.note_event(Note(text))) if rank == 0 else None
        log_as(spec.loggers, rank, reporter.logged)
        with transformed(source, config, spec.transforms, note) as images:
            return train_run(spec, make_run(spec, images, reporter, device, weights))


def _passed_on(method: Callable[Concatenate[Coordinator, P], T]) -> Callable[Concatenate[SocketReporter, P], T]:
    """Return the method of a SocketReporter that calls ``method`` of the coordinator."""

    def call(self: SocketReporter, *arguments: P.args, **options: P.kwargs) -> T:
        return self._call(method, *arguments, **options)

    return call


class SocketReporter:
    """A worker's :class:`raytrain.training.protocols.Reporter`: calls the coordinator in the driver, over a socket.

    Each call returns once the coordinator has handled it. Besides the reports of training, there are those of
    :func:`work` and of the decoding processes.
    """

    def __init__(self, calls: CallAddress) -> None:
        self._calls = calls
        self._call = Caller(calls)
        self._call_slowly = Caller(calls)  # storage may hang, and a step must not wait for it
        self._stop_requested = threading.Event()

    # Training.
    note_start = _passed_on(Coordinator.note_start)
    record = _passed_on(Coordinator.record)
    note_machine_use = _passed_on(Coordinator.note_machine_use)
    note_event = _passed_on(Coordinator.note_event)
    note_wait = _passed_on(Coordinator.note_wait)
    replace_suspicious_labels = _passed_on(Coordinator.replace_suspicious_labels)

    # The decoding processes.
    note_skipped = _passed_on(Coordinator.note_skipped)
    note_retries = _passed_on(Coordinator.note_retries)
    note_decoded_on_cpu = _passed_on(Coordinator.note_decoded_on_cpu)

    # The beginning and the end of this worker.
    note_checked = _passed_on(Coordinator.note_checked)
    conclude = _passed_on(Coordinator.conclude)
    give_up = _passed_on(Coordinator.give_up)
    note_worker_failure = _passed_on(Coordinator.note_worker_failure)

    def flush(self) -> None:
        self._call_slowly(Coordinator.flush)

    def note_debugger(self, is_open: bool) -> None:
        self._call_slowly(Coordinator.note_debugger, is_open)  # a person types meanwhile

    def logged(self, record: LoggedRecord) -> None:
        """Have the driver write ``record`` into the files of its loggers."""
        with suppress(EOFError, OSError):  # the driver was killed, and the agent ends its workers
            self._call(Coordinator.add_printed, [record])  # which takes printed lines and log records

    def stop_requested(self) -> bool:
        return self._stop_requested.is_set()

    def checkpoint_requested(self) -> bool:
        """Return False: there are only the checkpoints that the options ask for."""
        return False

    def watch_for_stop(self) -> None:
        """Start a thread that waits for a request to stop; from then on, :meth:`stop_requested` returns True."""
        call = Caller(self._calls)  # a connection of its own, because it waits in each call

        def wait_for_stop() -> None:
            with suppress(EOFError, OSError):  # the driver was killed, and the agent ends its workers
                while call(Coordinator.wait_for_stop_request, _POLL_S) is None:
                    pass
                self._stop_requested.set()

        threading.Thread(target=wait_for_stop, daemon=True, name="stop-watch").start()


if __name__ == "__main__":
    main()
    os._exit(0)  # at Python's own end, triton would list objects of its own on the terminal, as leaks
