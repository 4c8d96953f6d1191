"""The processes that decode for a worker: blocks, errors and reports come from them, and their memory is used again."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from raytrain.errors import UsageError
from raytrain.loader.decoder_processes import DecoderKilled
from raytrain.runs.metric_row import SkippedImage
from tests.helpers.decoder_reading import (
    COUNTS_PAGES,
    DIES,
    FAILS,
    FAILS_STRANGELY,
    ROWS,
    Reading,
    block,
)
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.not_quick


@pytest.fixture(params=[True, False], ids=["forked", "new"], scope="module")
def shared_reading(request: pytest.FixtureRequest) -> Iterator[Reading]:
    reading = Reading(forks=request.param)
    with reading.decoders:
        yield reading


@pytest.fixture
def reading(shared_reading: Reading) -> Reading:
    shared_reading.recorder.__init__()
    return shared_reading


def test_blocks_are_read_in_another_process_for_their_epoch(reading: Reading) -> None:
    futures = [block(reading, first, epoch=first) for first in range(10)]
    for first, future in enumerate(futures):
        found = future.result(60)
        np.testing.assert_array_equal(found.images[:, 0, 0, 0], np.arange(first, first + ROWS) + first)
        assert os.getpid() not in found.labels


def test_memory_is_used_again_once_nobody_has_it(reading: Reading) -> None:
    kept = block(reading, 0).result(60).images[1:]
    addresses = set[int]()
    for first in range(1, 40):
        addresses.add(block(reading, first).result(60).images.ctypes.data)
    np.testing.assert_array_equal(kept[:, 0, 0, 0], [1, 2])
    assert len(addresses) < 39


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's malloc")
def test_a_process_keeps_the_memory_of_photographs(reading: Reading) -> None:
    assert block(reading, COUNTS_PAGES).result(60).labels[0] < 1000


def test_threads_that_ask_at_once_get_what_they_asked_for(reading: Reading) -> None:
    def ask(first: int) -> bool:
        found = [block(reading, first, epoch).result(60) for epoch in range(10)]
        wanted = [np.arange(first, first + ROWS) + epoch for epoch in range(10)]
        return all((each.images[:, 0, 0, 0] == pixels).all() for each, pixels in zip(found, wanted, strict=True))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(0, 80, 10)))


def test_errors_arrive_and_the_next_block_is_read(reading: Reading) -> None:
    with pytest.raises(UsageError, match="no such image"):
        block(reading, FAILS).result(60)
    with pytest.raises(RuntimeError, match=r"Strange: .*out of order"):
        block(reading, FAILS_STRANGELY).result(60)
    assert len(block(reading, 0).result(60)) == ROWS


def test_reports_arrive_before_their_block(reading: Reading) -> None:
    block(reading, 0).result(60)
    assert [image.key for image in reading.recorder.skipped] == ["a.jpg"] and reading.recorder.retries == 2


def test_an_error_of_the_reporter_ends_what_waits() -> None:
    def refuse(images: list[SkippedImage]) -> None:
        raise UsageError("too many images are skipped")

    reading = Reading()
    reading.recorder.note_skipped = refuse
    with reading.decoders:
        for _ in range(2):
            with pytest.raises(UsageError, match="too many"):
                block(reading, 0).result(60)


def test_nothing_waits_for_what_is_closed() -> None:
    reading = Reading()
    reading.decoders.__exit__()
    with pytest.raises((RuntimeError, OSError)):
        block(reading, 0).result(60)


def test_a_signal_that_ends_a_new_process_is_told_to_who_waits() -> None:
    reading = Reading(forks=False)
    with reading.decoders, pytest.raises(DecoderKilled, match="SIGSEGV"):
        block(reading, DIES).result(60)


_DIES = """
from tests.helpers.decoder_reading import DIES, Reading, block
block(Reading(), DIES).result(60)
"""


def test_a_signal_that_ends_one_ends_its_worker_so_that_the_agent_sees_why() -> None:
    assert subprocess.run([sys.executable, "-c", _DIES], timeout=60).returncode == -signal.SIGSEGV


_IS_KILLED = """
import os, signal
from tests.helpers.decoder_reading import Reading, block
print(*block(Reading(forks={forks}), 0).result(60).labels, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def has_ended(process: int) -> bool:
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("forks", [True, False])
def test_they_end_with_a_worker_that_is_killed(forks: bool) -> None:
    script = _IS_KILLED.format(forks=forks)
    killed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    decodes = int(killed.stdout.split()[0])
    wait_for(lambda: has_ended(decodes), "it lives on")
