"""What one of the processes that read together raises ends the work of all, so that none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from raytrain.errors import RaytrainError, UsageError
from raytrain.loader.process_group import ProcessGroup
from tests.helpers.gloo_processes import run_in_processes

pytestmark = pytest.mark.not_quick


def fails_on(rank: int, error: Exception) -> Any:
    if dist.get_rank() == rank:
        raise error
    return "made"


def of_a_local_type() -> Exception:
    class Local(Exception):  # cannot be pickled
        pass

    return Local("no such column")


def outcome(call: str, rank: int, make_error: Callable[[], Exception]) -> str:
    try:
        return str(getattr(ProcessGroup(), call)(lambda: fails_on(rank, make_error())))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(("call", "rank"), [("from_first", 0), ("everywhere", 0), ("everywhere", 1)])
def test_an_unexpected_exception_of_one_process_is_raised_on_all(call: str, rank: int) -> None:
    outcomes = run_in_processes(2, outcome, call, rank, of_a_local_type)
    assert outcomes[rank] == "Local: no such column"
    assert outcomes[1 - rank].startswith(f"RaytrainError: Process {rank} failed: Local: no such column (")


@pytest.mark.parametrize("call", ["from_first", "everywhere"])
def test_a_sentence_of_one_process_is_that_of_all(call: str) -> None:
    outcomes = run_in_processes(2, outcome, call, 0, _mistake)
    assert outcomes == ["UsageError: --data is missing."] * 2


def _mistake() -> Exception:
    return UsageError("--data is missing.")


def test_a_process_alone_raises_its_own_exception() -> None:
    for call in ("from_first", "everywhere"):
        with pytest.raises(RaytrainError, match="It failed"):
            getattr(ProcessGroup(), call)(_fail)


def _fail() -> None:
    raise RaytrainError("It failed.")
