"""Exchange of values between the processes that a launcher has started, and checks that they have the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from raytrain.config.user_code import describe
from raytrain.errors import RaytrainError, UsageError

T = TypeVar("T")


class ProcessGroup:
    """The processes that read together: the group of ``torch.distributed``, or those that ``rank_and_size`` counts.

    Example: ``rank, world_size = ProcessGroup().rank_and_size()``
    """

    def __init__(self, rank_and_size: tuple[int, int] | None = None) -> None:
        self._given_rank_and_size = rank_and_size

    def rank_and_size(self) -> tuple[int, int]:
        """Return the rank of this process and the number of processes, as they are known now.

        Both were given, or come from ``torch.distributed``, or from RANK and WORLD_SIZE in the environment;
        without all of these, 0 and 1. Raises UsageError if the environment has other values.
        """
        if self._given_rank_and_size is not None:
            return self._given_rank_and_size
        if self.can_talk:
            return dist.get_rank(), dist.get_world_size()
        rank, world_size = os.environ.get("RANK") or "0", os.environ.get("WORLD_SIZE") or "1"
        if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
            raise UsageError(
                f"RANK is {rank!r} and WORLD_SIZE {world_size!r} in the environment, and the ranks of N processes are "
                "0 to N-1; set both as torchrun does, or neither."
            )
        return int(rank), int(world_size)

    @property
    def can_talk(self) -> bool:
        """True if the processes can send each other values."""
        return self._given_rank_and_size is None and dist.is_available() and dist.is_initialized()

    def gather(self, value: T) -> list[T]:
        """Return the ``value`` of each process, by rank; only this process's own if they cannot communicate.

        All processes call this together.
        """
        if not self.can_talk:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def from_first(self, make: Callable[[], T]) -> T:
        """Call ``make`` on process 0, and return its result on all processes. All call this together.

        If they cannot talk, each calls ``make`` itself. A RaytrainError of process 0 is raised on all. Any other
        exception may be of a type that cannot be sent: then the others raise a RaytrainError with its sentence.
        """
        if not self.can_talk:
            return make()
        message: list[Any] = [None]
        failure: Exception | None = None
        if dist.get_rank() == 0:
            try:
                message = [make()]
            except Exception as error:
                failure, message = error, [self._as_sent(error)]
        dist.broadcast_object_list(message)
        if failure is not None:
            raise failure
        if isinstance(message[0], RaytrainError):
            raise message[0]
        return message[0]

    def everywhere(self, make: Callable[[], T]) -> T:
        """Call ``make`` on all processes, and return this process's result. All call this together.

        A RaytrainError on one of them is raised on all. Any other exception is raised on that process, and its sentence
        on the others, as in :meth:`from_first`.
        """
        results: list[T] = []
        failure: Exception | None = None
        try:
            results.append(make())
        except Exception as error:
            failure = error
        errors = self.gather(failure and self._as_sent(failure))
        if failure is not None and not isinstance(failure, RaytrainError):
            raise failure
        for error_of_process in errors:
            if error_of_process is not None:
                raise error_of_process
        return results[0]

    def _as_sent(self, error: Exception) -> RaytrainError:
        """Return the exception that other processes raise if ``error`` has ended the work of this one."""
        if isinstance(error, RaytrainError):
            return error
        return RaytrainError(f"Process {self.rank_and_size()[0]} failed: {describe(error)}.")

    def check_equal(self, difference: str, *values: Any) -> None:
        """Raise UsageError on all processes if one of them has other ``values``; ``difference`` says what they are.

        All call this together. Example: ``group.check_equal("a loader of other options", options.to_json())``
        """
        gathered = self.gather(values)
        for rank, values_of_process in enumerate(gathered):
            if values_of_process != gathered[0]:
                raise UsageError(f"Process {rank} has {difference} than process 0; give all processes the same.")
