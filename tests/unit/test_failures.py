"""Finding the one-line root cause in Ray's long exception chains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, UserCodeException, WorkerCrashedError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import WorkerGroupError

from raytrain import TrainConfig
from raytrain.errors import CoordinatorLost, StorageError
from raytrain.launch.ray.coordinator import needs_coordinator
from raytrain.launch.ray.ray_errors import root_cause

SENTENCE = "S3 does not know the access key …1db1; check AWS_ACCESS_KEY_ID."
WITH_ITS_CAUSE = f"""obstore.exceptions.GenericError: Generic S3 error {{
    source: None,
}}

The above exception was the direct cause of the following exception:

raytrain.errors.StorageError: {SENTENCE}"""
OF_A_TASK = """ray::MapBatches(read_block)() (pid=18071, ip=192.0.2.2)
  File "ingest.py", line 5, in read_block
{}

The above exception was the direct cause of the following exception:

ray::MapBatches(read_block)() (pid=18071, ip=192.0.2.2)
ray.exceptions.UserCodeException: UDF failed to process a data block.
Failed to apply UDF transform after 1/1 attempts (total backoff 0.0s).
To change retry attempts, backoff, or which errors are retried, configure `ray.data.DataContext.get_current()`."""


CAUSES = "Some common causes include: (1) the process was killed by the OOM killer due to high memory usage"
DEAD = "process has died: it crashed, or something killed it, such as the system for lack of memory"
FULL = "Ray has ended its process because the machine's memory was nearly full"


def wrapped(text: str, cause: Exception) -> Exception:
    return RayTaskError("f", text, cause).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (StorageError(SENTENCE), SENTENCE),
        (wrapped(f"Traceback\nraytrain.errors.StorageError: {SENTENCE}", StorageError(SENTENCE)), SENTENCE),
        (
            wrapped(OF_A_TASK.format(f"raytrain.errors.StorageError: {SENTENCE}"), UserCodeException("UDF failed")),
            SENTENCE.rstrip("."),
        ),
        (wrapped(OF_A_TASK.format(WITH_ITS_CAUSE), UserCodeException("UDF failed")), SENTENCE.rstrip(".")),
        (
            wrapped(OF_A_TASK.format("ValueError: 3 channels"), UserCodeException("UDF failed")),
            "ValueError: 3 channels",
        ),
        (wrapped("Traceback\n  line\nValueError: 3 channels", ValueError("3 channels")), "ValueError: 3 channels"),
        (RuntimeError(), "RuntimeError"),
        (RayActorError("1f", f"The actor is dead. Worker exit type: SYSTEM_ERROR {CAUSES}"), f"its {DEAD}"),
        (WorkerHealthCheckFailedError("A worker is ill", RayActorError()), f"its {DEAD}"),
        (wrapped("Traceback", WorkerCrashedError()), f"its {DEAD}"),
        (RayActorError("1f", "The actor died because its node has died. Node Id: 1f"), "its machine is gone"),
        (OutOfMemoryError("Task was killed due to the node running low on memory.\nMore"), FULL),
    ],
)
def test_the_root_cause_is_one_line(error: Exception, reason: str) -> None:
    assert root_cause(error) == reason


LOST = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [192.0.2.2]:35748")
DIED = WorkerHealthCheckFailedError("A worker is ill", RayActorError())


@pytest.mark.parametrize(
    ("failures", "reason"),
    [
        ({0: LOST, 1: DIED, 2: LOST}, f"its {DEAD}"),
        ({1: LOST, 0: ValueError("3 channels")}, "3 channels"),
    ],
)
def test_a_process_that_died_explains_why_other_workers_lost_their_connections(
    failures: dict[int, Exception], reason: str
) -> None:
    assert root_cause(WorkerGroupError("two texts", failures)) == reason


def test_an_exception_whose_cause_is_no_exception_is_named_as_any_other() -> None:
    error: Any = ValueError("3 channels")
    error.cause = "a file of a stranger"
    assert root_cause(error) == "3 channels"
    assert root_cause(wrapped("Traceback\nValueError: 3 channels", error)) == "ValueError: 3 channels"


def test_a_coordinator_that_ray_has_ended_for_memory_is_started_again_and_says_why() -> None:
    config, store = TrainConfig(data="images", name="run", batch_size=1), SimpleNamespace(url="runs/run")
    prepared: Any = SimpleNamespace(config=config, name="run", store=store, loop=None)
    with (
        pytest.raises(CoordinatorLost, match="Ray has ended it because the machine's memory was nearly full"),
        needs_coordinator(prepared),
    ):
        raise OutOfMemoryError("The actor was killed due to the node running low on memory.")
