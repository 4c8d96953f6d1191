"""How pytest shares the tests out: whole files to each process, those on a cluster to one; some runs stay in one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from raytrain.loader.machine import cores

pytestmark = pytest.mark.not_quick

CONFTEST = """
from tests.helpers.file_by_file import FileByFile, num_processes

def pytest_xdist_auto_num_workers(config): return num_processes(config)
def pytest_xdist_make_scheduler(config, log): return FileByFile(config, log)
def pytest_collection_modifyitems(items): items.sort(key=lambda item: "on_ray" not in item.name)
"""
SETTINGS = """
[pytest]
addopts = -m 'not slow' -n auto
markers =
    slow
"""
TESTS = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_plain(number): pass

@pytest.mark.parametrize("number", range(4))
def test_on_ray(number): pass

@pytest.mark.slow
def test_that_is_slow(): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    return tmp_path


def run(folder: Path, *words: str) -> str:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": ""}
    command = [sys.executable, "-m", "pytest", "-v", *words]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_each_process_gets_whole_files_and_one_has_all_on_a_cluster_first(folder: Path) -> None:
    kinds_of_process, processes_of_file = defaultdict[str, list[str]](list), defaultdict[tuple[str, str], set[str]](set)
    for process, file, kind in re.findall(r"\[(gw\d)\] .*PASSED (\w+)\.py::(\w+)", run(folder)):
        kinds_of_process[process].append(kind)
        processes_of_file[file, kind].add(process)
    assert len(kinds_of_process) == min(max(3, cores() // 2), 4) and sum(map(len, kinds_of_process.values())) == 4 * 8
    assert all(kinds == sorted(kinds) for kinds in kinds_of_process.values()), "on_ray before plain"
    assert all(len(processes) == 1 for processes in processes_of_file.values())
    assert sum("test_on_ray" in kinds for kinds in kinds_of_process.values()) == 1


@pytest.mark.parametrize(
    "words", [("test_a.py",), ("test_a.py::test_plain", "test_a.py::test_on_ray"), ("-m", "slow"), ("-s",)]
)
def test_one_file_slow_tests_and_tests_that_print_run_in_pytests_own_process(
    words: tuple[str, ...], folder: Path
) -> None:
    output = run(folder, *words)
    assert "PASSED" in output and "[gw0]" not in output
