"""A data task asks the kernel for longer turns on a core, and for nothing else."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

_SHOWS = """
import ctypes, os, struct
from raytrain.launch.ray.feed.ingest import take_long_turns

def attributes():
    room = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall({number}, 0, room, 48, 0) == 0
    _, policy, _, nice, priority, slice_ns, _, _ = struct.unpack("IIQiIQQQ", room.raw)
    return policy, nice, priority, slice_ns

os.nice(3)
before = attributes()
take_long_turns()
print(*before[:3], *attributes())
"""
_NUMBERS = {"x86_64": 315, "aarch64": 275}  # of sched_getattr(2)


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() not in _NUMBERS, reason="it is for Linux")
def test_a_data_task_keeps_a_core_for_20_ms_and_its_priority() -> None:
    code = _SHOWS.format(number=_NUMBERS[platform.machine()])
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    *before, policy, nice, priority, slice_ns = map(int, shown.split())
    assert [policy, nice, priority] == before and nice >= 3
    major, minor = map(int, re.findall(r"\d+", platform.release())[:2])
    assert slice_ns == 20_000_000 or (major, minor) < (6, 12)
