"""A data task asks the kernel for longer turns on a core, and for nothing else."""

from __future__ import annotations

import ctypes
import platform
import re
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest

from raytrain.launch.ray.feed.ingest import take_long_turns

_NUMBERS = {"x86_64": 315, "aarch64": 275}  # of the system call sched_getattr(2)


def attributes() -> tuple[int, int, int, int]:
    """Policy, nice value, priority, and slice in ns of the thread that asks."""
    room = ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(_NUMBERS[platform.machine()], 0, room, 48, 0) == 0
    _, policy, _, nice, priority, slice_ns, _, _ = struct.unpack("IIQiIQQQ", room.raw)
    return policy, nice, priority, slice_ns


@pytest.mark.skipif(platform.system() != "Linux" or platform.machine() not in _NUMBERS, reason="only Linux has it")
def test_a_data_task_keeps_a_core_for_20_ms_and_its_priority() -> None:
    with ThreadPoolExecutor(1) as thread:  # the attributes are those of a thread
        before = thread.submit(attributes).result()
        thread.submit(take_long_turns).result()
        after = thread.submit(attributes).result()
    assert after[:3] == before[:3]
    major, minor = map(int, re.findall(r"\d+", platform.release())[:2])
    assert after[3] == 20_000_000 or (major, minor) < (6, 12)
    assert attributes()[3] != 20_000_000, "another thread"
