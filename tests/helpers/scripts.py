"""Scripts of the documentation, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def run(folder: Path, *words: str | Path) -> str:
    """Run a command in ``folder`` with this checkout's package, and return what it prints."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd(), "RAY_ADDRESS": "local"}
    done = subprocess.run(list(map(str, words)), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
