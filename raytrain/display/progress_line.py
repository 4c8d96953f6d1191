"""How a run stands, as one line of plain text."""

from __future__ import annotations

from raytrain.display.formatting import format_duration
from raytrain.runs.snapshot import Snapshot

_MEASUREMENTS = {
    "images_per_s": "{:,.0f} images/s",
    "learning_rate": "learning rate {:.3g}",
    "data_wait_fraction": "waiting for data {:.0%}",
}


def progress_line(snapshot: Snapshot) -> str:
    """Step, epoch, loss, accuracy, speed and time left, as far as they are known."""
    parts = [f"step {snapshot.step:,}/{snapshot.num_steps:,}", f"epoch {snapshot.epoch}/{snapshot.num_epochs}"]
    measured = snapshot.latest.metrics if snapshot.latest else {}
    parts += [f"{name} {_decimal(measured[name])}" for name in ("loss", "accuracy") if name in measured]
    parts += measurements(snapshot)
    if snapshot.time_left_s is not None:
        parts.append(f"{format_duration(snapshot.time_left_s)} left")
    return "  ".join(parts)


def measurements(snapshot: Snapshot) -> list[str]:
    """Speed, learning rate, waiting time, skipped images and retries, as far as they are known and not zero."""
    latest = snapshot.latest
    values = {name: latest.value(name) for name in _MEASUREMENTS} if latest else {}
    texts = [_MEASUREMENTS[name].format(value) for name, value in values.items() if value is not None]
    counts = {"skipped": snapshot.num_skipped, "retries": snapshot.num_retries}
    return texts + [f"{number:,} {what}" for what, number in counts.items() if number]


def _decimal(value: float | None) -> str:
    """A metric is None if it was not finite when it was written."""
    return "nan" if value is None else f"{value:.3f}"
