"""An error of a loop on a cluster says which variable or folder of the command the worker does not have."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import cast

import pytest
import ray

from raytrain.errors import LoopFailed, UsageError
from raytrain.launch.ray.worker import RayReporter, noting_files_left, unpickle_functions, with_machine_hint


def failed_by(cause: Exception) -> LoopFailed:
    error = LoopFailed("its loop failed", restart_may_help=True)
    error.__cause__ = cause
    return error


def test_a_variable_of_the_command_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOR_THE_LOOP", raising=False)
    error = failed_by(KeyError("FOR_THE_LOOP"))
    explained = with_machine_hint(error, str(tmp_path), frozenset({"FOR_THE_LOOP"}))
    assert str(explained) == (
        "its loop failed; FOR_THE_LOOP is set for the command, and the workers have the variables of `ray start`: set "
        "it there, or pass it by `ray job submit --runtime-env-json`"
    )
    assert isinstance(explained, LoopFailed) and explained.restart_may_help
    assert with_machine_hint(error, str(tmp_path), frozenset()) is error
    monkeypatch.setenv("FOR_THE_LOOP", "1")
    assert with_machine_hint(error, str(tmp_path), frozenset({"FOR_THE_LOOP"})) is error, "it was in a dictionary"


def test_the_folder_of_the_worker_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    error = failed_by(FileNotFoundError(2, "No such file", "teacher.pt"))
    assert f"the loop runs in {tmp_path}" in str(with_machine_hint(error, "/elsewhere", frozenset()))
    assert with_machine_hint(error, str(tmp_path), frozenset()) is error


def test_a_package_that_the_worker_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.2")
    there = "the Python of this worker's machine, 10.0.0.2"
    with pytest.raises(UsageError, match=f"^Your code imports albumentations, which {there}, lacks; install it on all"):
        unpickle_functions(b"calbumentations\nCompose\n.")
    with pytest.raises(UsageError, match=rf"^Your code cannot be imported by {there} \(.*'Gone'.*\); install"):
        unpickle_functions(b"cjson\nGone\n.")
    assert unpickle_functions(pickle.dumps((len, None))) == (len, None)


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    for error in (failed_by(ValueError("x")), failed_by(KeyError(3)), UsageError("no")):
        assert with_machine_hint(error, str(tmp_path), frozenset({"x"})) is error


def test_a_working_folder_that_cannot_be_listed_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "removed"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with noting_files_left(cast(RayReporter, None)):
        pass
    error = failed_by(FileNotFoundError(2, "No such file", "teacher.pt"))
    assert with_machine_hint(error, "/elsewhere", frozenset()) is error
