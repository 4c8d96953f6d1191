"""A loop of the user's reaches Ray's workers with what it imports from beside its file."""

from __future__ import annotations

import importlib
import inspect
import linecache
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.config import TrainConfig
from raytrain.config.named_functions import load_function
from raytrain.config.pickled_code import check_loop
from raytrain.errors import UsageError
from raytrain.launch.ray.worker import pickle_functions
from raytrain.launch.train import train
from raytrain.training.loop_checks.numbered_batches import number_that_decides
from raytrain.training.loop_checks.reached_code import remember_source_lines, source_lines

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


@pytest.mark.not_quick
def test_a_loop_in_a_package_travels_with_what_is_beside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "travelling_package").mkdir()
    code = "import travelling_sibling\n\ndef train(run):\n    return run + travelling_sibling.ONE\n"
    (tmp_path / "travelling_package" / "__init__.py").write_text(code)
    (tmp_path / "travelling_sibling.py").write_text("ONE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    spec: Any = SimpleNamespace(loop=importlib.import_module("travelling_package").train, transforms=None)
    pickled = pickle_functions(spec, with_imports=True)
    done = subprocess.run([sys.executable, "-c", UNPICKLE], input=pickled, capture_output=True, cwd="/", check=True)
    assert done.stdout == b"42\n"


LOCK = threading.Lock()


def with_a_lock(run: Any) -> None:
    LOCK.acquire()


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        ("my_loop.py:train", r"The loop is of type str; give a function .*TrainConfig\(loop=\"file.py:function\"\)"),
        (dict, "The loop is the class dict; give a function of one argument, the run"),
    ],
)
def test_a_loop_that_is_no_function_is_refused_before_anything_starts(loop: Any, sentence: str, tmp_path: Path) -> None:
    config = TrainConfig(data="nowhere", storage=str(tmp_path), batch_size=8)
    with pytest.raises(UsageError, match=sentence):
        train(config, loop=loop)
    assert not list(tmp_path.iterdir())


def test_a_loop_that_cannot_be_sent_is_refused_also_if_a_variable_of_it_has_no_value_yet() -> None:
    window = threading.Lock()

    def incomplete(run: Any) -> Any:
        return window, later

    with pytest.raises(UsageError, match="because of what is used there, which is of this process alone"):
        check_loop(incomplete)
    later = None


def test_a_loop_that_uses_what_stays_in_its_process_is_refused_by_its_name(tmp_path: Path) -> None:
    window = threading.Lock()

    def closes_over_it(run: Any) -> None:
        window.acquire()

    config = TrainConfig(data="nowhere", storage=str(tmp_path), batch_size=8)
    with pytest.raises(UsageError, match=r"because of `window`, .* \(TypeError: cannot pickle '_thread.lock' object\)"):
        train(config, loop=closes_over_it)
    assert not list(tmp_path.iterdir())
    spec: Any = SimpleNamespace(loop=with_a_lock, transforms=None)
    with pytest.raises(UsageError, match="because of `LOCK`"):
        pickle_functions(spec, with_imports=True)
    spec = SimpleNamespace(loop=None, transforms=with_a_lock)
    with pytest.raises(UsageError, match="--transforms cannot be sent to the workers, because of `LOCK`"):
        pickle_functions(spec, with_imports=True)


CELL = """\
SECRET = "hunter22"

def train(run):
    for number, batch in enumerate(run):
        if number % 2:
            loss = sum(
                batch,
            )
        else:
            loss = 0  # as above
    return loss
"""


def test_the_lines_of_a_loop_can_be_parsed_where_its_file_is_missing(tmp_path: Path) -> None:
    """As on another machine: a bracket or an else, in a line of its own, has no code there."""
    (tmp_path / "cell.py").write_text(CELL)
    loop = load_function("--loop", f"{tmp_path}/cell.py:train")
    sources = source_lines(loop)
    (tmp_path / "cell.py").unlink()
    linecache.clearcache()
    remember_source_lines(sources)
    assert inspect.getsource(loop) == CELL.partition("\n\n")[2]
    assert "hunter22" not in "".join(linecache.getlines(loop.__code__.co_filename))


def test_a_text_that_is_not_whole_ends_no_search(tmp_path: Path) -> None:
    (tmp_path / "partial.py").write_text(CELL)
    loop = load_function("--loop", f"{tmp_path}/partial.py:train")
    file, lines = loop.__code__.co_filename, CELL.splitlines(keepends=True)
    (tmp_path / "partial.py").unlink()
    linecache.cache[file] = 1, None, [*lines[:7], "\n", "\n", *lines[9:]], file  # without the bracket and the else
    frame: Any = SimpleNamespace(f_code=loop.__code__, f_lineno=4)
    assert number_that_decides(frame) is None
