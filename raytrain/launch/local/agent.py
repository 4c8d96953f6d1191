"""The process of torch's elastic agent, which forks the workers of one run, and what each of them does."""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # collections while torch is imported find next to nothing, and take a quarter of the time

import inspect
import logging
import os
import pickle
import signal
import sys
import threading
import traceback
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from raytrain.config import TrainConfig
from raytrain.config.user_code import describe, trace_of
from raytrain.errors import RaytrainError
from raytrain.launch.local.local_launch import CallAddress, Caller, Surroundings
from raytrain.launch.machine_batches import MachineBatches
from raytrain.launch.placement import cores
from raytrain.runs.outcome import Outcome
from raytrain.training.assembly import load_initial_weights, make_run, train_run
from raytrain.training.machine_meter import keep_freed_memory
from raytrain.training.run_spec import RunSpec

_SHUTDOWN_S = 5
_POLL_S = 20.0
_FAILED = 1  # the code of a worker that has told the coordinator why


def main() -> None:
    """Start the workers of the run on standard input, and see them to their end."""
    gc.enable()
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is said once, in our words
    folder = pickle.load(sys.stdin.buffer)
    os.chdir(folder)
    spec, here = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    _Agent(spec, here).run()


def _end_with_starter() -> None:
    """End this process and all workers if the process that started them has ended, and its end of the pipe with it."""
    os.read(sys.stdin.fileno(), 1)  # a file's own lock would be held for ever in the forked processes
    os.killpg(0, signal.SIGKILL)


class _Agent(LocalElasticAgent):
    """Starts the workers of a run, and starts them again if one fails, up to ``--max-failures`` times."""

    def __init__(self, run: RunSpec, here: Surroundings) -> None:
        store = f"{here.folder}/agent"  # a file: a TCPStore would listen on all interfaces
        parameters = RendezvousParameters("c10d", store, "run", 1, 1, store_type="file", local_addr="localhost")
        spec = WorkerSpec(
            role="worker",
            local_world_size=here.num_workers,
            rdzv_handler=get_rendezvous_handler(parameters),
            entrypoint=work,
            args=(run, here),
            max_restarts=run.config.max_failures,
            local_addr="localhost",
        )
        logs = DefaultLogsSpecs(log_dir=here.folder, redirects=Std.ALL, tee=Std.ALL)
        known = inspect.signature(LocalElasticAgent).parameters  # torch 2.8 waits 30 s, and can't be told otherwise
        patience: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_S} if "shutdown_timeout" in known else {}
        super().__init__(spec=spec, logs_specs=logs, start_method="fork", **patience)
        self._call = Caller(here.calls)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        dead = _dead(worker_group.workers)  # before the agent takes note of them
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue] ; it is decorated
        if dead and not result.is_failed():  # a worker that has ended well is there until the agent knows of all
            result = RunResult(WorkerState.FAILED)
        if result.is_failed():
            self._call("workers_lost", dead)
            if any("SIGABRT" in how for how in dead.values()):  # gloo ends a process that gets a tensor of another size
                dist.set_debug_level(dist.DebugLevel.DETAIL)  # pyright: ignore ; the next workers say which one
        return result


def _dead(workers: list[Worker]) -> dict[int, str]:
    """Rank of each worker that a signal has killed, or that has exited in its loop, and which signal or code."""
    dead: dict[int, str] = {}
    for worker in workers if hasattr(os, "waitid") else []:  # macOS has it since Python 3.13
        try:
            state = os.waitid(os.P_PID, worker.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if state is not None and state.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            dead[worker.global_rank] = f"was killed by {signal.Signals(state.si_status).name}"
        elif state is not None and state.si_status != _FAILED:
            dead[worker.global_rank] = f"exited with code {state.si_status} before its loop had returned"
    return dead


def work(spec: RunSpec, here: Surroundings) -> None:
    """Train until the run ends or stops. An error of the user's ends the run, any other one is retried."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent ends workers whose neighbour has failed
    rank = int(os.environ["RANK"])
    call = Caller(here.calls)
    try:
        outcome = _train(spec, here, rank, SocketReporter(here.calls))
    except RaytrainError as error:
        if not call("give_up", error, trace_of(error)):
            os._exit(_FAILED)
        return
    except Exception as error:
        call("worker_failed", rank, describe(error), traceback.format_exc())
        os._exit(_FAILED)  # the agent starts all workers again
    if rank == 0:
        call("conclude", outcome)


def _train(spec: RunSpec, here: Surroundings, rank: int, reporter: Any) -> Outcome:
    """Train as one of the workers, or as the only one. Worker 0 knows the checkpoint of the outcome."""
    loads = spec.config.worker_load or (1.0,) * here.num_workers
    was_restarted = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    isolated = spec.config.resume or was_restarted  # an image may have ended the run, or its workers, before
    keep_freed_memory()  # in the processes that decode, too
    with MachineBatches(here.data, spec.plan, rank, loads, here.cache, reporter, isolated=isolated) as source:
        spec = spec.with_functions()  # not before: what a user's file starts when it is imported must not be forked
        device = _device(spec.config)
        if here.num_workers > 1:
            store = f"file://{here.folder}/workers-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
            backend = dist.Backend.NCCL if device.type == "cuda" else dist.Backend.GLOO
            dist.init_process_group(backend, store, rank=rank, world_size=here.num_workers)
        weights = load_initial_weights(spec, here.first_step)
        if rank == 0:
            reporter.watch()
            reporter.checked()
        return train_run(spec, make_run(spec, source, reporter, device, weights))


def _device(config: TrainConfig) -> torch.device:
    """This worker's device: a GPU of its own, or its share of the cores."""
    if config.device_type == "cpu" or not torch.cuda.is_available():
        num_workers = int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(config.threads_per_worker or max(1, cores() // num_workers))
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


class SocketReporter:
    """Calls the coordinator in the process that started the run."""

    def __init__(self, calls: CallAddress) -> None:
        self._calls = calls
        self._call = Caller(calls)
        self._call_slowly = Caller(calls)  # storage may hang, and a step must not wait for it
        self._stop_requested = threading.Event()

    def watch(self) -> None:
        """Wait for a stop request from now on, in a thread."""
        threading.Thread(target=self._watch, args=(Caller(self._calls),), daemon=True, name="stop-watch").start()

    def __getattr__(self, name: str) -> Any:
        """The coordinator's method of this name: what a worker reports itself, and what is told of its images."""
        return partial(self._call, name)

    def flush(self) -> None:
        self._call_slowly("flush")

    def stop_requested(self) -> bool:
        return self._stop_requested.is_set()

    def checkpoint_requested(self) -> bool:
        """Never: there are only the checkpoints that the options ask for."""
        return False

    def _watch(self, call: Caller) -> None:
        while not self._stop_requested.is_set():
            if call("wait_for_stop_request", _POLL_S) is not None:
                self._stop_requested.set()


if __name__ == "__main__":
    main()
