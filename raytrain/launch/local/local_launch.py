"""The workers of a run on this machine without Ray: torch's elastic agent starts them, and they report over a socket.

Imports no torch: the agent does, in the meantime.
"""

from __future__ import annotations

from contextlib import ExitStack

from raytrain.launch.cache_choice import ImageCache, SharedImages, image_cache
from raytrain.launch.coordinator import Coordinator
from raytrain.launch.local.agent_process import AgentProcess, WorkerTask
from raytrain.launch.local.calls import CallServer
from raytrain.launch.placement import machine_hardware, place
from raytrain.launch.prepare import PreparedRun
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.logs import WorkerLogs
from raytrain.storage.temporary_files import TemporaryFolder


class LocalLaunch:
    """A :class:`raytrain.launch.session.Launch` on this machine, with the workers of ``agent``.

    Raises UsageError if the machine has too little for the run.
    """

    def __init__(self, prepared: PreparedRun, agent: AgentProcess) -> None:
        placement = place(prepared.config, machine_hardware(prepared.config.gpus))
        self.num_workers = placement.num_workers
        self.config = prepared.resolve(placement.num_workers, placement.device)
        self._prepared = prepared
        self._shared: SharedImages | None = prepared.group and prepared.group.images
        self._agent = agent

    def start(self) -> Coordinator:
        """Start the workers."""
        prepared = self._prepared
        plan = prepared.data.plan(self.config)
        self._coordinator = Coordinator(
            prepared.name,
            prepared.store,
            plan.num_steps,
            plan.steps_per_epoch,
            prepared.skip_limit(),
            prepared.started_at,
        )
        with ExitStack() as opened:
            folder = opened.enter_context(TemporaryFolder())
            calls = CallServer(folder, self._coordinator)
            opened.callback(calls.close)
            cache = (self._shared and self._shared.cache) or self._new_cache(opened)
            self._logs = WorkerLogs(prepared.store, folder)
            self._logs.start()
            opened.callback(self._logs.close)
            opened.callback(self._agent.close)
            self._agent.start_workers(
                WorkerTask(
                    config=self.config,
                    loop=prepared.loop,
                    data=prepared.data,
                    store=prepared.store,
                    first_step=prepared.first_step,
                    num_workers=self.num_workers,
                    cache=cache,
                    calls=calls.address,
                    folder=str(folder),
                )
            )
            self._opened = opened.pop_all()
        return self._coordinator

    def look(self, snapshot: Snapshot) -> None:
        """Tell runs that share the images which of them cannot be used."""
        if self._shared is not None:
            self._shared.skip(self._coordinator.skipped_images)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the agent has ended, or a worker has said how the run ends; returns whether the agent has."""
        self._coordinator.wait_for_end(timeout_s)
        return self._agent.has_ended

    def failure(self) -> str | None:
        """Nothing: the agent tells the coordinator whatever it knows."""
        return None

    def end_workers(self) -> None:
        """End all processes, and copy the rest of what they have printed."""
        self._agent.close()
        self._logs.close()
        if self._shared is not None:
            self._coordinator.skip(self._shared.skipped_images())

    def close(self, *, finished: bool) -> None:
        """Leave no process and no file of the workers behind."""
        self._opened.close()

    def _new_cache(self, opened: ExitStack) -> ImageCache:
        return image_cache(self.config, self._prepared.data, self._prepared.first_step, opened)
