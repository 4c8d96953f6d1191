"""Ray's processes start without the grammar that jsonschema builds if JupyterLab is installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from raytrain.launch.ray.own_cluster import lean, lean_imports

GRAMMAR = "rfc3987_syntax"


@pytest.mark.not_quick
def test_a_process_of_the_cluster_imports_ray_without_the_grammar_and_finds_the_users_modules(tmp_path) -> None:
    (tmp_path / "users_module.py").touch()
    code = f"import ray, sys, users_module; assert '{GRAMMAR}.syntax_helpers' not in sys.modules"
    environment = lean(os.environ | {"PYTHONPATH": str(tmp_path)})
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_without_a_python_path_only_the_stand_ins_are_added() -> None:
    (path,) = lean({})["PYTHONPATH"].split(os.pathsep)  # an empty entry would be the current folder
    assert os.listdir(path) == [f"{GRAMMAR}.py"] or "__pycache__" in os.listdir(path)


def test_this_process_has_the_package_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(GRAMMAR)
    monkeypatch.delitem(sys.modules, GRAMMAR)
    with lean_imports(), pytest.raises(ImportError):
        __import__(GRAMMAR)
    __import__(GRAMMAR)


def test_a_process_that_has_the_package_keeps_it() -> None:
    package = pytest.importorskip(GRAMMAR)
    with lean_imports():
        assert sys.modules[GRAMMAR] is package
    assert sys.modules[GRAMMAR] is package
