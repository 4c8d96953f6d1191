"""A loop of the user's reaches Ray's workers with what it imports from beside its file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.config.user_code import load_function
from raytrain.launch.ray.worker import pickle_functions

LOOP = """
import travelling_helper
from travelling_losses import part

def train(run):
    return travelling_helper.add(run)
"""
HELPER = "from travelling_losses.part import ONE\n\ndef add(number):\n    return number + ONE\n"
UNPICKLE = "import sys, cloudpickle; loop, _ = cloudpickle.loads(sys.stdin.buffer.read()); print(loop(41))"


@pytest.mark.not_quick
def test_a_loop_works_in_a_process_that_has_none_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "travelling_losses").mkdir()
    (tmp_path / "travelling_losses" / "__init__.py").touch()
    (tmp_path / "travelling_losses" / "part.py").write_text("ONE = 1\n")
    (tmp_path / "travelling_helper.py").write_text(HELPER)
    (tmp_path / "travelling_loop.py").write_text(LOOP)
    spec: Any = SimpleNamespace(loop=load_function("--loop", f"{tmp_path}/travelling_loop.py:train"), transforms=None)
    pickled = pickle_functions(spec, with_imports=True)
    done = subprocess.run([sys.executable, "-c", UNPICKLE], input=pickled, capture_output=True, cwd="/", check=True)
    assert done.stdout == b"42\n"
