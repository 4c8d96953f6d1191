"""What a loop prints is shown by the process that trains, and what it leaves open is written, on both backends."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import raytrain
from tests.helpers.small_runs import config, make_images

LOOP = """
import argparse
import atexit
import sys

atexit.register(print, "exits")
parser = argparse.ArgumentParser()
parser.add_argument("--classes", default="classes")
words = parser.parse_args()


def loop(run):
    print(f"begins with {run.num_classes}", parser.parse_args().classes, words.classes)
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            pass
        print("epoch", epoch.number)
    print("a warning", file=sys.stderr)
    sys.stdout.write("no line end")
    if run.config.epochs == 2:
        raise KeyError("x")
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"))


SEEN: list[int] = []


def late(run: raytrain.Run) -> None:
    time.sleep(run.rank)  # the last line of the last worker counts, too
    print("ends", run.rank, file=sys.stderr, end="")


def printing(run: raytrain.Run) -> None:
    print(sys.argv[2], run.rank)
    atexit.register(late, run)
    file = Path(run.config.storage, f"left-open-{run.rank}").open("w")  # noqa: SIM115
    file.write("written")
    setattr(file, "itself", file)  # noqa: B010 ; so that Python does not close it when the loop returns
    for epoch in run.epochs(evaluate=dict):
        for _ in epoch:
            pass
    print("ends", run.rank)
    SEEN.append(run.rank)


@pytest.mark.usefixtures("new_agents")
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_each_line_is_shown_with_its_worker(
    backend: str, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["script.py", "--word", "begins"])  # which a loop of the script may read
    raytrain.train(config(images, tmp_path, backend=backend, epochs=1), loop=printing)
    out, err = capsys.readouterr()
    expected = [f"[worker{rank}]:{word} {rank}" for word in ("begins", "ends") for rank in (0, 1)]
    assert sorted(line for line in out.splitlines() if line.startswith("[")) == sorted(expected)
    assert "training on 2 workers" in out, "the run itself is shown, too"
    assert "the loop has changed SEEN in the process of a worker" in out
    assert SEEN == []
    assert sorted(line for line in err.splitlines() if line.startswith("[")) == sorted(expected[2:])
    assert [(tmp_path / f"left-open-{rank}").read_text() for rank in (0, 1)] == ["written"] * 2


def test_the_command_shows_them_in_a_pipe_also_if_the_loop_fails(images: Path, tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(LOOP)
    options = [
        "--data",
        str(images),
        "--image-size",
        "12",
        "--batch-size",
        "20",
        "--epochs",
        "2",
        "--max-failures",
        "0",
    ]
    options += ["--loop", "loops.py:loop", "--backend", "local", "--workers", "1"]
    command = [sys.executable, "-m", "raytrain", "train", "custom", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    shown = [line.partition(":")[2] for line in done.stdout.splitlines() if line.startswith("[worker0]:")]
    assert shown == ["begins with 3 classes classes", "epoch 0", "epoch 1", "no line endexits"], done.stdout
    assert done.returncode == 1
    assert "[worker0]:a warning\n" in done.stderr
    assert "KeyError: 'x'" in done.stderr and "Traceback" not in done.stderr
    assert "leaked" not in done.stderr, "what the agent's modules say when Python ends"


SCRIPT = """
import logging
import sys

import raytrain
from tests.helpers.small_runs import config

log = logging.getLogger("mine")
logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s: %(message)s")
of_files = logging.getLogger("kept")
of_files.propagate = False
of_files.addHandler(logging.FileHandler("kept.log"))


def loop(run):
    log.info("begins")
    log.debug("not shown")
    logging.getLogger("urllib3").info("not shown")
    for epoch in run.epochs(evaluate=dict):
        for batch in epoch:
            pass
    of_files.info("worker %d ends", run.rank)


if __name__ == "__main__":
    options = dict(address="local") if sys.argv[1] == "ray" else dict(backend="local")
    raytrain.train(config(*sys.argv[2:], epochs=1, workers=1, **options), loop=loop)
    of_files.warning("the script ends")
"""


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_loop_logs_as_the_script_has_set_it_up_and_the_run_is_shown_once(
    backend: str, images: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", backend, str(images), str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "mine" in line] == ["[worker0]:mine INFO: begins"]
    assert "not shown" not in done.stdout + done.stderr
    assert done.stdout.count("starting the workers …") == 1 and "starting the workers" not in done.stderr
    assert "training on 1 worker" in done.stdout and "training_started" not in done.stderr
    assert (tmp_path / "kept.log").read_text() == "worker 0 ends\nthe script ends\n"
