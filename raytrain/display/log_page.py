"""What happened to a run, line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raytrain.display.event_text import event_text
from raytrain.display.formatting import format_duration
from raytrain.runs.logs import StoredLog
from raytrain.runs.printable import one_line
from raytrain.runs.snapshot import Snapshot

_STREAMS = {"out": "standard output", "err": "standard error", "log": "output and log"}


def event_lines(snapshot: Snapshot) -> list[str]:
    """The events of a run with their seconds of training, and why it failed."""
    lines = [f"{format_duration(at_s)}  {one_line(event_text(event))}" for _, at_s, event in snapshot.events]
    error = snapshot.result and snapshot.result.error
    return [*lines, one_line(error)] if error else lines


class LogLines:
    """Prints the lines of logs that grow: each line once, below a heading that says whose it is."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._seen: dict[str, list[str]] = {}
        self._last = ""

    def events(self, snapshot: Snapshot) -> None:
        """Print what happened since the last call."""
        self._print("", event_lines(snapshot))

    def printed(self, whose: str, logs: Sequence[StoredLog]) -> None:
        """Print what a process has printed since the last call, apart from a line that is still growing."""
        for log in logs:
            whole = log.text[: log.text.rfind("\n") + 1].replace("\r\n", "\n").split("\n")[:-1]
            shown = [one_line(line.rpartition("\r")[2]) for line in whole]  # a progress bar shows its last state
            self._print(f"== {whose}, started {log.started}, {_STREAMS[log.stream]}", shown)

    def _print(self, heading: str, lines: list[str]) -> None:
        new = lines[_num_seen(self._seen.get(heading, []), lines) :]
        if new and heading != self._last:
            self._write(heading)
            self._last = heading
        for line in new:
            self._write(line)
        self._seen[heading] = lines


def _num_seen(before: list[str], now: list[str]) -> int:
    """How many of the lines were there before; the oldest ones may have been dropped since."""
    for dropped in range(len(before)):
        if before[dropped:] == now[: len(before) - dropped]:
            return len(before) - dropped
    return 0
