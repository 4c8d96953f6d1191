"""Watches the cluster of a run: waits for machines, finds what has no room, a full disk, and a lost head or raylet."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain.config import TrainConfig
from raytrain.errors import UsageError, format_count
from raytrain.launch.placement import Hardware, Placement, available_workers, device_kind, wanted_workers
from raytrain.launch.ray.head_queries import (
    autoscaler_problems,
    connect_to_raylet,
    head_answers,
    num_waiting_tasks,
    raylet_answers,
)
from raytrain.launch.ray.nodes import cluster_hardware, worker_resources
from raytrain.launch.ray.own_cluster import check_room_for_logs
from raytrain.monitor.events import Event, HeadBack, HeadSilent, ReadersWait
from raytrain.runs.background_and_throttle import Background, Throttle
from raytrain.runs.redact import one_line

_log = logging.getLogger("raytrain")
_ROOM_EVERY_S = 0.5
_REPORT_EVERY_S = 60.0
_ANSWER_WITHIN_S = 10.0


def wait_for_machines(config: TrainConfig, is_stopped: Callable[[], bool]) -> None:
    """Ask the cluster's autoscaler for machines for the fewest workers of the run, and wait until these have room.

    Returns at once without ``--wait-for-machines-s``, or if there is room already. Raises UsageError if that time has
    passed, and KeyboardInterrupt once ``is_stopped`` returns True.
    """
    if not config.wait_for_machines_s:
        return
    hardware = cluster_hardware()
    device, fewest, _ = wanted_workers(config, hardware)
    num_devices = available_workers(config, device, hardware)
    if fewest <= num_devices:
        return
    # The autoscaler takes a placement group that has no room as a request for machines.
    worker = worker_resources(device, 1.0, config.accelerator_type)
    group = ray.util.placement_group([worker] * fewest)
    problems: list[str] = []

    def ask_head(timeout_s: float) -> tuple[Hardware, list[str]] | None:
        """Return the hardware, and why the autoscaler cannot start more machines; None without an answer in time."""
        return (cluster_hardware(), autoscaler_problems()) if head_answers(timeout_s) else None

    ask = Background(ask_head)  # in a thread: a silent head delays neither a stop nor the time limit
    try:
        started_at = reported_at = time.monotonic()
        reported: tuple[int, list[str]] | None = None
        while not group.wait(_ROOM_EVERY_S):
            now = time.monotonic()
            if (answer := ask(_ANSWER_WITHIN_S)) is not None:  # otherwise the head has not answered yet
                hardware, problems = answer
                num_devices = available_workers(config, device, hardware)
            reasons = "; ".join(one_line(problem).rstrip(".") for problem in problems)
            explanation = f" The autoscaler cannot start machines ({reasons})." if problems else ""
            if is_stopped():
                raise KeyboardInterrupt
            if now - started_at > config.wait_for_machines_s:
                raise UsageError(
                    f"--workers is {config.workers}, and after {config.wait_for_machines_s:g} s the cluster has "
                    f"{format_count(num_devices, device_kind(config.accelerator_type, device))}."
                    f"{explanation or ' `ray status` says why no more machines came.'} Ask for fewer workers, or raise "
                    "--wait-for-machines-s."
                )
            # Print a line after each change, and once a minute, so that nobody thinks that the run hangs.
            if (num_devices, problems) != reported or now - reported_at > _REPORT_EVERY_S:
                reported, reported_at = (num_devices, problems), now
                _log.warning(
                    "Waiting for machines: there is room for %d of %d workers after %.0f of %.0f s.%s",
                    min(num_devices, fewest),
                    fewest,
                    now - started_at,
                    config.wait_for_machines_s,
                    explanation,
                )
    finally:
        ask.close(_ANSWER_WITHIN_S)
        # If the head does not answer, the group is removed when this process ends.
        if head_answers(_ANSWER_WITHIN_S):
            ray.util.remove_placement_group(group)


PLACED_WITHIN_S = 40.0
_WAIT_REPORTED_AFTER_S = 10.0
POLL_EVERY_S = 5.0
_SILENT_S = 30.0  # longer than a question and its answer take


class CapacityCheck:
    """Checks every few seconds whether workers of ``placement`` have waited for room for 40 s."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._ask = Background(_waiting_groups)  # in a thread: a silent head delays nothing else
        self._throttle = Throttle()
        self._answered_at = 0.0
        self._waiting_since: dict[str, float] = {}  # when each placement group that waits was first seen
        self._is_reported = False

    def check(self, *, is_starting: bool = True, is_stopping: bool = False) -> None:
        """Raise UsageError if the same workers have waited too long at the start of a run; before, a warning says so.

        A run that has trained before (``is_starting`` is False) goes on waiting, because other jobs may end: then a
        warning says so. If such a run has been asked to stop (``is_stopping``), KeyboardInterrupt is raised instead,
        because workers without room cannot hear of the request. Call this often: it asks the head every five seconds
        without waiting, and uses the answer that has come.
        """
        if not self._throttle.due("placement groups", POLL_EVERY_S):
            return
        answer = self._ask(_ANSWER_WITHIN_S)
        if answer is None:  # the head has not answered yet, or does not answer at all
            return
        waiting, free_resources = answer
        # A silent head has placed no workers meanwhile, so after it the waiting times begin anew.
        now = time.monotonic()
        if now - self._answered_at > _SILENT_S:
            self._waiting_since = {}
        self._answered_at = now

        # A placement group that has been placed is forgotten: if it waits again, its time begins anew.
        since = self._waiting_since
        waited_s = max((now - since[group_id] for group_id in waiting & since.keys()), default=-1.0)
        self._waiting_since = {group_id: since.get(group_id, now) for group_id in waiting}
        # Once nothing waits any more, the next wait gets a warning of its own.
        self._is_reported = self._is_reported and bool(waiting)
        waited_too_long = waited_s >= PLACED_WITHIN_S
        if waited_too_long and not is_starting and is_stopping:
            raise KeyboardInterrupt
        if waited_too_long and is_starting:
            raise UsageError(f"{self._no_room(free_resources)}wait for them, or ask for fewer --workers.")
        if self._is_reported or waited_s < (_WAIT_REPORTED_AFTER_S if is_starting else PLACED_WITHIN_S):
            return
        then = "the run goes on when there is room"
        if is_starting:
            then = f"the run begins if there is room within {PLACED_WITHIN_S - waited_s:.0f} s, and ends otherwise"
        _log.warning("%s%s.", self._no_room(free_resources), then)
        self._is_reported = True

    def _no_room(self, free_resources: Mapping[str, float]) -> str:
        """Return the beginning of a sentence: what a worker wants, and what the cluster has free."""
        placement = self._placement
        wanted_by_worker = format_count(placement.cpus, "CPU")
        unused = format_count(free_resources.get("CPU", 0.0), "CPU")
        if placement.device == "cuda":
            wanted_by_worker += f" and 1 {device_kind(placement.accelerator_type, placement.device)}"
            unused += f" and {format_count(free_resources.get('GPU', 0.0), 'GPU')}"
        return (
            f"There is no room for {format_count(placement.min_workers, 'worker')} of {wanted_by_worker} each: the "
            f"cluster has {unused} free, and other jobs use the rest; "
        )

    def close(self) -> None:
        """End the thread that asks."""
        self._ask.close(_ANSWER_WITHIN_S)


def _waiting_groups(timeout_s: float) -> tuple[set[str], Mapping[str, float]] | None:
    """Return the IDs of this driver's placement groups that are not placed yet, and the cluster's free resources.

    None if the head does not answer within ``timeout_s``; Ray's own calls would wait for it without limit.
    """
    if not head_answers(timeout_s):
        return None
    job_id: str = ray.get_runtime_context().get_job_id()  # the IDs of a driver's groups end with it
    groups: dict[str, Any] = ray.util.placement_group_table()  # pyright: ignore
    waiting = {
        group_id for group_id, group in groups.items() if group["state"] == "PENDING" and group_id.endswith(job_id)
    }
    return waiting, ray.available_resources()


class ReadersCheck:
    """Reports data tasks that find no room, because other jobs use the CPUs that were left for them.

    Without this, the workers would wait silently: Ray Train does not know of such tasks, and Ray reports them only
    after half an hour. ``task_cpus`` are the CPUs that the run's data tasks take, one number for each kind of task;
    ``event`` gets the report.
    """

    def __init__(self, task_cpus: Collection[float], event: Callable[[Event], None]) -> None:
        self._task_cpus = task_cpus
        self._event = event
        self._ask = Background(_waiting_task)
        self._throttle = Throttle()
        self._step = -1  # that of the run at the last answer
        self._waiting_since = 0.0  # when tasks were first seen to wait at this step
        self._is_reported = False

    def check(self, step: int) -> None:
        """Ask every 5 s; if tasks have waited while the run stayed at ``step`` for 40 s, report it once."""
        if not self._throttle.due("tasks", POLL_EVERY_S):
            return
        answer, now = self._ask(self._task_cpus), time.monotonic()
        if answer is None:  # not answered yet
            return
        wanted_cpus, free_cpus, all_cpus = answer
        if step != self._step or not wanted_cpus:
            self._step, self._waiting_since, self._is_reported = step, now, False
            return
        # If enough CPUs are free, tasks wait for something else, and other jobs are not the reason.
        is_too_long = now - self._waiting_since >= PLACED_WITHIN_S
        if is_too_long and free_cpus < wanted_cpus and not self._is_reported:
            self._event(ReadersWait(wanted_cpus, free_cpus, all_cpus))
            self._is_reported = True

    def close(self) -> None:
        """End the thread that asks."""
        self._ask.close(_ANSWER_WITHIN_S)


def _waiting_task(task_cpus: Collection[float]) -> tuple[float, float, float]:
    """Return the CPUs that a waiting data task needs, the cluster's free CPUs, and all of its CPUs.

    If tasks of several kinds wait, it is the kind that needs the fewest CPUs. Three zeros if no task waits, or if the
    head does not answer.
    """
    with suppress(RayError):
        for cpus in sorted(set(task_cpus)):
            if num_waiting_tasks(cpus, _ANSWER_WITHIN_S):
                return cpus, ray.available_resources().get("CPU", 0.0), ray.cluster_resources().get("CPU", 0.0)
    return 0.0, 0.0, 0.0


STANDS_STILL_S = 120.0
_FULL_BYTES = 1_000_000  # with less room for logs, no process of Ray starts


class LogRoomCheck:
    """Ends a run that stands still because the disk with Ray's temporary ``folder`` has filled up since its start.

    No worker and no data task starts then, and Ray would try it for ever. Processes that run already go on.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._step, self._since = -1, time.monotonic()  # when the run was first seen at this step

    def check(self, step: int) -> None:
        """Raise UsageError if the run has stayed at ``step`` for two minutes, and the disk is full."""
        now = time.monotonic()
        if step != self._step:
            self._step, self._since = step, now
        elif now - self._since >= STANDS_STILL_S:
            check_room_for_logs(self._folder, _FULL_BYTES)


ASK_HEAD_EVERY_S = 5.0
_LOOK_EVERY_S = 0.5


class RayletWatch:
    """Warns if this machine's raylet has died, or if the cluster's head does not answer while a run starts.

    Many calls of Ray end this process without a word if the raylet has died, and wait without one for a lost head. So
    a thread keeps a connection to the raylet until :meth:`close`, and asks the head until :meth:`note_started`: from
    then on, :class:`HeadWatch` does. With ``is_own``, none is watched: the process that has started this Ray does that.
    """

    def __init__(self, *, is_own: bool) -> None:
        self._started, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="raylet-watch")
        if is_own:
            self._closed.set()
        self._thread.start()

    def note_started(self) -> None:
        """Ask the head no more."""
        self._started.set()

    def _watch(self) -> None:
        if self._closed.is_set():
            return
        raylet, throttle, has_head = None, Throttle(), True
        with suppress(OSError):
            raylet = connect_to_raylet()
        if raylet is not None:
            raylet.setblocking(False)
        while not self._closed.wait(_LOOK_EVERY_S):
            if raylet is not None and _has_ended(raylet):
                raylet.close()
                raylet = None
                if not raylet_answers():
                    _log.warning(
                        "Ray's process on this machine, the raylet, has died, as if for lack of memory, and the run "
                        "cannot go on: end this command (kill %s) if it does not end by itself, start Ray again with "
                        "`ray start`, and run the command again, with --resume if a run had begun to train.",
                        os.getpid(),
                    )
                    return
            if has_head and not self._started.is_set() and throttle.due("ask", ASK_HEAD_EVERY_S):
                has_head = head_answers(_ANSWER_WITHIN_S)
                if not has_head:
                    _log.warning("The head of the cluster does not answer: the run starts when it does.")
        if raylet is not None:
            raylet.close()

    def close(self) -> None:
        """End the thread, once the head has answered, or has had ten seconds to do so."""
        self._closed.set()
        self._thread.join(_ANSWER_WITHIN_S)


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other side has ended a ``connection`` that does not block, and on which it sends nothing."""
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


class HeadWatch:
    """Asks the head every few seconds whether it answers, and calls ``event`` when that changes."""

    def __init__(self, event: Callable[[Event], None]) -> None:
        self._event = event
        self._ask = Background(head_answers)  # in a thread, since it waits for the answer
        self._throttle = Throttle()
        self.answers = True
        """Whether the head has answered when it was asked last."""

    def poll(self) -> None:
        """Report whether the head answers, if that has changed since the last report, and ask again."""
        if not self._throttle.due("ask", ASK_HEAD_EVERY_S):
            return
        answered = self._ask(_ANSWER_WITHIN_S)
        if answered is None or answered == self.answers:
            return
        self.answers = answered
        self._event(HeadBack() if answered else HeadSilent())

    def close(self) -> None:
        """End the thread that asks, once the head has answered, or has had ten seconds to do so."""
        self._ask.close()
