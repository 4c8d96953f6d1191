"""A sweep in the terminal: a live table on a screen, otherwise a plain line whenever something changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from raytrain.display.event_text import reason_text
from raytrain.display.live_view import LiveView
from raytrain.display.sweep_tables import live_table
from raytrain.experiments.sweep.trials import Trial, as_typed
from raytrain.runs.trial_status import TrialStatus

_LINES_BESIDE_TRIALS = 6


class SweepTerminalView(LiveView):
    """Shows one sweep: ``with SweepTerminalView() as view``, then call ``view.update(…)`` twice a second.

    Args:
        console: where to print, by default standard output. If it is a terminal, the view is a live table; otherwise,
            it is plain lines.
    """

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console, "reading the data, starting the trials …")
        self._printed: dict[str, tuple[str, int, float | None]] = {}

    def update(self, trials: Sequence[Trial], statuses: Mapping[str, TrialStatus]) -> None:
        """Show all ``trials``; ``statuses`` lacks those that have not started."""
        if self._live is None:
            self._print_changes(trials, statuses)
        else:
            self._draw(live_table(trials, statuses, self._console.height - _LINES_BESIDE_TRIALS), keep=False)

    def _print_changes(self, trials: Sequence[Trial], statuses: Mapping[str, TrialStatus]) -> None:
        for trial in trials:
            status = statuses.get(trial.name)
            if status is None:
                continue
            state = (status.status, status.num_evaluations, status.accuracy)
            if self._printed.get(trial.name) != state:
                self._printed[trial.name] = state
                self._print(trial_line(trial, status))


def trial_line(trial: Trial, status: TrialStatus) -> str:
    """How a trial stands, as one line of plain text."""
    parts = [trial.name, as_typed(trial.values), status.status]
    if status.num_epochs:
        parts.append(f"epoch {status.epoch}/{status.num_epochs}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.accuracy is not None:
        parts.append(f"best test accuracy {status.accuracy:.4f}")
    if status.images_per_s is not None and status.status == "running":
        parts.append(f"{status.images_per_s:,.0f} images/s")
    if status.reason:
        parts.append(f"({reason_text(status.reason)})")
    return "  ".join(parts)
