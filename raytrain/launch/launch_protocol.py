"""The interface (Protocol) of a launch, which starts and ends the workers of a run.

There are three: on a Ray cluster (:class:`~raytrain.launch.ray.ray_launch.RayLaunch`), on this machine without Ray
(:class:`~raytrain.launch.local.local_launch.LocalLaunch`), and of workers that something else has started
(:class:`~raytrain.launch.attach.AttachedLaunch`). :class:`~raytrain.launch.session.RunSession` does the rest.
"""

from __future__ import annotations

from typing import Protocol

from raytrain.config import ResolvedConfig
from raytrain.launch.coordinator import Coordinator
from raytrain.monitor.snapshot import Snapshot


class Launch(Protocol):
    """The workers of a run and what they need."""

    config: ResolvedConfig
    num_workers: int
    ends_workers: bool
    """True if a stop that comes before the workers train may end them at once."""

    def start(self) -> Coordinator:
        """Start the workers, their feed of images and their coordinator; return the coordinator.

        If the coordinator is in another process, the returned object passes on each call, and raises
        :class:`CoordinatorLost` if that process has died.
        """
        ...

    def poll(self, snapshot: Snapshot) -> None:
        """Handle messages and check the workers; called about twice a second while they train."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the workers to report the end; return whether their processes have ended."""
        ...

    def failure(self) -> str | None:
        """Return why the workers ended, if they could not report it themselves."""

    def end_workers(self) -> None:
        """See the workers to their end: nothing more of them may reach the run's documents."""

    def close(self, *, finished: bool) -> None:
        """Release everything that belongs to the run; unless it is ``finished``, its workers may still train."""
