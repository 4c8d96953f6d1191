"""Provenance of a run: the commit, the packages, the command and the user's code, for each attempt that differed.

``provenance.json`` of a run has a list, the newest attempt last. An attempt with the same provenance as the one before,
started by the same command, is not added. Secrets are left out of all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from raytrain.config.option_values import matches
from raytrain.runs.documents import PROVENANCE, Report, ignore, known_fields, plain, read_json, write_json
from raytrain.storage.store import Store

_MAIN_PACKAGES = {"raytrain": "raytrain", "torch": "torch", "torchvision": "torchvision", "timm": "timm", "ray": "Ray"}
_IN_SUMMARY = ("raytrain", "torch", "ray")
_COMMIT_DIGITS = 10
_NUM_SHOWN = 3  # other packages that a difference names
MAX_CHANGED_FILES = 100
"""Number of changed files that are named."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Provenance of an attempt: the versions of all code that it ran.

    Attributes:
        first_step: completed steps of the run when the attempt began.
        started_at: the time then, in UTC.
        command: the command line of the process that started it.
        python: the version of Python.
        packages: the versions of all installed packages, by their names.
        commit: the commit of the folder of the user's code or, without such code, of the working folder; None if the
            folder is in no git repository, or git is missing.
        no_commit: why there is no commit, if there is a repository.
        changed_files: files that differ from that commit; empty if the working tree was clean.
        code: the files of the user's own functions, such as the loop, by their names.
    """

    first_step: int
    started_at: str
    command: str
    python: str
    packages: dict[str, str]
    commit: str | None = None
    no_commit: str | None = None
    changed_files: list[str] = field(default_factory=list[str])
    code: dict[str, str] = field(default_factory=dict[str, str])

    def summary(self) -> str:
        """Return the commit and the main versions: ``commit 1a2b3c4d5e; raytrain 0.1.0, torch 2.11.0, Python 3.12``."""
        packages = {name.lower(): version for name, version in self.packages.items()}
        versions = [f"{_MAIN_PACKAGES[name]} {packages[name]}" for name in _IN_SUMMARY if name in packages]
        commit = f"{self._commit_text()}; " if self.commit else ""
        commit = f"no commit: {self.no_commit}; " if self.no_commit else commit
        return f"{commit}{', '.join([*versions, f'Python {self.python}'])}"

    def difference_from(self, before: Provenance) -> str:
        """Return the differences from the attempt ``before`` as a part of a sentence; empty if there is none.

        The command does not count, because a resume always has another one. Of the code, files of this attempt count
        that are new or have another text.
        """
        # The commit, the code, and Python.
        parts: list[str] = []
        if (self.commit, self.changed_files) != (before.commit, before.changed_files):
            parts.append(f"{self._commit_text()} instead of {before._commit_text()}")
        parts += [f"another {name}" for name, text in self.code.items() if before.code.get(name) != text]
        if self.python != before.python:
            parts.append(f"Python {self.python} instead of {before.python}")

        # Name the packages that matter most, and count the others.
        other_packages: list[str] = []
        for name in sorted({*self.packages, *before.packages}, key=str.lower):
            version, old = self.packages.get(name), before.packages.get(name)
            if version != old:
                shown = f"{_MAIN_PACKAGES.get(name.lower(), name)} {version or 'missing'} instead of {old or 'none'}"
                (parts if name.lower() in _MAIN_PACKAGES else other_packages).append(shown)
        if number := len(other_packages):
            more = ", …" if number > _NUM_SHOWN else ""
            noun = "package" if number == 1 else "packages"
            parts.append(f"{number} other {noun} ({', '.join(other_packages[:_NUM_SHOWN])}{more})")
        return ", ".join(parts)

    def _commit_text(self) -> str:
        """Return the commit and the number of changed files, such as ``commit 1a2b3c4d5e with 2 changed files``."""
        number = len(self.changed_files)
        more = " or more" if number == MAX_CHANGED_FILES else ""
        changed = f" with {number}{more} changed {'file' if number == 1 else 'files'}" if number else ""
        return f"commit {self.commit[:_COMMIT_DIGITS]}{changed}" if self.commit else "no commit"


def read_provenance(store: Store, report: Report = ignore) -> tuple[Provenance, ...]:
    """Return the provenance of the attempts of a run, the newest last; damaged entries are left out.

    Attempts that did not differ from the one before have no entry. ``report`` gets a sentence if the whole document is
    damaged.

    Example: ``read_provenance(open_run("./runs", "digits"))[-1].packages["torch"]``
    """
    document: Any = read_json(store, PROVENANCE, report).get("attempts")
    attempts: list[dict[str, Any]] = document if matches(document, list[dict[str, Any]]) else []
    parsed: list[Provenance] = []
    for attempt in attempts:
        with suppress(TypeError):  # a field is missing
            parsed.append(Provenance(**known_fields(Provenance, attempt)))
    return tuple(parsed)


def provenance_at(attempts: Sequence[Provenance], step: int) -> Provenance | None:
    """Return the provenance of the attempt that trained ``step``, counted from 1; None if it is unknown.

    Step 0, before which nothing was trained, counts as step 1.
    """
    return next((attempt for attempt in reversed(attempts) if attempt.first_step < max(1, step)), None)


def record_provenance(store: Store, provenance: Provenance) -> str:
    """Add an attempt's provenance to that of the run; return the differences from the attempt before as text.

    If neither these nor the command differ, nothing is written. Raises StorageError if storage is out of reach.
    """
    attempts = read_provenance(store)
    difference = provenance.difference_from(attempts[-1]) if attempts else ""
    if not attempts or difference or provenance.command != attempts[-1].command:
        write_json(store, PROVENANCE, {"attempts": plain([*attempts, provenance])})
    return difference
