"""Draw the README's picture: the terminal view of a run as it was at one step, from the history of the run.

uv run python .github/picture.py RUN [--storage ./runs] [--step 500] [--output .github/run.svg]
"""

from __future__ import annotations

import io
import math
import re
import tempfile
from contextlib import closing
from pathlib import Path

import tyro
from rich.console import Console
from rich.terminal_theme import MONOKAI

from raytrain.display.dashboard import dashboard
from raytrain.monitor.monitor import RunMonitor
from raytrain.monitor.snapshot import Snapshot
from raytrain.runs.metrics_history import History
from raytrain.runs.records import RunRecord, read_run
from raytrain.storage.open import open_store


def picture(
    run: tyro.conf.Positional[str],
    storage: str = "./runs",
    step: int | None = None,
    output: str = ".github/run.svg",
) -> None:
    """Write ``output``, an SVG of the view after ``step`` steps, by default after the last."""
    record = read_run(storage, run)
    with tempfile.TemporaryDirectory() as folder:
        snapshot = replayed(record, step or record.status.step, folder)
    console = Console(record=True, width=110, height=40, file=io.StringIO(), force_terminal=True)
    console.print(dashboard(snapshot, snapshot.rows, plot_height=9))
    svg = console.export_svg(title=f"raytrain train {record.config.recipe} --name {record.name}", theme=MONOKAI)
    without_fonts = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # which it would download
    Path(output).write_text(without_fonts)


def replayed(record: RunRecord, step: int, folder: str) -> Snapshot:
    """Replay the run's history up to ``step`` to a monitor; ``folder`` is empty and temporary."""
    now_s = 0.0
    steps_per_epoch = math.ceil(record.status.num_steps / record.status.num_epochs)
    with closing(History(open_store(folder))) as history:
        monitor = RunMonitor(record.name, record.status.num_steps, steps_per_epoch, history, clock=lambda: now_s)
        now_s = record.summary.get("startup_seconds", 0.0)
        monitor.note_start(record.status.num_workers, 0)
        for row in record.metrics:
            if row.step <= step:
                now_s = row.elapsed_s
                monitor.record(row)
        return monitor.snapshot()


if __name__ == "__main__":
    tyro.cli(picture)
