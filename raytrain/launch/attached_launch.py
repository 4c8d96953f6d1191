"""The session of an attached run, in a thread of process 0, and the reports of all of its workers to it.

Worker 0 is a thread of the same process, and its reporter is the coordinator itself. Each other worker has a
:class:`MessageReporter`, which leaves messages in the store at which the group of ``torch.distributed`` has met. So no
port is opened, and no process waits for another. The session takes the messages twice a second.

Anyone who reaches the store can write there, so messages are JSON, from which no code can run.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from raytrain.config import ResolvedConfig
from raytrain.config.user_code import describe, trace_of
from raytrain.errors import LoopFailed, RaytrainError
from raytrain.launch.coordinator import SENT_WITHIN_S, Coordinator
from raytrain.launch.prepare import PreparedRun
from raytrain.launch.session import RunSession
from raytrain.monitor.events import Event, TimedEvent, parse_event
from raytrain.monitor.snapshot import Snapshot
from raytrain.monitor.stop_request import StopSignals
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.metric_row import MetricRow, SkippedImage, SuspiciousLabel
from raytrain.runs.outcome import Outcome, StopReason, TrainResult
from raytrain.storage.store import Store

_MAY_END_TOPIC = "{} may end"
"""Topic of the message to a worker that process 0 has written how the run ended, and sent the files of its loop."""


class GroupMessages:
    """Messages of a run between the processes of the default group.

    ``key`` identifies the run: it is the same on all of its processes. A message is a value of JSON. It is sent to a
    ``topic``: one process sends messages to it, and one takes them, in the order in which they were sent. All threads
    of the process may send.

    Example:
        >>> GroupMessages(key).send("worker 1", ["note_retries", 3])
    """

    def __init__(self, key: str) -> None:
        store: dist.Store = dist.distributed_c10d._get_default_store()  # pyright: ignore ; torch has no public one
        self._store = dist.PrefixStore(f"raytrain/{key}", store)  # pyright: ignore[reportPrivateImportUsage]
        self._num_sent: Counter[str] = Counter()
        self._num_taken: Counter[str] = Counter()
        self._sending = threading.Lock()

    def send(self, topic: str, message: Any) -> None:
        """Send a message to ``topic``. If the store is gone, the run is over, and the message is dropped."""
        with self._sending, suppress(RuntimeError):
            self._store.set(f"{topic}/{self._num_sent[topic]}", json.dumps(message))
            self._num_sent[topic] += 1

    def take(self, topic: str) -> Any:
        """Return the next message of ``topic``, without waiting; None if there is none yet, or the store is gone."""
        key = f"{topic}/{self._num_taken[topic]}"
        with suppress(RuntimeError):
            if self._store.check([key]):
                message = json.loads(self._store.get(key))
                self._store.delete_key(key)
                self._num_taken[topic] += 1
                return message
        return None

    def wait(self, topic: str, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` seconds for the next message of ``topic``, without taking it."""
        with suppress(RuntimeError):  # the time is over; or the store is gone, so that nobody is left to send a message
            self._store.wait([f"{topic}/{self._num_taken[topic]}"], timedelta(seconds=timeout_s))


class MessageReporter:
    """The reporter of a worker other than worker 0. It sends messages to process 0, which has the coordinator.

    A message is a list with the kind of the report and its values; :meth:`AttachedLaunch._deliver` takes it.
    """

    def __init__(self, messages: GroupMessages | None, rank: int, signals: StopSignals) -> None:
        assert messages is not None  # there are several workers
        self._messages, self._topic, self._signals = messages, f"worker {rank}", signals
        self._stop_is_sent = False

    # Reports that each worker makes.

    def note_machine_use(self, use: MachineUse) -> None:
        self._messages.send(self._topic, ["note_machine_use", asdict(use)])

    def note_event(self, event: Event) -> None:
        self._messages.send(self._topic, ["note_event", TimedEvent(0, 0.0, event.redacted()).to_json()])

    def note_wait(self, rank: int, num_workers: int, place: str | None) -> None:
        self._messages.send(self._topic, ["note_wait", rank, num_workers, place])

    def note_skipped(self, images: Sequence[SkippedImage]) -> None:
        self._messages.send(self._topic, ["note_skipped", [asdict(image) for image in images]])

    def note_retries(self, num_requests: int) -> None:
        self._messages.send(self._topic, ["note_retries", num_requests])

    def note_decoded_on_cpu(self, num_images: int, reason: str) -> None:
        self._messages.send(self._topic, ["note_decoded_on_cpu", num_images, reason])

    def stop_requested(self) -> bool:
        """Return whether a signal has asked this process to stop, and pass the request on to process 0 once.

        Only worker 0 knows of other requests. The all-reduce of each step tells all workers of all requests.
        """
        request = self._signals.stop_request
        if request is not None and not self._stop_is_sent:
            self._messages.send(self._topic, ["stop", request.to_json()])
            self._stop_is_sent = True
        return request is not None

    def fail(self, error: BaseException) -> None:
        """Report the error by which this worker leaves its loop, and wait until process 0 has written how the run ends.

        Wait for some seconds at most, and after a second Ctrl-C not at all.
        """
        is_sentence = isinstance(error, RaytrainError)
        self._messages.send(self._topic, ["fail", str(error) if is_sentence else describe(error), is_sentence])
        if isinstance(error, Exception):  # a second Ctrl-C, which ends the process at once, is none
            self._messages.wait(_MAY_END_TOPIC.format(self._topic), SENT_WITHIN_S)

    # Reports that worker 0 makes for all workers. They are never called here, but belong to the protocol of reporters.

    def note_start(self, num_workers: int, step: int, measures_again: bool = False) -> None: ...

    def record(self, row: MetricRow) -> None: ...

    def replace_suspicious_labels(self, labels: Sequence[SuspiciousLabel]) -> None: ...

    def flush(self) -> None: ...

    def checkpoint_requested(self) -> bool:
        return False


class AttachedCoordinator(Coordinator):
    """The coordinator of a run whose worker 0 is a thread of the same process, and that worker's reporter.

    ``monitor_arguments`` are those of :class:`raytrain.monitor.monitor.RunMonitor`, as for any coordinator.
    """

    def __init__(self, name: str, store: Store, signals: StopSignals, **monitor_arguments: Any) -> None:
        super().__init__(name, store, **monitor_arguments)
        self._signals = signals
        self.on_row: Callable[[MetricRow], None] | None = None
        """Called with each row of the history."""
        self.left_by: BaseException | None = None
        """The exception by which the loop of this process was left: an error of the loop, or, say, a second Ctrl-C."""

    def record(self, row: MetricRow) -> None:
        super().record(row)
        if self.on_row is not None:
            self.on_row(row)

    def stop_requested(self) -> bool:
        """Return whether somebody asked the run to stop: in storage, on its page, or this process by a signal."""
        return self.stop_request is not None or self._signals.stop_request is not None

    def checkpoint_requested(self) -> bool:
        """Return False: there are only the checkpoints that the options ask for."""
        return False

    def fail(self, error: BaseException) -> None:
        """Note the error by which worker 0 leaves its loop. It ends the run, because workers are not restarted.

        A second Ctrl-C, and whatever else is no Exception, interrupts the session; see :meth:`AttachedLaunch.wait`.
        """
        if isinstance(error, RaytrainError):
            # A coordinator gives a loop that failed another attempt if a restart may help. Here, nobody restarts.
            final = LoopFailed(str(error), False) if isinstance(error, LoopFailed) else error
            self.give_up(final, trace_of(error))
        elif isinstance(error, Exception):
            self.note_worker_failure(0, describe(error), trace_of(error))
            self.note_lost_workers({})
        self.left_by = error
        self._end_has_come.set()


class AttachedLaunch:
    """A :class:`~raytrain.launch.session.Launch` of workers that run already. It lives in process 0."""

    ends_workers = False

    def __init__(self, prepared: PreparedRun, config: ResolvedConfig, num_workers: int) -> None:
        self.config, self.num_workers = config, num_workers
        self._prepared = prepared
        self._messages: GroupMessages | None = None
        self.send_files: Callable[[float], None] = lambda within_s: None
        """Sends what worker 0 has written into ``run.folder``, if that is kept in a bucket."""
        self._result: Future[TrainResult] = Future()
        arguments = prepared.monitor_arguments(prepared.data.plan(config))
        self.coordinator = AttachedCoordinator(prepared.name, prepared.store, prepared.signals, **arguments)

    def start_session(self, messages: GroupMessages | None) -> None:
        """Start the thread with the run's session. ``messages`` have the reports of the other workers, if any."""
        self._messages = messages
        threading.Thread(target=self._watch, daemon=True, name="run-session").start()

    def _watch(self) -> None:
        """Run the session to the run's end, in a thread, and set its result or its exception."""
        try:
            with RunSession(self._prepared, self) as session:
                result = session.watch()
            self._result.set_result(result)  # not before the message of --notify is sent: the process may end then
        except BaseException as error:
            self._result.set_exception(error)
            # Nothing writes documents or passes on requests to stop any more, so the loop must not train on for hours.
            # When it has stopped, conclude() raises the error.
            self.coordinator.request_stop(StopReason("caller", "the thread that records the run has failed"))

    def conclude(self, outcome: Outcome) -> TrainResult:
        """Give the session the workers' outcome, and return the result once it is written.

        Raises the exception with which the session ended, if any.
        """
        self.coordinator.conclude(outcome)
        return self._result.result()

    def wait_for_session(self) -> None:
        """Wait until a failure is written. The session's exception is ignored, because the error itself is raised."""
        self._result.exception()

    # The methods that the session calls.

    def start(self) -> Coordinator:
        return self.coordinator

    def poll(self, snapshot: Snapshot) -> None:
        self._take_messages()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most ``timeout_s`` for the end of the run; return whether worker 0 has left its loop by an error.

        If it has left the loop by another exception, such as a second Ctrl-C, raise that, which interrupts the session.
        """
        self.coordinator.wait_for_end(timeout_s)
        left_by = self.coordinator.left_by
        if left_by is not None and not isinstance(left_by, Exception):
            raise left_by
        return left_by is not None

    def failure(self) -> str | None:
        """Return None: only the launcher knows how a process has ended that did not report an error."""
        return None

    def end_workers(self) -> None:
        """Take the messages that are left, and send the files of the loop. Only the launcher can end the workers."""
        self._take_messages()
        self.send_files(SENT_WITHIN_S)

    def close(self, *, finished: bool) -> None:
        """Tell the other workers that all is written, and that their processes may end."""
        if (messages := self._messages) is not None:
            for rank in range(1, self.num_workers):
                messages.send(_MAY_END_TOPIC.format(f"worker {rank}"), True)

    def _take_messages(self) -> None:
        """Pass on to the coordinator the messages that the other workers have sent since the last call."""
        for rank in range(1, self.num_workers):
            while self._messages is not None and (message := self._messages.take(f"worker {rank}")) is not None:
                with suppress(KeyError, TypeError, ValueError):  # a message that no worker has sent
                    self._deliver(rank, message)

    def _deliver(self, rank: int, message: Any) -> None:
        """Call the method of the coordinator that a message of worker ``rank`` is for.

        Raises KeyError, TypeError or ValueError if no worker sends such a message.
        """
        coordinator = self.coordinator
        match message:
            case ["note_machine_use", use]:
                coordinator.note_machine_use(MachineUse(**use))
            case ["note_event", event]:
                _, parsed = parse_event(event)
                coordinator.note_event(parsed)
            case ["note_wait", int(waiting), int(num_workers), place]:
                coordinator.note_wait(waiting, num_workers, place)
            case ["note_skipped", images]:
                coordinator.note_skipped([SkippedImage.from_json(image) for image in images])
            case ["note_retries", int(num_requests)]:
                coordinator.note_retries(num_requests)
            case ["note_decoded_on_cpu", int(num_images), str(reason)]:
                coordinator.note_decoded_on_cpu(num_images, reason)
            case ["stop", request]:
                coordinator.request_stop(StopReason.from_json(request))
            case ["fail", str(reason), bool(is_sentence)]:
                sentence = reason if is_sentence else f"worker {rank} failed: {reason}"
                coordinator.give_up(LoopFailed(sentence, restart_may_help=False))
            case _:
                raise ValueError(f"{message!r:.80} is no message of a worker")
