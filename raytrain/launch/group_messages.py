"""Messages between the processes of a group of `torch.distributed`, through the store at which the group has met.

They need no port of their own, and no process waits for another. Anyone who reaches the store can write there, so
messages are JSON, from which no code can run.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist


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
