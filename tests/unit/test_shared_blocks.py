"""Decoded images that the processes of a machine share."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from raytrain.data.blocks import Block
from raytrain.data.images.image_format import ImageShape
from raytrain.data.plan.batch_plan import BatchPlan
from raytrain.data.plan.partition import CacheOrder
from raytrain.data.plan.permutation import Int64s
from raytrain.loader.machine_batches import SharedBlocks
from tests.helpers.small_runs import make_images

SHAPE = ImageShape(2, 3, 1)
ORDER = CacheOrder(BatchPlan(num_samples=10, batch_size=4, epochs=1, seed=0), 0, rows_per_block=4)


def decode(samples: Int64s, epoch: int) -> Block:
    return Block(np.full((len(samples), 2, 3, 1), samples[:, None, None, None], np.uint8), samples * 100, samples)


def never(samples: Int64s, epoch: int) -> Block:
    raise AssertionError("another process has read this block")


def test_each_block_is_read_once_whoever_asks(tmp_path: Path) -> None:
    first = SharedBlocks(tmp_path / "train", ORDER, SHAPE, decode)
    first.read_ahead()
    second = SharedBlocks(tmp_path / "train", ORDER, SHAPE, never)
    for number in range(3):
        block = second(number)
        np.testing.assert_array_equal(block.draws, ORDER.draws(number))
        np.testing.assert_array_equal(block.labels, block.draws * 100)
        np.testing.assert_array_equal(block.images[:, 1, 2, 0], block.draws)


def test_two_threads_that_need_a_block_read_it_once(tmp_path: Path) -> None:
    reading, go_on, read = threading.Event(), threading.Event(), []

    def slowly(samples: Int64s, epoch: int) -> Block:
        read.append(samples)
        reading.set()
        assert go_on.wait(60)
        return decode(samples, epoch)

    blocks = SharedBlocks(tmp_path / "train", ORDER, SHAPE, slowly)
    threads = [threading.Thread(target=blocks, args=(0,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert reading.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert len(read) == 1


def _die_while_reading(folder: Path) -> None:
    def die(samples: Int64s, epoch: int) -> Block:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    SharedBlocks(folder, ORDER, SHAPE, die)(1)


@pytest.mark.not_quick
def test_a_block_whose_reader_died_is_read_by_the_next_one(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_die_while_reading, args=(tmp_path / "train",))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    np.testing.assert_array_equal(
        SharedBlocks(tmp_path / "train", ORDER, SHAPE, decode)(1).labels, ORDER.draws(1) * 100
    )


def test_what_cannot_be_read_is_told_to_whoever_needs_it(tmp_path: Path) -> None:
    def broken(samples: Int64s, epoch: int) -> Block:
        raise OSError("storage is gone")

    blocks = SharedBlocks(tmp_path / "train", ORDER, SHAPE, broken)
    blocks.read_ahead()
    with pytest.raises(OSError, match="storage is gone"):
        blocks(0)


FULL_MEMORY = """
import sys
from pathlib import Path
from tests.unit.test_shared_blocks import ORDER, SHAPE, SharedBlocks, decode

folder = Path(sys.argv[1])
blocks = SharedBlocks(folder / "train", ORDER, SHAPE, decode)
try:
    (folder / "other").write_bytes(bytes(1 << 20))
except OSError:
    print(blocks(0))
"""


@pytest.mark.not_quick
@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="it mounts a small disk in memory")
def test_a_full_memory_ends_nothing_by_a_signal_but_with_a_sentence(tmp_path: Path) -> None:
    mount_and_run = 'mount -t tmpfs -o size=64k tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--mount", "sh", "-c", mount_and_run, "", str(tmp_path), sys.executable, FULL_MEMORY]
    ended = subprocess.run(command, capture_output=True, text=True)
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip("this container mounts nothing")
    expected = rf"UsageError: .* take 0\.00 GB in {tmp_path}/train, and cannot be written there \(No space left"
    assert re.search(expected, ended.stderr), ended


DRIVER = """
import sys
from contextlib import ExitStack
from raytrain.data.dataset import open_dataset
from raytrain.loader.choose_cache import image_cache
from raytrain.runs.documents import run_store
from tests.helpers.small_runs import config

chosen = config(*sys.argv[1:], cache="memory")
data = open_dataset(chosen, run_store(chosen.storage, "run"))
resolved = chosen.resolve(name="run", num_workers=1, device="cpu", mean=data.mean, std=data.std)
with ExitStack() as opened:
    print(image_cache(resolved, data, 0, opened).folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.not_quick
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the next start removes the file")
def test_images_of_a_killed_driver_are_gone_once_nobody_has_them_open(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    command = [sys.executable, "-c", DRIVER, str(make_images(tmp_path / "images")), str(tmp_path / "runs")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        folder = Path(driver.stdout.readline().strip())
        blocks = SharedBlocks(folder / "train", ORDER, SHAPE, decode)
        blocks.read_ahead()
        file = (folder / "train" / "images").resolve()
        driver.kill()
    assert not file.exists()
    np.testing.assert_array_equal(blocks(1).labels, ORDER.draws(1) * 100)
    shutil.rmtree(folder)
