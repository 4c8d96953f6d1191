"""When the user pressed return, as a process finds out."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.not_quick

READ = "from raytrain.cli.command import process_started_at; print(process_started_at())"


def test_a_process_knows_when_it_was_started() -> None:
    before = time.monotonic()
    started_at = float(subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True).stdout)
    tick_s = 0.02  # the system counts in hundredths of a second
    assert before - tick_s <= started_at < time.monotonic()
