"""The script for Slurm starts Ray on all nodes, passes a stop on, and ends as the run does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.not_quick

SCRIPT = Path(__file__).parents[2] / "cluster" / "slurm.sbatch"
COMMANDS = {
    "scontrol": "printf 'node1\\nnode2\\n'",
    "srun": 'echo "srun $*" >>"$LOG"; [[ "$*" == *health-check* ]] || exec cat <"$FOREVER"',
    "ray": ":",
    "raytrain": f'echo "raytrain $RAY_ADDRESS $*" >>"$LOG"; exec {sys.executable} -c "$RUN"',
}
RUN = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
open(os.environ["STARTED"], "w").close()
signal.sigwait({signal.SIGTERM})
sys.exit(3)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Slurm's and Ray's commands, replaced, on two nodes; the run waits for a stop, with which it fails."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    for pipe in ("forever", "started"):
        os.mkfifo(tmp_path / pipe)
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        **{name.upper(): str(tmp_path / name) for name in ("log", "forever", "started")},
        "RUN": RUN,
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }


def test_a_stop_reaches_the_run_whose_exit_code_the_job_has(tmp_path: Path, environment: dict[str, str]) -> None:
    script = shutil.copy(SCRIPT, tmp_path)
    words = ["train", "cifar10", "--name", "my first"]
    job = subprocess.Popen(["bash", script, *words], cwd=tmp_path, env=environment, start_new_session=True)
    try:
        (tmp_path / "started").read_text()
        job.send_signal(signal.SIGTERM)
        assert job.wait(timeout=60) == 3
    finally:
        os.killpg(job.pid, signal.SIGKILL)  # the nodes, which Slurm would end
    log = (tmp_path / "log").read_text()
    assert "--nodelist=node1 ray start --head" in log and "--exclude=node1 ray start --address=node1:20007" in log
    assert "raytrain node1:20007 train cifar10 --name my first --workers 2 --wait-for-machines-s 600" in log


@pytest.mark.parametrize(("given", "num_gpus", "workers"), [("4", "4", "8"), ("a100:4", "4", "8"), ("0", "0", "2")])
def test_gpus_may_be_asked_for_by_their_type(
    given: str, num_gpus: str, workers: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    environment |= {"SLURM_GPUS_PER_TASK": given, "RUN": "import sys; sys.exit(3)"}
    job = subprocess.Popen(
        ["bash", shutil.copy(SCRIPT, tmp_path), "train"], cwd=tmp_path, env=environment, start_new_session=True
    )
    try:
        assert job.wait(timeout=60) == 3, "the exit code of a run that fails by itself"
    finally:
        os.killpg(job.pid, signal.SIGKILL)
    log = (tmp_path / "log").read_text()
    assert f" --num-gpus={num_gpus} " in log and f"train --workers {workers} " in log


def test_a_head_that_cannot_start_ends_the_job(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "commands" / "srun").write_text(
        '#!/bin/bash\n[[ "$*" == *ray?start* ]] && echo "port in use"\nexit 1\n'
    )
    script = shutil.copy(SCRIPT, tmp_path)
    done = subprocess.run(
        ["bash", script, "train"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1
    assert "port in use" in done.stdout and "Ray could not start on node1" in done.stderr
