"""Threads of workers that wait for one that is not scheduled do not spin."""

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
def test_worker_threads_wait_passively_unless_the_user_says_otherwise(program: str, given: str | None) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    variables |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": given} if given else {})
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert f"OMP_WAIT_POLICY = '{(given or 'passive').upper()}'" in done.stderr
