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


class MonitorLost(TrainingFailed):
    """The process that keeps a run's metrics ended, and with it the run's session; the run can go on from its checkpoint."""
