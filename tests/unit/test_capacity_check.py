"""A run whose workers cannot be scheduled is reported, but not a restarting run or one next to a waiting job."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain.errors import UsageError
from raytrain.launch.placement import Placement
from raytrain.launch.ray import cluster_watch as capacity_check
from raytrain.monitor.events import ReadersWait

OURS, NEIGHBOUR = "0a000000", "0b000000"


class Immediate:
    """Asks at once and waits for the answer, which is the next one's in a thread."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, argument: Any) -> Any:
        return self._function(argument)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """An empty fake of Ray's placement group table, with no waiting time between two checks."""
    groups: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(capacity_check, "Background", Immediate)
    monkeypatch.setattr(capacity_check, "head_answers", lambda timeout_s: True)
    monkeypatch.setattr(capacity_check, "PLACED_WITHIN_S", 0.0)
    monkeypatch.setattr(capacity_check, "POLL_EVERY_S", 0.0)
    monkeypatch.setattr("ray.util.placement_group_table", lambda: groups)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: OURS))
    monkeypatch.setattr("ray.available_resources", lambda: {"CPU": 0.5})
    return groups


def wanted() -> capacity_check.CapacityCheck:
    return capacity_check.CapacityCheck(Placement(2, 2, "cpu", cpus=1.0, data_cpus=0.5, task_cpus=0.25, threads=1))


def test_workers_that_cannot_be_scheduled_are_reported(table: dict[str, dict[str, str]]) -> None:
    looked = wanted()
    table["1f" + OURS] = {"state": "PENDING"}
    looked.check()
    with pytest.raises(UsageError, match=r"no room for 2 workers of 1 CPU each: the cluster has 0.5 CPUs free"):
        looked.check()


def check_at(times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check at each of these times, in seconds, workers that may wait for 40 s."""
    checked = wanted()
    monkeypatch.setattr(capacity_check, "PLACED_WITHIN_S", 40.0)
    for time_s in times:
        monkeypatch.setattr(capacity_check.time, "monotonic", partial(float, time_s))
        checked.check()


def test_workers_that_a_busy_machine_starts_late_may_wait_as_long_and_one_line_says_what_for(
    table: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table["1f" + OURS] = {"state": "PENDING"}
    check_at([100, 105], monkeypatch)
    assert not caplog.messages
    check_at([100, 105, 112, 125], monkeypatch)
    [line] = caplog.messages
    assert "no room for 2 workers of 1 CPU each: the cluster has 0.5 CPUs free" in line
    assert line.endswith("the run begins if there is room within 28 s, and ends otherwise.")
    with pytest.raises(UsageError, match="no room for 2 workers"):
        check_at([100, 105, 125, 145], monkeypatch)


def test_the_time_for_which_a_head_was_silent_does_not_count(
    table: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    table["1f" + OURS] = {"state": "PENDING"}
    check_at([100, 105, 400, 405], monkeypatch)


def test_gpus_of_a_type_are_named(table: dict[str, dict[str, str]]) -> None:
    looked = capacity_check.CapacityCheck(Placement(2, 2, "cuda", 1.0, 0.5, 0.25, 1, accelerator_type="L4"))
    table["1f" + OURS] = {"state": "PENDING"}
    looked.check()
    with pytest.raises(UsageError, match=r"2 workers of 1 CPU and 1 L4 GPU each: the cluster has 0.5 CPUs and 0 GPUs"):
        looked.check()


def test_a_restarted_worker_group_may_wait_as_long_as_a_new_one(table: dict[str, dict[str, str]]) -> None:
    looked = wanted()
    table["1f" + OURS] = {"state": "PENDING"}
    looked.check()
    table["1f" + OURS] = {"state": "REMOVED"}
    table["2f" + OURS] = {"state": "PENDING"}
    looked.check()
    table["2f" + OURS] = {"state": "CREATED"}
    looked.check()


def test_a_run_that_has_trained_waits_for_room_with_a_line_and_can_be_stopped(
    table: dict[str, dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    looked = wanted()
    for name in ("1f", "2f"):  # a second time, after it had room meanwhile
        table[name + OURS] = {"state": "PENDING"}
        for _ in range(3):
            looked.check(is_starting=False)
        if name == "1f":
            table[name + OURS] = {"state": "CREATED"}
            looked.check(is_starting=False, is_stopping=True)
    assert [record.getMessage() for record in caplog.records] == [
        "There is no room for 2 workers of 1 CPU each: the cluster has 0.5 CPUs free, and other jobs use the rest; "
        "the run goes on when there is room."
    ] * 2
    with pytest.raises(KeyboardInterrupt):
        looked.check(is_starting=False, is_stopping=True)


def test_waiting_placement_groups_of_other_jobs_are_ignored(table: dict[str, dict[str, str]]) -> None:
    looked = wanted()
    table["1f" + NEIGHBOUR] = {"state": "PENDING"}
    looked.check()
    looked.check()


def test_data_tasks_that_find_no_room_are_reported_once_until_the_run_goes_on(
    table: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, events = {0.25: 3}, []
    monkeypatch.setattr(capacity_check, "num_waiting_tasks", lambda cpus, timeout_s: waiting.get(cpus, 0))
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr("ray.available_resources", lambda: {"CPU": 0.125})
    readers = capacity_check.ReadersCheck((0.5, 0.25), events.append)

    def look(step: int) -> None:
        for _ in range(2):
            readers.check(step)

    for _ in range(2):
        look(7)
    assert events == [ReadersWait(0.25, 0.125, 2.0)]
    readers.check(8)
    look(8)
    assert len(events) == 2
    waiting.clear()
    look(8)
    assert len(events) == 2


def test_a_head_that_does_not_answer_holds_up_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, is_over = threading.Event(), threading.Event()

    def head_answers(timeout_s: float) -> bool:
        asked.set()
        return not is_over.wait()

    monkeypatch.setattr(capacity_check, "POLL_EVERY_S", 0.0)
    monkeypatch.setattr(capacity_check, "head_answers", head_answers)
    questions_without_limit: list[str] = []
    monkeypatch.setattr("ray.util.placement_group_table", lambda: questions_without_limit.append("groups"))
    looked = wanted()
    looked.check()
    assert asked.wait(60.0)
    looked.check()
    is_over.set()
    looked.close()
    assert not questions_without_limit
