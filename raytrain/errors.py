"""The exceptions that reach a user: each carries one plain sentence and survives pickling."""

from __future__ import annotations

from typing import Any


class RaytrainError(Exception):
    """Base of every error that raytrain raises on purpose; its text is all that a user needs to read.

    ``exit_code`` is what the command line ends with: 2 for bad usage or input, 1 for a run that failed.
    """

    exit_code = 1


class UsageError(RaytrainError, ValueError):
    """A setting or an input is wrong; the sentence names the setting, the numbers and what to do."""

    exit_code = 2


class StorageError(RaytrainError):
    """Storage (a folder or S3) refused, is missing or is out of reach; the sentence says what to do."""

    exit_code = 2


class TrainingFailed(RaytrainError):
    """A run ended before its time; the sentence carries the cause and how to go on, ``summary`` what is known of the run."""

    def __init__(self, sentence: str, summary: dict[str, Any] | None = None) -> None:
        super().__init__(sentence, summary)
        self.summary = summary or {}

    def __str__(self) -> str:
        return str(self.args[0])


class CoordinatorLost(TrainingFailed):
    """The process that coordinates a run died, and the run's workers with it; the run can resume from its checkpoint.

    ``name`` is the run's, ``stop_reason`` that of a stop request that it had not carried out yet.
    """

    def __init__(self, sentence: str, name: str, run_dir: str, stop_reason: str | None) -> None:
        super().__init__(sentence, {"name": name, "status": "failed", "run_dir": run_dir})
        self.args = (sentence, name, run_dir, stop_reason)  # what it is unpickled from
        self.name = name
        self.stop_reason = stop_reason
