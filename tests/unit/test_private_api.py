"""The newest tested Ray has every private API that raytrain uses; another Ray does without those that it lacks."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import re
import subprocess
from pathlib import Path

import pytest
import ray

from raytrain import UsageError
from raytrain.launch.placement import Placement
from raytrain.launch.ray import private_api
from raytrain.launch.ray.private_api import (
    IMPROVEMENTS,
    NEWEST_TESTED,
    OLDEST,
    Improvement,
    check_version,
    minor_version,
    missing,
    variables_set,
    version_error,
)

PACKAGE = Path(__file__).parents[2] / "raytrain"
pytestmark = pytest.mark.not_quick  # importing torch starts a process
NAMES = [name for improvement in IMPROVEMENTS for name in improvement.names]


@pytest.mark.skipif(minor_version(ray.__version__) != NEWEST_TESTED, reason="another Ray may lack some")
@pytest.mark.parametrize("name", NAMES)
def test_the_newest_tested_ray_has_every_private_api_that_raytrain_uses(name: str) -> None:
    assert Improvement("nothing works", (name,)).find() is not None


def test_this_ray_lacks_what_the_docs_say() -> None:
    lacking = {(2, 53): 3, (2, 54): 2, (2, 55): 1, (2, 56): 1, (2, 57): 1}  # the table in docs/cluster.md
    assert len(missing()) == lacking.get(minor_version(ray.__version__), 0)


def test_a_missing_private_api_is_said_in_one_sentence_with_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Improvement("workers stay", ("os:getcwd", "ray.no_such_module:Callback", "ray:no_such_thing.more"))
    monkeypatch.setattr(private_api, "IMPROVEMENTS", (Improvement("all is well", ("os:getcwd",)), some))
    assert some.find() is None
    wanted = f"Ray {ray.__version__} lacks ray.no_such_module.Callback and ray.no_such_thing.more, so workers stay."
    assert missing() == [wanted]
    assert Improvement("all is well", ("os:getcwd",)).find() == (os.getcwd,)


@pytest.mark.parametrize(
    ("version", "warnings"),
    [(OLDEST, 0), (NEWEST_TESTED, 0), ((NEWEST_TESTED[0], NEWEST_TESTED[1] + 1), 1), ((NEWEST_TESTED[0] + 1, 0), 1)],
)
def test_a_ray_that_is_newer_than_the_newest_tested_one_warns_once(
    version: tuple[int, int], warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray, "__version__", f"{version[0]}.{version[1]}.0")
    check_version.cache_clear()
    with caplog.at_level(logging.WARNING, "raytrain"):
        check_version()
        check_version()
    check_version.cache_clear()
    assert len([record for record in caplog.records if "is newer than" in record.getMessage()]) == warnings


def test_a_ray_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.50.1")
    check_version.cache_clear()
    with pytest.raises(UsageError, match=r"Ray 2\.50\.1 is too old; raytrain needs 2\.53 or newer"):
        check_version()


def test_a_cluster_of_other_versions_is_told_with_both() -> None:
    from ray._private.utils import check_version_info

    theirs = {"ray_version": "2.53.0", "python_version": "3.10.1"}
    with pytest.raises(RuntimeError) as raised:
        check_version_info(theirs, "192.0.2.1", True)
    error = version_error("192.0.2.1:6379", str(raised.value))
    assert str(error).startswith(
        f"The cluster at 192.0.2.1:6379 runs Ray 2.53.0 and Python 3.10.1, and this process Ray {ray.__version__} and "
    )
    assert version_error("192.0.2.1:6379", "Could not connect") is None


def test_an_elastic_run_is_refused_if_this_ray_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train import ScalingConfig

    from raytrain.launch.ray.trainer import check_elastic

    monkeypatch.delattr(ScalingConfig, "elastic_resize_monitor_interval_s", raising=False)
    elastic = Placement(4, 1, "cpu", cpus=1, data_cpus=1, task_cpus=1, threads=1)
    wanted = r"--workers is 1\.\.4, and Ray [\d.]+ cannot change the number of workers .* or use Ray 2\.55 or newer"
    with pytest.raises(UsageError, match=wanted):
        check_elastic(elastic)
    check_elastic(dataclasses.replace(elastic, min_workers=4))


def test_variables_that_ray_removes_meanwhile_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_BEFORE", "1")
    monkeypatch.delenv("RAY_NEW", raising=False)
    with variables_set({"RAY_BEFORE": "2", "RAY_NEW": "3"}):
        del os.environ["RAY_NEW"]
    assert os.environ["RAY_BEFORE"] == "1" and "RAY_NEW" not in os.environ


def test_rays_messages_to_a_driver_are_logged_and_not_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    worker = importlib.import_module("ray._private.worker")
    message = {"lines": ["A worker died."], "pid": "raylet", "is_err": False}
    with caplog.at_level(logging.INFO, "raytrain.ray"), private_api.messages_in_log():
        worker.print_to_stdstream(message, ignore_prefix=False)
    assert caplog.messages == ["A worker died."] and capsys.readouterr() == ("", "")
    worker.print_to_stdstream(message, ignore_prefix=False)  # by a Ray that the user joins afterwards
    assert "A worker died." in capsys.readouterr().out


def test_private_modules_of_ray_are_named_in_one_file() -> None:
    found = subprocess.run(
        ["grep", "-rlE", r"ray\._private|ray\._raylet|ray\.\w+(\.\w+)*\._internal", str(PACKAGE), "--include=*.py"],
        capture_output=True,
        text=True,
    )
    assert [Path(path).relative_to(PACKAGE).as_posix() for path in found.stdout.split()] == [
        "launch/ray/private_api.py"
    ]
    assert re.search(r"ray\._private", (PACKAGE / "launch/ray/private_api.py").read_text())
