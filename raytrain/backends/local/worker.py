"""One worker of the local backend: what it is forked for, and what it tells the process that started the run."""

from __future__ import annotations

import os
import signal
import threading
import traceback

import torch.distributed as dist

from raytrain.backends.local.calls import CallAddress, Caller
from raytrain.backends.local.job import Job
from raytrain.backends.prepare import load_loop
from raytrain.backends.worker_process import collective_backend, train_worker, worker_device
from raytrain.errors import RaytrainError
from raytrain.monitor.events import Event
from raytrain.runs.machine_use import MachineUse
from raytrain.runs.metric_row import MetricRow
from raytrain.runs.outcome import Outcome
from raytrain.runs.skipped_images import SkippedImage

_POLL_S = 20.0


def work(job: Job) -> None:
    """Train on this worker until the run ends or stops. An error of the user's ends the run, any other one is retried.

    Called in a process that the agent has forked.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent ends workers whose neighbour has failed
    rank = int(os.environ["RANK"])
    reporter = CallingReporter(job.calls, watch=rank == 0)
    try:
        outcome = _train(job, reporter)
    except RaytrainError as error:
        reporter.give_up(error)
        return
    except Exception as error:
        last_line = (str(error).strip().splitlines() or ["no message"])[-1]
        reporter.failed(rank, f"{type(error).__name__}: {last_line}", traceback.format_exc())
        os._exit(1)  # the agent starts all workers again
    if rank == 0:
        reporter.conclude(outcome)


def _train(job: Job, reporter: CallingReporter) -> Outcome:
    config = job.task.config
    device = worker_device(config)
    if job.num_workers > 1:
        store = f"file://{job.folder}/workers-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        rank = int(os.environ["RANK"])
        dist.init_process_group(collective_backend(device), store, rank=rank, world_size=job.num_workers)
    return train_worker(job.task, load_loop(config, job.loop), device, reporter)


class CallingReporter:
    """A :class:`raytrain.backends.worker_process.WorkerReporter` that calls the process that started the run.

    With ``watch``, it waits there for a stop request.
    """

    def __init__(self, calls: CallAddress, *, watch: bool) -> None:
        self._call = Caller(calls)
        self._stop_requested = threading.Event()
        if watch:
            threading.Thread(target=self._watch, args=(Caller(calls),), daemon=True, name="stop-watch").start()

    def begin(self) -> None:
        """The run may be written down."""
        self._call("begin")

    def started(self, num_workers: int, step: int) -> None:
        """The workers start, or resume, after ``step`` steps."""
        self._call("started", num_workers, step)

    def record(self, row: MetricRow) -> None:
        """Add a row of metrics."""
        self._call("record", row)

    def measured(self, use: MachineUse) -> None:
        """Note how this worker's machine is used."""
        self._call("measured", use)

    def event(self, event: Event) -> None:
        """Note something worth a line."""
        self._call("event", event)

    def skip(self, images: list[SkippedImage]) -> None:
        """Note images that cannot be used."""
        self._call("skip", images)

    def flush(self) -> None:
        """Wait until all rows so far are in storage."""
        self._call("flush")

    def stop_requested(self) -> bool:
        """Whether the run should stop."""
        return self._stop_requested.is_set()

    def checkpoint_requested(self) -> bool:
        """Never: there are only the checkpoints that the options ask for."""
        return False

    def conclude(self, outcome: Outcome) -> None:
        """The run is over."""
        self._call("conclude", outcome)

    def give_up(self, error: RaytrainError) -> None:
        """The run cannot continue, on whichever workers."""
        self._call("give_up", error)

    def failed(self, rank: int, reason: str, trace: str) -> None:
        """This worker cannot continue."""
        self._call("failed", rank, reason, trace)

    def _watch(self, call: Caller) -> None:
        while not self._stop_requested.is_set():
            if call("wait_for_stop_request", _POLL_S) is not None:
                self._stop_requested.set()
