"""The process of torch's elastic agent: it forks the workers of one run, and again if one of them fails.

Run as a module by :mod:`raytrain.launch.local.agent_process`, which sends the run to standard input.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading

import torch._dynamo  # noqa: F401 ; every optimizer imports it in its first step, which takes seconds: once is enough
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from raytrain.launch.local.agent_process import WorkerTask
from raytrain.launch.local.calls import Caller
from raytrain.launch.local.worker import work

_SHUTDOWN_S = 5


def main() -> None:
    """Start the workers of the run on standard input, and see them to their end."""
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what goes wrong is said once, in our words
    folder = pickle.load(sys.stdin.buffer)
    os.chdir(folder)
    task: WorkerTask = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    _Agent(task).run()


def _end_with_starter() -> None:
    """End this process and all workers if the process that started them has ended, and its end of the pipe with it."""
    os.read(sys.stdin.fileno(), 1)  # a file's own lock would be held for ever in the forked processes
    os.killpg(0, signal.SIGKILL)


class _Agent(LocalElasticAgent):
    """Starts the workers of ``task``, and starts them again if one fails, up to ``--max-failures`` times."""

    def __init__(self, task: WorkerTask) -> None:
        store = f"{task.folder}/agent"  # a file: a TCPStore would listen on all interfaces
        parameters = RendezvousParameters("c10d", store, "run", 1, 1, store_type="file", local_addr="localhost")
        spec = WorkerSpec(
            role="worker",
            local_world_size=task.num_workers,
            rdzv_handler=get_rendezvous_handler(parameters),
            entrypoint=work,
            args=(task,),
            max_restarts=task.config.max_failures,
            local_addr="localhost",
        )
        logs = DefaultLogsSpecs(log_dir=task.folder, redirects=Std.ALL, tee=Std.ALL)
        super().__init__(spec=spec, logs_specs=logs, start_method="fork", shutdown_timeout=_SHUTDOWN_S)
        self._call = Caller(task.calls)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        killed = _killed(worker_group.workers)  # before the agent takes note of them
        result = super()._monitor_workers(worker_group)  # pyright: ignore[reportCallIssue] ; it is decorated
        if result.is_failed():
            self._call("workers_lost", killed)
        return result


def _killed(workers: list[Worker]) -> dict[int, str]:
    """Rank of each worker that a signal has killed, and the signal's name."""
    killed: dict[int, str] = {}
    for worker in workers:
        try:
            state = os.waitid(os.P_PID, worker.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            continue
        if state is not None and state.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
            killed[worker.global_rank] = signal.Signals(state.si_status).name
    return killed


if __name__ == "__main__":
    main()
