"""The workers of a run on this machine without Ray: torch's elastic agent, in a process of its own, starts them."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import psutil

from raytrain.config import ResolvedConfig
from raytrain.config.pickled_code import pickle_own_code
from raytrain.data.dataset import Dataset
from raytrain.errors import CoordinatorLost, RaytrainError, current_folder, some_of
from raytrain.launch.coordinator import Coordinator
from raytrain.launch.debugger import terminal_of_command
from raytrain.launch.local.coordinator_socket import CallAddress, CallServer
from raytrain.launch.placement import machine_hardware, place
from raytrain.launch.prepare import PreparedRun
from raytrain.loader.choose_cache import ImageCache, image_cache, keeps_shared
from raytrain.loader.machine import image_memory
from raytrain.monitor.events import Note, WorkerFailed
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.logs import WorkerLogs
from raytrain.runs.metrics_history import History
from raytrain.runs.outcome import failure_sentence
from raytrain.storage.temporary_files import TemporaryFolder
from raytrain.training.run_spec import RunSpec

_AGENT = "raytrain.launch.local.agent"
_MAX_SOCKET_FOLDER = 90  # bytes; the path of a socket may have 104, on Linux 108


class LocalLaunch:
    """A :class:`~raytrain.launch.session.Launch` on this machine, whose workers ``agent`` starts.

    Raises UsageError if the machine has too few cores, GPUs or too little memory for the run.
    """

    ends_workers = True

    def __init__(self, prepared: PreparedRun, agent: AgentProcess) -> None:
        placement = place(prepared.config, machine_hardware(prepared.config.gpus))
        self.num_workers = placement.num_workers
        self.config = prepared.resolve(placement.num_workers, placement.device)
        self._prepared = prepared
        self._shared: SharedImages | None = prepared.group and prepared.group.images
        self._agent = agent

    def start(self) -> Coordinator:
        """Start the coordinator, in this process, and the workers; :meth:`close` ends all that this has opened."""
        prepared = self._prepared
        arguments = prepared.monitor_arguments(prepared.data.plan(self.config))
        self._coordinator = Coordinator(prepared.name, prepared.store, **arguments)
        with ExitStack() as opened:
            # The socket to which workers report. Its path has a limit that a long TMPDIR may exceed.
            folder = opened.enter_context(TemporaryFolder())
            is_long = len(os.fsencode(folder)) > _MAX_SOCKET_FOLDER
            socket_folder = opened.enter_context(TemporaryFolder("/tmp")) if is_long else folder
            calls = CallServer(socket_folder, self._coordinator)
            opened.callback(calls.close)

            # The workers' images. Runs that train on the same images at the same time share a cache, if it fits.
            cache = (self._shared and self._shared.cache) or image_cache(
                self.config, prepared.data.decoded_as(self.config), prepared.first_step, opened
            )

            # The logs are closed after the agent, so that they have the workers' last lines.
            self._logs = opened.enter_context(WorkerLogs(prepared.store, folder, self._coordinator.add_printed))
            opened.callback(self._agent.close)
            self._agent.start_workers(
                RunSpec.of(self.config, prepared.data, prepared.store, prepared.loop, self.num_workers),
                WorkerInputs(
                    data=prepared.data.decoded_as(self.config),
                    first_step=prepared.first_step,
                    num_workers=self.num_workers,
                    cache=cache,
                    calls=calls.address,
                    folder=str(folder),
                    arguments=prepared.arguments,
                    terminal=terminal_of_command() if self.num_workers == 1 and prepared.group is None else None,
                ),
            )
            self._opened = opened.pop_all()
        return self._coordinator

    def poll(self, snapshot: Snapshot) -> None:
        """Pass on which shared images this run could not use: each run that shares them lists all at its end."""
        if self._shared is not None:
            self._shared.note_skipped(self._coordinator.skipped_images())

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the workers to report the end; return whether the agent has ended.

        Raises :class:`CoordinatorLost` if the agent was killed before that: then the driver starts a new agent, and
        with it the next attempt. All that is left of the workers is ended first, and the history is written.
        """
        self._coordinator.wait_for_end(timeout_s)
        if (killed_by := self._agent.killed_by) is not None and not self._coordinator.ending().has_come:
            # The workers may still train: they must end before the next attempt begins. Their reports so far are kept.
            self._agent.close()
            self._logs.show_rest()
            reason = f"the process that starts the workers was killed by {killed_by}"
            self._coordinator.note_event(WorkerFailed(reason))
            with suppress(RaytrainError):
                self._coordinator.finish("failed")
            prepared = self._prepared
            sentence = failure_sentence(prepared.config, reason, prepared.loop)
            raise CoordinatorLost(sentence, prepared.name, prepared.store.url)
        return self._agent.has_ended

    def failure(self) -> str | None:
        """Return None: the agent reports every failure to the coordinator."""
        return None

    def end_workers(self) -> None:
        """End all processes of the run, and show the rest of what they have printed.

        Report processes that a loop has started in sessions of their own, which still run. :meth:`close` copies the
        logs later, once the result of the run is written.
        """
        detached = detached_processes(self._agent.process.pid)
        self._agent.close()
        self._logs.show_rest()
        if left := [process for process in detached if process.is_running()]:
            self._coordinator.note_event(note_on_detached(left))
        if self._shared is not None:
            self._coordinator.note_skipped(self._shared.skipped_images())

    def close(self, *, finished: bool) -> None:
        """Leave no process and no file of the workers behind."""
        self._opened.close()


@dataclass(frozen=True, kw_only=True)
class WorkerInputs:
    """The inputs of a run's workers that are not in the :class:`RunSpec`: images, and the address of the coordinator.

    ``first_step`` counts the completed steps of the checkpoint from which the run resumes. ``calls`` is where the
    coordinator answers. ``folder`` is a temporary one, for files of the agent and the workers. ``arguments`` are
    ``sys.argv``, for a loop that parses it. ``terminal`` is the command's, where a single worker may open a debugger;
    None if it may not.
    """

    data: Dataset
    first_step: int
    num_workers: int
    cache: ImageCache
    calls: CallAddress
    folder: str
    arguments: tuple[str, ...]
    terminal: str | None


class AgentProcess:
    """The process of the agent. It ends with this process at the latest, and the workers end with it.

    As soon as it is created, it imports torch, which takes seconds, and waits for a run. ``environment`` has variables
    that it gets besides those of this process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        # The agent finds the modules that this process finds. An empty entry of sys.path is the current folder.
        path = os.pathsep.join(folder or current_folder() for folder in sys.path)
        # Not in the current folder, where Python would look for modules first: it may contain a torch.py of a stranger.
        self.process = subprocess.Popen(
            [sys.executable, "-m", _AGENT],
            stdin=subprocess.PIPE,
            cwd="/",
            env={**os.environ, **environment, "PYTHONPATH": path},
            start_new_session=True,  # a Ctrl-C is for this process, which asks the workers to stop
        )

    def start_workers(self, spec: RunSpec, inputs: WorkerInputs) -> None:
        """Have the agent start the workers of the run; return at once."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the agent has ended already, as LocalLaunch.wait will notice
            pickle.dump(current_folder(), self.process.stdin)
            self.process.stdin.write(pickle_own_code((spec, inputs)))
            self.process.stdin.flush()

    @property
    def has_ended(self) -> bool:
        """True if the agent has ended, and the workers with it."""
        return self.process.poll() is not None

    @property
    def killed_by(self) -> str | None:
        """The name of the signal that has killed the agent; None if it runs, or has ended by itself."""
        code = self.process.poll()
        return signal.Signals(-code).name if code is not None and code < 0 else None

    def close(self) -> None:
        """End the agent and all workers, busy or not. May be called twice."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def detached_processes(agent: int) -> list[psutil.Process]:
    """Return the processes below process ``agent`` that a loop has started in sessions of their own.

    Processes that have ended are left out, and those of raytrain that decode images.
    """
    detached: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(agent).children(recursive=True):
            with suppress(psutil.Error, ProcessLookupError):
                is_in_session = os.getsid(process.pid) == agent  # the agent's, whose processes end with the run
                is_decoder = any(word.startswith("raytrain.") for word in process.cmdline())  # it ends by itself
                if not (is_in_session or is_decoder or process.status() == psutil.STATUS_ZOMBIE):
                    detached.append(process)
    return detached


def note_on_detached(processes: Sequence[psutil.Process]) -> Note:
    """Return a note that these processes outlive the run, with how to end them: that may be wanted, or not."""
    names: list[str] = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            names.append(f"{process.name()} (process {process.pid})")
    return Note(
        f"the loop has started {some_of(names)} in a session of its own, which runs on; `kill PROCESS` ends it, and "
        "without start_new_session=True a process ends with the run"
    )


class SharedImages(RunMonitor):
    """Images that runs on this machine share while this is open, decoded once.

    ``cache`` is None if they do not fit into memory; then each run decodes them for itself. As a monitor, this collects
    the images that cannot be used, which each run reports. ``num_steps`` counts the steps of all runs together.
    """

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, num_steps: int) -> None:
        history, skip_limit = History(prepared.store), prepared.skip_limit()
        super().__init__(prepared.name, num_steps, num_steps, history, skip_limit=skip_limit)
        self._opened = ExitStack()
        self.cache: ImageCache | None = None
        if keeps_shared(config, prepared.data, image_memory()[1]):
            config_in_memory = dataclasses.replace(config, cache="memory")
            self.cache = image_cache(config_in_memory, prepared.data, 0, self._opened)

    def __enter__(self) -> SharedImages:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def poll(self) -> tuple[Snapshot, str | None]:
        """Return a snapshot, and why the runs must end, or None if they may continue.

        The snapshot has the number of images that cannot be used, and a request to stop all runs.
        """
        return self.snapshot(), self.failure
