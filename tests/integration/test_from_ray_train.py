"""The scripts of docs/from-ray-train.md, a worker that fails under Ray Train, and a trial of Tune."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import raytrain
from raytrain.runs.documents import run_store
from raytrain.runs.status import read_status

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-ray-train.md").read_text()
[DIFF] = re.findall(r"```diff title=\"train.py\"\n(.*?)```", PAGE, re.DOTALL)
[WHOLE] = re.findall(r"```python title=\"whole.py\"\n(.*?)```", PAGE, re.DOTALL)
AFTER = "".join(line[1:] for line in DIFF.splitlines(keepends=True) if line[0] in " +")
OPTIONS = """
options = {"data": os.path.abspath("photos"), "image_size": 12, "batch_size": 20, "epochs": 4, "log_every": 1}
options |= {"name": "run", "storage": os.path.abspath("runs"), "resume": True}
"""


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    """A folder with the photographs that the scripts read."""
    (tmp_path / "photos").symlink_to(images)
    return tmp_path


def run(folder: Path, script: str) -> str:
    """Run a script in ``folder``, and return what it prints, without the lines of Ray's workers in between."""
    (folder / "script.py").write_text(script)
    paths = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **paths}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return "".join(line for line in done.stdout.splitlines(keepends=True) if not line.startswith("\x1b["))


def status(folder: Path, name: str) -> str:
    return read_status(run_store(str(folder / "runs"), name)).status


def test_three_lines_make_the_script_of_the_page_a_run(folder: Path) -> None:
    assert sum(line.startswith("+") for line in DIFF.splitlines()) == 3
    run(folder, AFTER)
    assert status(folder, "photos") == "finished"


def test_the_whole_script_of_the_page_gives_ray_its_metrics_and_its_checkpoint(folder: Path) -> None:
    lines = f"{WHOLE}\nprint(result.checkpoint.path)\n"
    accuracy, files, path = run(folder, lines).splitlines()[-3:]
    assert re.fullmatch(r"accuracy \d\.\d\d, loss \d+\.\d\d", accuracy)
    assert "checkpoint.pt" in files
    assert status(folder, "whole") == "finished"

    # A checkpoint of Ray's is one of raytrain's, and the other way round.
    state = torch.load(f"{path}/checkpoint.pt", weights_only=True)["state"]["model"]
    config = raytrain.TrainConfig(
        name="next", data=str(folder / "photos"), storage=str(folder / "runs"), model="resnet18", image_size=(64, 64),
        batch_size=32, epochs=1, weights=f"{path}/checkpoint.pt",
    )  # fmt: skip
    with raytrain.attach(config) as attached:
        weights = attached.build_model().state_dict()
        assert all(torch.equal(weights[name], value) for name, value in state.items())
        model = attached.prepare(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64 * 64 * 3, 3)))
        for batch in next(attached.epochs()):
            model(batch.images).mean().backward()
            break


_FAILS_ONCE = f"""
import os
import ray.train, ray.train.torch
import raytrain
from raytrain.config import TrainConfig
from tests.helpers.small_runs import loop_with

def before_step(run, batch):
    if run.progress.step == 6 and run.rank == 1 and not os.path.exists(marker):
        open(marker, "w").close()
        os._exit(1)

def train_loop_per_worker(options):
    global marker
    marker = options.pop("marker")
    with raytrain.attach(TrainConfig(**options, model="tests.helpers.memory_runs:network")) as run:
        print("begins after", run.progress.step)
        loop_with(run, before_step)
{OPTIONS}
options |= {{"checkpoint_every": ("5st",), "learning_rate": 0.05, "marker": os.path.abspath("marker")}}
trainer = ray.train.torch.TorchTrainer(
    train_loop_per_worker, train_loop_config=options, scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=1)),
)
result = trainer.fit()
print(result.metrics["step"], result.metrics["status"])
"""


def test_a_worker_that_ray_train_starts_again_goes_on_from_the_last_checkpoint(folder: Path) -> None:
    assert "finished" in run(folder, _FAILS_ONCE).splitlines()[-1]
    rows = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    events = [json.loads(line) for line in (folder / "runs/run/events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["kind"] == "training_started"] == [0, 5]


_TUNES = f"""
import os
import ray.tune
import raytrain
from tests.helpers.small_runs import loop_with

def trial(options):
    name = f"rate-{{options['learning_rate']}}"
    config = raytrain.TrainConfig(**{{**options, "name": name}}, model="tests.helpers.memory_runs:network")
    with raytrain.attach(config) as run:
        loop_with(run, lambda run, batch: None)
{OPTIONS}
options["learning_rate"] = ray.tune.grid_search([0.05, 0.1])
run_config = ray.tune.RunConfig(storage_path=os.path.abspath("tune"))
results = ray.tune.Tuner(trial, param_space=options, run_config=run_config).fit()
best = results.get_best_result("validation/accuracy", "max")
print([len(one.metrics_dataframe) > 0 for one in results], best.metrics["status"], os.listdir(best.checkpoint.path))
"""


def test_a_trial_of_tune_gets_the_metrics_and_the_checkpoint(folder: Path) -> None:
    assert "[True, True] finished ['checkpoint.pt']" in run(folder, _TUNES)
    assert [status(folder, f"rate-{rate}") for rate in (0.05, 0.1)] == ["finished", "finished"]
