"""Draw the README's picture: the terminal view of a run as it stood at one step, from the history that the run left.

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

from raytrain.display.terminal import dashboard
from raytrain.runs.history import History
from raytrain.runs.monitor import RunMonitor, Snapshot
from raytrain.runs.records import RunRecord, read_run
from raytrain.storage.open import open_store


def picture(run: tyro.conf.Positional[str], storage: str = "./runs", step: int | None = None, output: str = ".github/run.svg") -> None:
    """Write ``output``, an SVG of the view after ``step`` steps, by default after the last."""
    record = read_run(storage, run)
    with tempfile.TemporaryDirectory() as scratch:
        snapshot = replayed(record, step or record.status.step, scratch)
    console = Console(record=True, width=110, height=40, file=io.StringIO(), force_terminal=True)
    console.print(dashboard(snapshot, snapshot.rows, plot_height=9))
    svg = console.export_svg(title=f"raytrain train {record.config.recipe} --name {record.name}", theme=MONOKAI)
    Path(output).write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL))  # a picture fetches no fonts


def replayed(record: RunRecord, step: int, scratch: str) -> Snapshot:
    """The run's history told again to a monitor, up to ``step``."""
    now_s = 0.0
    steps_per_epoch = math.ceil(record.status.num_steps / record.status.num_epochs)
    with closing(History(open_store(scratch))) as history:
        monitor = RunMonitor(record.name, record.status.num_steps, steps_per_epoch, history, clock=lambda: now_s)
        monitor.started(record.status.num_workers, 0)
        for row in record.metrics:
            if row["step"] <= step:
                now_s = row["elapsed_s"]
                monitor.record(row)
        return monitor.snapshot()


if __name__ == "__main__":
    tyro.cli(picture)
