"""A process keeps its own Ray between its runs, ends it at its end, and no late call to Ray starts another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LATE = """
import ray  # first, as a notebook may, so that it reads its variables before they are set
import psutil

from raytrain.launch.ray.connection import Connection, end_own_ray

@ray.remote
def kind():
    return psutil.Process().parent().cmdline(), dict(ray.get_runtime_context().runtime_env)

with Connection("local") as cluster:
    cluster.connect()
    parent, environment = ray.get(kind.remote())
    print([word.rpartition("/")[2] for word in parent if "fork_" in word], environment)
end_own_ray()
try:
    ray.put("from a thread that is still reading")
except ray.exceptions.RaySystemError:
    print("another Ray" if ray.is_initialized() else "nothing")
"""


@pytest.mark.slow
def test_ray_may_be_imported_first_and_a_call_after_the_connection_ended_starts_no_cluster(tmp_path: Path) -> None:
    """The path of the temporary folder is too long for sockets. Processes are forked, without a runtime environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["TMPDIR"] = str(tmp_path / ("x" * 100))
    os.mkdir(environment["TMPDIR"])
    done = subprocess.run([sys.executable, "-c", LATE], env=environment, capture_output=True, text=True, timeout=300)
    forked = "['fork_server.py'] {}" if sys.platform == "linux" else "[] {}"
    assert (done.returncode, done.stdout.split("\n")) == (0, [forked, "nothing", ""]), done.stderr


INTERRUPTED = """
import sys
from pathlib import Path
import threading
import raytrain
from raytrain.launch.ray.connection import end_own_ray
from tests.helpers.small_runs import config

def give_up(snapshot):
    if snapshot.step:
        raise KeyboardInterrupt

try:
    raytrain.train(config(*sys.argv[1:], address="local", cache="none", epochs=1000), view=give_up)
except KeyboardInterrupt:
    end_own_ray()
    print([each.name for each in threading.enumerate() if not each.name.startswith("storage")])
"""


@pytest.mark.slow
def test_no_thread_outlives_a_run_in_a_local_cluster(images: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", INTERRUPTED, str(images), str(tmp_path)]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.strip()) == (0, "['MainThread']"), done.stderr


TWICE = """
import os
import sys
import ray
import raytrain
from tests.helpers.small_runs import config
from tests.helpers.waiting import wait_for

ROOM = "CPU", "object_store_memory"

def train(name, **options):
    raytrain.train(config(*sys.argv[1:], name=name, epochs=1, cache="memory", **options))
    wait_for(lambda: all(ray.available_resources().get(each) == ray.cluster_resources()[each] for each in ROOM), name)
    return ray.get_runtime_context().gcs_address

first, second = train("first"), train("second")
os.environ["A"] = "changed"
third = train("third")
ray.shutdown()
print(first == second, len({second, third, train("fourth")}))
"""


@pytest.mark.slow
def test_the_runs_of_a_process_leave_one_ray_empty_until_its_variables_change(images: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-c", TWICE, str(images), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["True 3"]), done.stderr  # after its lines
