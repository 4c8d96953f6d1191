"""The lines of a run's logs and its events, as `raytrain logs` prints them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raytrain.display.console import format_duration
from raytrain.display.event_text import event_text
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.logs import StoredLog
from raytrain.runs.redact import one_line

_STREAMS = {"out": "standard output", "err": "standard error", "log": "output and log"}


class LogLines:
    """Prints the lines of growing logs by ``write``: each line once, below a heading that names the process."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._lines_before: dict[str, list[str]] = {}  # of each log when it was printed last, by its heading
        self._last_heading = ""  # of the line that was printed last; "" for events, which have none

    def print_events(self, snapshot: Snapshot) -> None:
        """Print the events since the last call, each with its time in the run, and why the run failed."""
        lines = [f"{format_duration(at_s)}  {one_line(event_text(event))}" for _, at_s, event in snapshot.events]
        error = snapshot.result and snapshot.result.error
        self._print("", [*lines, one_line(error)] if error else lines)

    def print_process(self, process: str, logs: Sequence[StoredLog], *, grows: bool) -> None:
        """Print the lines that a process has printed since the last call.

        If the log ``grows``, a last line without an end waits for the rest of it.
        """
        for log in logs:
            *lines, rest = log.text.replace("\r\n", "\n").split("\n")
            if rest and not grows:
                lines.append(rest.rstrip("\r"))
            shown = [one_line(line.rpartition("\r")[2]) for line in lines]  # a progress bar shows its last state
            self._print(f"== {process}, started {log.started}, {_STREAMS[log.stream]}", shown)

    def _print(self, heading: str, lines: list[str]) -> None:
        """Print those ``lines`` of a log that were not printed before, below the ``heading`` of its process."""
        # The new lines follow those that were printed before, of which the oldest may be gone from the log since.
        before = self._lines_before.get(heading, [])
        remaining = (before[num_gone:] for num_gone in range(len(before)))
        num_printed = next((len(tail) for tail in remaining if tail == lines[: len(tail)]), 0)
        self._lines_before[heading] = lines

        # The heading is repeated if lines of another process were printed in between.
        new_lines = lines[num_printed:]
        if new_lines and heading != self._last_heading:
            self._write(heading)
            self._last_heading = heading
        for line in new_lines:
            self._write(line)
