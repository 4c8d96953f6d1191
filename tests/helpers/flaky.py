"""A pytest plugin that repeats what failed: a test that then passes, alone in a new process, is reported as flaky.

``pytest -p tests.helpers.flaky``. Tests are repeated one after the other when all others have ended, in each process of
pytest-xdist. A Ray that died in the meantime can't hide a flaky test, since each one is repeated in a process that
starts everything anew. Flaky tests don't fail the run; their names and first failures are printed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from _pytest.terminal import TerminalReporter

MOST_REPEATED = 10  # If more tests fail, they are broken, not flaky.


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # a process of pytest-xdist; the one that started it repeats
        return
    stats = _stats(session.config)
    failed = list(dict.fromkeys(report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])))
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED or len(failed) > MOST_REPEATED:
        return
    flaky = [nodeid for nodeid in failed if _passes_alone(nodeid, session.config)]
    for kind in ("failed", "error"):
        reports = stats.pop(kind, [])
        stats.setdefault("flaky", []).extend(report for report in reports if report.nodeid in flaky)
        stats[kind] = [report for report in reports if report.nodeid not in flaky]
    if flaky == failed:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    reports = terminalreporter.stats.get("flaky", [])
    if not reports:
        return
    terminalreporter.section("flaky: failed, then passed alone")
    for report in reports:
        terminalreporter.line(f"{report.nodeid}\n{report.longreprtext}\n")
    for nodeid in dict.fromkeys(report.nodeid for report in reports):
        terminalreporter.line(f"FLAKY {nodeid}")


def _stats(config: pytest.Config) -> dict[str, list[pytest.TestReport]]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    assert isinstance(reporter, TerminalReporter)
    return reporter.stats


def _passes_alone(nodeid: str, config: pytest.Config) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", nodeid]
    return subprocess.run(command, cwd=config.rootpath, stdout=subprocess.DEVNULL, check=False).returncode == 0
