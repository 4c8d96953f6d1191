"""The quick tests, ``pytest -m quick``: those in ``tests/unit`` that start no process, which is enforced.

A test that does, or that takes seconds, is marked ``not_quick``, unless one of its fixtures says so.
"""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

STARTING_FIXTURES = {"azurite_server", "backend", "ray_cluster", "s3_server", "undisturbed"}
STARTS = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}

_forbidden = False


def is_quick(item: pytest.Item) -> bool:
    excluded = item.get_closest_marker("slow") or item.get_closest_marker("not_quick")
    return (
        "unit" in item.path.parts and not excluded and STARTING_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))
    )


@contextmanager
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse to start a process, however it is started."""
    global _forbidden
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", lambda self: _refuse())
    _forbidden = True
    try:
        yield
    finally:
        _forbidden = False


def _refuse() -> None:
    raise AssertionError("a quick test starts no process; mark it with not_quick")


def _audit(event: str, arguments: tuple[object, ...]) -> None:
    # The first import of torch asks ldconfig for a library; in the whole suite another module has imported it before.
    if _forbidden and event in STARTS and not str(arguments[0]).endswith("ldconfig"):
        _refuse()


sys.addaudithook(_audit)
