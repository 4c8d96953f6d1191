"""Threads of workers that wait for one that is not scheduled hardly spin."""

import os
import subprocess
import sys

import pytest

LOCAL = "import raytrain.launch.local.agent, torch"
FORK_SERVER = "from raytrain.launch.ray import fork_server; fork_server.import_all()"
OF_RAY = "import raytrain.launch.ray.worker"


@pytest.mark.not_quick
@pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP there")
@pytest.mark.parametrize(("program", "given"), [(LOCAL, None), (LOCAL, "active"), (FORK_SERVER, None), (OF_RAY, None)])
def test_worker_threads_hardly_spin_unless_the_user_says_otherwise(program: str, given: str | None) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    variables |= {"OMP_DISPLAY_ENV": "verbose"} | ({"OMP_WAIT_POLICY": given} if given else {})
    with subprocess.Popen([sys.executable, "-c", program], env=variables, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        spins = next((line.split("'")[1] for line in process.stderr if "GOMP_SPINCOUNT" in line), None)
        process.kill()  # what it would import after torch's OpenMP takes seconds
    assert spins == ("30000000000" if given == "active" else "2000")
