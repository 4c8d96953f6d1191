"""With little memory, a run is slower or is refused at the start; it continues after an out-of-memory kill."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain import TrainResult
from tests.helpers.small_object_store import options
from tests.helpers.small_runs import assert_same_weights, config, loop_with

pytestmark = pytest.mark.slow

DECODED_BYTES = 90 * 640 * 640 * 3


@pytest.fixture(scope="module")
def roomy(ray_cluster: None, images: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A run whose decoded images fit into the object store."""
    return raytrain.train(options(images, tmp_path_factory.mktemp("roomy"), cache="memory"))


@pytest.mark.parametrize(
    ("store_bytes", "status_of_memory"),
    [
        (int(1.02 * DECODED_BYTES), "finished"),  # All images fit, and nothing else.
        (int(0.75 * DECODED_BYTES), "refused"),
    ],
)
def test_a_small_object_store_does_not_change_the_weights(
    store_bytes: int, status_of_memory: str, roomy: TrainResult, images: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "tests.helpers.small_object_store", str(store_bytes), str(images), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    statuses = {cache: result["status"] for cache, result in results.items()}
    assert statuses == {"none": "finished", "auto": "finished", "memory": status_of_memory}
    assert results["memory"]["spilled_mib"] > 0
    for cache, result in results.items():
        if result["status"] == "finished":
            assert (result["samples_seen"], result["num_skipped"]) == (324, 0)
            assert_same_weights(TrainResult(**{name: result[name] for name in roomy.summary()}), roomy)
            assert raytrain.audit(cache, storage=str(tmp_path)).clean
        else:
            sentence = r"--cache is memory, and the images take 0\.11 GB there, more than the 0\.0\d GB that are left"
            assert re.search(sentence, result["error"]), result["error"]


# Out-of-memory kills.


@pytest.fixture
def memory_limit() -> Iterator[Path]:
    """The process list of a control group with a memory limit of 300 MB; write a process id into it to add it."""
    top = Path("/sys/fs/cgroup")
    unified = (top / "cgroup.controllers").exists()
    group = (top if unified else top / "memory") / f"raytrain-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(300 << 20))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    yield group / "cgroup.procs"
    group.rmdir()


def eat_all_memory(run: raytrain.Run, batch: raytrain.Batch, limit: Path, folder: Path) -> None:
    if (run.rank, batch.step) == (1, 7) and not (folder / "eaten").exists():
        (folder / "eaten").touch()
        limit.write_text(str(os.getpid()))
        eaten = []
        while True:
            eaten.append(bytearray(os.urandom(1) * (16 << 20)))


def test_a_worker_killed_by_the_kernel_for_its_memory_does_not_change_the_weights(
    backend: str, undisturbed: TrainResult, images: Path, memory_limit: Path, tmp_path: Path
) -> None:
    hook = partial(eat_all_memory, limit=memory_limit, folder=tmp_path)
    loop = partial(loop_with, before_step=hook)  # pyright: ignore
    result = raytrain.train(config(images, tmp_path, backend=backend, trace=True), loop=loop)
    assert (tmp_path / "eaten").exists()
    assert (result.status, result.samples_seen) == ("finished", 324)
    assert_same_weights(result, undisturbed)
    assert raytrain.audit("run", storage=str(tmp_path)).clean
