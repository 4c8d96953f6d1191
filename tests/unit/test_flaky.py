"""The plugin that repeats failed tests: what it reports of a flaky, a broken and a passing test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.not_quick

TESTS = """
from pathlib import Path
import pytest

def test_passes(): pass

def test_is_flaky():
    seen = Path("seen")
    first = not seen.exists()
    seen.touch()
    assert not first

@pytest.fixture
def breaks_once():
    seen = Path("seen_by_fixture")
    first = not seen.exists()
    seen.touch()
    assert not first

def test_with_a_flaky_fixture(breaks_once): pass

@pytest.mark.skipif({all_pass}, reason="not now")
def test_is_broken(): assert False
"""


@pytest.mark.parametrize(("all_pass", "processes"), [(True, "0"), (False, "0"), (True, "2")])
def test_a_test_that_passes_alone_does_not_fail_the_run_and_is_named(
    tmp_path: Path, all_pass: bool, processes: str
) -> None:
    (tmp_path / "test_some.py").write_text(TESTS.format(all_pass=all_pass))
    command = [sys.executable, "-m", "pytest", "-p", "tests.helpers.flaky", "-n", processes]
    command += ["--rootdir", ".", "test_some.py"]
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
    assert (ended.returncode == 0) == all_pass
    named = sorted(line for line in ended.stdout.splitlines() if line.startswith("FLAKY"))
    assert named == ["FLAKY test_some.py::test_is_flaky", "FLAKY test_some.py::test_with_a_flaky_fixture"]
    assert ("FAILED test_some.py::test_is_broken" in ended.stdout) == (not all_pass)
    closing = ended.stdout.splitlines()[-1]
    assert "2 flaky" in closing
    assert ("1 passed" if all_pass else "1 failed, 1 passed") in closing
