"""When the user pressed return."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_START_TIME = 19
"""Among the fields of ``/proc/PID/stat`` after the name, counted from 0: clock ticks since the machine started."""


def process_started_at() -> float:
    """When this process was started, as ``time.monotonic()`` tells the time; now if the system does not say."""
    with suppress(OSError):  # there is no /proc on macOS
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - age_s
    return time.monotonic()
