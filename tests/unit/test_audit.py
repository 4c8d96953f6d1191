"""An audit reports which samples a run missed, used twice, or used in a wrong step."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from raytrain import StorageError, UsageError, audit
from raytrain.data.labels.manifest import Manifest
from raytrain.runs.documents import MANIFEST, write_config
from raytrain.storage.open import open_store
from tests.helpers import memory_runs
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.memory_runs import CLASSES, Recorder, config, images, make_run

pytestmark = pytest.mark.not_quick

NUM_IMAGES = 38
OPTIONS = config(batch_size=7, epochs=2, trace=True, checkpoint_every=("1ep", "4st"))


def train(folder: str, stop_after: int | None = None) -> None:
    run = make_run(OPTIONS, images(NUM_IMAGES, bad=(3,)), folder, Recorder(stop_after))
    memory_runs.trained(run)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that two workers started and three finished, with one image that cannot be read."""
    tmp_path = tmp_path_factory.mktemp("traced")
    keys = pa.array([f"{number:02}.png" for number in range(NUM_IMAGES)], pa.large_string())
    manifest = Manifest(keys, np.zeros(NUM_IMAGES, np.int32), np.ones(NUM_IMAGES, np.int64), keys, CLASSES, "images")
    store = open_store(str(tmp_path / "run"))
    store.put(MANIFEST, manifest.to_parquet())
    store.put("skipped.jsonl", b'{"key": "03.png", "reason": "the file is empty"}\n')
    write_config(store, OPTIONS)
    run_in_processes(2, train, str(tmp_path / "run"), 6)
    run_in_processes(3, train, str(tmp_path / "run"))
    return tmp_path


@pytest.fixture
def storage(trained: Path, tmp_path: Path) -> Path:
    """A copy of that run that a test may change."""
    shutil.copytree(trained / "run", tmp_path / "run")
    return tmp_path


def test_a_run_that_was_stopped_and_resumed_is_clean(storage: Path) -> None:
    result = audit("run", storage=str(storage))
    assert result.clean
    assert (result.first_step, result.last_step) == (1, 12)
    for number, epoch in enumerate(result.epochs, start=1):
        assert (epoch.epoch, epoch.planned, epoch.used_once, epoch.unreadable) == (number, 38, 37, 1)
    assert json.loads(json.dumps(result.summary()))["clean"]


def test_a_lost_and_a_doubled_sample_are_named(storage: Path) -> None:
    path = max((storage / "run/trace").glob("*-00001.parquet"))
    table = pyarrow.parquet.read_table(path).to_pydict()
    lost, table["sample"][0] = table["sample"][0], table["sample"][1]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pa.table(table), buffer)
    path.write_bytes(buffer.getvalue())
    result = audit("run", storage=str(storage))
    assert not result.clean
    first, second = result.epochs
    assert first.clean
    assert (second.missing, second.doubled) == ((f"{lost:02}.png",), (f"{table['sample'][0]:02}.png",))


def test_a_step_that_a_worker_did_not_trace_is_found(storage: Path) -> None:
    min((storage / "run/trace").glob("*-00000.parquet")).unlink()
    assert audit("run", storage=str(storage)).epochs[0].missing


def test_a_run_without_a_list_of_its_images_is_refused(storage: Path) -> None:
    (storage / "run" / MANIFEST).unlink()
    with pytest.raises(UsageError, match="has no list of its images"):
        audit("run", storage=storage)


def test_a_run_without_a_trace_is_refused(tmp_path: Path) -> None:
    write_config(open_store(str(tmp_path / "run")), OPTIONS)
    with pytest.raises(UsageError, match="has no trace; train with --trace"):
        audit("run", storage=str(tmp_path))


@pytest.mark.parametrize("columns", [None, {"other": pa.array([1])}, {"step": pa.nulls(2 * 10**7, pa.int64())}])
def test_a_damaged_trace_is_refused(columns: dict[str, pa.Array] | None, storage: Path) -> None:
    path = min((storage / "run/trace").glob("*.parquet"))
    if columns is None:
        path.write_bytes(path.read_bytes()[:-10])
    else:
        pyarrow.parquet.write_table(pa.table(columns), path)
    with pytest.raises(StorageError, match=r"The trace of run 'run' is damaged \(.*\); it cannot be audited"):
        audit("run", storage=str(storage))
