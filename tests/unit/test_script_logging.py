"""The settings of a script's loggers travel to its workers, and what these log for its files comes back."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from raytrain.training.script_logging import LoggedRecord, log_as, logging_here, write_record


@contextmanager
def new_loggers() -> Iterator[None]:
    """Take the loggers of this process away: pytest's handlers, and the names that others have used.

    It is no fixture, since pytest adds its handlers after these.
    """
    root, manager = logging.getLogger(), logging.Logger.manager
    handlers, level, named = root.handlers, root.level, manager.loggerDict
    root.handlers, manager.loggerDict = [], {}
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers, manager.loggerDict = handlers, named
        root.setLevel(level)


def travel(capsys: pytest.CaptureFixture[str]) -> list[LoggedRecord]:
    """Take the settings of this process, forget them, and set up the loggers of a worker by them.

    Return the list of the records that the worker sends from then on.
    """
    settings = pickle.loads(pickle.dumps(logging_here()))
    sent: list[LoggedRecord] = []
    logging.getLogger().handlers = []
    logging.getLogger().setLevel(logging.WARNING)
    logging.Logger.manager.loggerDict = {}
    capsys.readouterr()
    log_as(settings, 1, sent.append)
    return sent


class Coloured(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(record.msg)


@new_loggers()
def test_level_format_and_stream_travel_and_libraries_stay_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    logging.basicConfig(level=logging.INFO, format="{levelname} {name} {message}", style="{", stream=sys.stdout)
    travel(capsys)
    for name in ("mine", "botocore.credentials", "ray", "torch.x", "raytrain"):
        logging.getLogger(name).info("found")
        logging.getLogger(name).warning("beware")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("INFO")] == ["INFO mine found"]
    assert len(lines) == 6


@new_loggers()
def test_a_logger_of_its_own_has_its_handlers_and_those_that_write_elsewhere_stay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine, kept = logging.getLogger("mine"), io.StringIO()
    mine.setLevel(logging.DEBUG)
    mine.propagate = False
    printing = logging.StreamHandler()
    printing.setLevel(logging.INFO)
    printing.setFormatter(Coloured())
    for handler in (printing, logging.FileHandler(tmp_path / "log"), logging.StreamHandler(kept)):
        mine.addHandler(handler)
    logging.getLogger("mine.part").setLevel(logging.ERROR)
    travel(capsys)
    mine = logging.getLogger("mine")
    mine.debug("not shown")
    mine.info("shown")
    logging.getLogger("mine.part").warning("not shown")
    assert capsys.readouterr() == ("", "INFO:mine:shown\n")
    assert (tmp_path / "log").read_text() == kept.getvalue() == ""
    assert (mine.level, mine.propagate) == (logging.DEBUG, False)


@new_loggers()
def test_without_settings_it_is_as_in_a_plain_script_also_on_ray(capsys: pytest.CaptureFixture[str]) -> None:
    assert logging_here() == {}

    def configure_as_ray_train() -> None:
        handler = type("PlainRayHandler", (logging.StreamHandler,), {"__module__": "ray._private.log"})()
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.INFO)

    configure_as_ray_train()
    log_as({}, 0, print)
    logging.getLogger("mine").info("not shown")
    logging.getLogger("mine").warning("shown")
    assert capsys.readouterr().err == "shown\n"
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")  # in the loop
    logging.getLogger("mine").info("shown")
    assert capsys.readouterr().err == "INFO shown\n"


@new_loggers()
def test_a_file_that_has_set_up_a_logger_in_the_worker_is_not_overruled(capsys: pytest.CaptureFixture[Any]) -> None:
    logging.basicConfig(level=logging.INFO, format="script %(message)s")
    settings = logging_here()
    logging.basicConfig(level=logging.WARNING, format="file %(message)s", force=True)
    log_as(settings, 0, print)
    logging.getLogger("mine").info("not shown")
    logging.getLogger("mine").warning("shown")
    assert capsys.readouterr().err == "file shown\n"


@new_loggers()
def test_what_a_worker_logs_for_a_file_is_written_by_the_driver(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "log"
    logging.basicConfig(filename=file, level=logging.INFO, format="%(processName)s %(levelname)s %(name)s: %(message)s")
    of_driver = logging.getLogger().handlers
    of_driver[0].setLevel(logging.INFO)
    sent = travel(capsys)

    mine = logging.getLogger("mine")
    mine.debug("not wanted")
    mine.info("step %d of %s", 1, object, extra={"of": sys})
    logging.getLogger("botocore").info("not wanted")
    try:
        raise ValueError("a mistake")
    except ValueError:
        mine.exception("failed")
    assert capsys.readouterr() == ("", "") and file.read_text() == ""

    logging.getLogger().handlers = of_driver
    for record in pickle.loads(pickle.dumps(sent)):
        write_record(record)
    lines = file.read_text().splitlines()
    assert lines[:3] == [
        "worker1 INFO mine: step 1 of <class 'object'>",
        "worker1 ERROR mine: failed",
        "Traceback (most recent call last):",
    ]
    assert lines[-1] == "ValueError: a mistake"


@pytest.mark.not_quick
@new_loggers()
def test_a_process_that_a_loop_has_forked_prints_what_it_logs_for_a_file(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It shares the connection of the worker to the driver, and must not use it."""
    logging.basicConfig(filename=tmp_path / "log", level=logging.INFO)
    sent = travel(capfd)
    if (child := os.fork()) == 0:
        logging.info("of a child")
        sys.stderr.flush()
        os._exit(0)
    os.waitpid(child, 0)
    assert (capfd.readouterr().err, sent) == ("of a child\n", [])
