"""Files that a loop writes: those in the run's folder are kept in its storage, and others are not lost silently."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import raytrain
from raytrain.storage.open import open_store
from tests.helpers.small_runs import config, make_images, put_images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"))


def writing(run: raytrain.Run) -> None:
    """Append a line for each epoch, and return in the first attempt after the first of them."""
    run.prepare(run.build_model())
    is_first = run.progress.step == 0
    with (run.folder / "epochs.csv").open("a") as file:
        file.write(f"starts at {run.progress.step}\n")
    for epoch in run.epochs(evaluate=dict):
        for _ in epoch:
            pass
        (run.folder / f"of-{run.rank}-{epoch.number}").write_text("x")
        if is_first:
            return


def failing(run: raytrain.Run) -> None:
    (run.folder / "before").write_text("x")
    dist.barrier()  # worker 0 has written, and the other one may still be the first to fail
    raise KeyError("after")


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_bucket_has_them_and_a_resume_goes_on_with_them(backend: str, images: Path, s3_url: str) -> None:
    put_images(images, open_store(f"{s3_url}/images"))
    options = config(f"{s3_url}/images", s3_url, backend=backend, epochs=2)
    raytrain.train(options, loop=writing)
    store = open_store(f"{s3_url}/run")
    assert {stored.path for stored in store.list("files/")} == {"files/epochs.csv", "files/of-0-0"}
    raytrain.train(config(f"{s3_url}/images", s3_url, backend=backend, epochs=2, resume=True, workers=1), loop=writing)
    assert store.get("files/epochs.csv") == b"starts at 0\nstarts at 5\n"
    assert store.exists("files/of-0-1")


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])  # the other starts a Ray
def test_a_folder_has_them_and_so_has_a_run_that_fails(backend: str, images: Path, tmp_path: Path, s3_url: str) -> None:
    for storage in (str(tmp_path), s3_url):
        with pytest.raises(raytrain.TrainingFailed):
            raytrain.train(config(images, storage, backend=backend, max_failures=0), loop=failing)
        assert open_store(f"{storage}/run").get("files/before") == b"x"


@pytest.mark.slow  # two clusters
@pytest.mark.parametrize("cpus", [["2"], ["0", "2"]], ids=["on the driver's node", "on another node"])
def test_what_is_written_elsewhere_is_said(cpus: list[str], images: Path, tmp_path: Path) -> None:
    folder, started = tmp_path / "of-the-driver", tmp_path / "of-the-cluster"
    folder.mkdir()
    started.mkdir()
    command = [sys.executable, "-m", "tests.helpers.apart_from_driver", str(images), str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [*command, str(folder), *cpus], cwd=started, env=environment, stdout=subprocess.PIPE, timeout=180, check=False
    )
    assert done.returncode == 0
    said = [note for note in json.loads(done.stdout.splitlines()[-1]) if "relative-" in note]
    written = folder if cpus == ["2"] else started
    assert {file.name for file in written.glob("*.txt")} == {"relative-0.txt", "relative-1.txt"}
    if written is folder:
        assert not said and not list(started.glob("*.txt"))
    else:
        assert len(said) == 1 and str(started) in said[0] and "run.folder" in said[0]
    assert [file.name for file in (tmp_path / "runs" / "run" / "files").iterdir()] == ["kept-0.txt"]
