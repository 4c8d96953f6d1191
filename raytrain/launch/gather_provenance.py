"""Gathers the provenance of an attempt: the commit, the packages, the command and the user's code.

The start of a run does not wait for it. When the attempt begins, git starts to compare the files, and the user's code
is read, because somebody may change both a moment later. The versions of a hundred packages take longer:
:meth:`Gathering.finish` finds them once the workers train.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from raytrain.config import TrainConfig
from raytrain.config.named_functions import file_of_function
from raytrain.config.option_values import matches
from raytrain.config.options import own_functions
from raytrain.errors import current_folder
from raytrain.runs.provenance import MAX_CHANGED_FILES, Provenance
from raytrain.runs.redact import redact
from raytrain.training.loop_checks.reached_code import source_lines

COMMIT_VARIABLE = "RAYTRAIN_COMMIT"
"""The variable with the commit and the changed files of the machine that submitted a job, as JSON.

The job's own copies of the files are in no repository.
"""

_GIT_WITHIN_S = 10.0
_MAX_CODE_CHARS = 200_000  # of each file
_STATUS = ("status", "--porcelain=v2", "-z", "--branch", "--untracked-files=normal", "--no-renames")


class Gathering:
    """The provenance of an attempt, while it is being gathered.

    The user's code is read at once, git runs in a process, and :meth:`finish` finds the rest. ``loop`` is the caller's
    own training loop, if any, and ``first_step`` counts the completed steps of the run when the attempt begins.

    Example:
        >>> gathering = Gathering(config, loop=None, first_step=0)
        >>> gathering.finish().commit
    """

    def __init__(self, config: TrainConfig, loop: object, first_step: int) -> None:
        self._first_step = first_step
        self._started_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        files = list(own_code_files(config, loop))
        self._git = GitStatus(files)

        # If the loop is a function, its code is the lines that travel to the workers: its file may be a notebook.
        sources = source_lines(loop) if loop is not None else {}
        self._code = {
            source.title: "".join(source.lines[line] for line in sorted(source.lines)) for source in sources.values()
        }
        # The files of functions that the options name. Two files in different folders may have the same name.
        for file in dict.fromkeys(files):
            name = file.name if file.name not in self._code else os.path.relpath(file)
            with suppress(OSError, UnicodeDecodeError):  # provenance lacks a file that cannot be read
                self._code[name] = file.read_text()

    def close(self) -> None:
        """End git, if it still runs."""
        self._git.close()

    def finish(self) -> Provenance:
        """Wait for git, 10 seconds at most, list the installed packages, and return the provenance without secrets."""
        commit, changed_files = self._git.result()
        # The command line as a user types it: ``raytrain train …``, or ``python script.py …``.
        program, *words = sys.argv or [""]
        is_raytrain = Path(program).name == "raytrain" or program.endswith("raytrain/__main__.py")
        command = shlex.join([*(["raytrain"] if is_raytrain else ["python", program]), *words])
        return Provenance(
            first_step=self._first_step,
            started_at=self._started_at,
            command=redact(command),
            python=platform.python_version(),
            packages=_installed_packages(),
            commit=commit,
            no_commit=self._git.problem,
            changed_files=changed_files,
            code={name: redact(text)[:_MAX_CODE_CHARS] for name, text in self._code.items()},
        )


def own_code_files(config: TrainConfig, loop: object = None) -> Iterator[Path]:
    """Yield the files of the user's functions that the options name, a file as often as options name it.

    The file of ``--loop`` is left out if a ``loop`` was given as a function, which takes its place.
    """
    for option, name in own_functions(config):
        file = file_of_function(name)
        if file is not None and file.is_file() and (option != "loop" or loop is None):
            yield file


class GitStatus:
    """The commit of the folder of ``files`` or, without any, of the working folder, and the files that differ from it.

    git runs in a process of its own from the start, so that the caller need not wait. If there is a repository, but no
    commit, ``problem`` says why, once :meth:`result` has returned.

    Example: ``commit, changed_files = GitStatus([Path("loop.py")]).result()``
    """

    def __init__(self, files: list[Path]) -> None:
        self._files = [file.resolve() for file in files]
        folder = self._files[0].parent if self._files else Path(current_folder())
        self._process: subprocess.Popen[str] | None = None
        self.problem: str | None = None
        # The folder of the repository.
        self._root = next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)
        if self._root is None:
            return
        # Without core.fsmonitor=false, git would run a program that the repository names.
        command = ["git", "-c", "core.fsmonitor=false", "-c", "status.relativePaths=false", "-C", str(folder), *_STATUS]
        self.problem = "there is no program git"  # unless git starts
        with suppress(OSError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C.UTF-8"},
            )
            self.problem = None

    def close(self) -> None:
        """End the process of git."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def to_variable(self) -> str | None:
        """Return the value of COMMIT_VARIABLE that gives a job the same result; None if there is no commit."""
        commit, changed_files = self.result()
        return json.dumps({"commit": commit, "changed_files": changed_files}) if commit else None

    def result(self) -> tuple[str | None, list[str]]:
        """Return the commit and at most 100 changed files, sorted; None and no files if there is no commit.

        Wait for git for at most 10 seconds. In a submitted job, return what the machine that submitted it has found. A
        file that git does not track counts as changed only if it is one of ``files``; git may list its folder instead.
        """
        submitted = os.environ.get(COMMIT_VARIABLE)
        with suppress(ValueError):
            document = json.loads(submitted or "")
            if matches(document, dict[str, Any]) and matches(document.get("changed_files"), list[str]):
                self.problem = None
                return document.get("commit"), document["changed_files"]
        if self._process is None or self._root is None:
            return None, []
        try:
            output, errors = self._process.communicate(timeout=_GIT_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.close()
            self.problem = f"git has not ended within {_GIT_WITHIN_S:.0f} s"
            return None, []

        # Porcelain version 2: "# branch.oid COMMIT", "1 XY … PATH" for a changed file, "u XY … PATH" for an unmerged
        # one, "? PATH" for an untracked one, or for a folder of such. Each entry ends with a zero byte. Paths are
        # relative to the repository, and not quoted.
        commit, changed = None, list[str]()
        for line in output.split("\0"):
            kind, _, rest = line.partition(" ")
            if line.startswith("# branch.oid ") and not line.endswith("(initial)"):
                commit = line.split()[-1]
            elif kind in ("1", "u"):
                num_fields = 7 if kind == "1" else 9  # before the path, which may have spaces
                changed.append(rest.split(" ", num_fields)[-1])
            elif kind == "?" and any(self._root / rest in (file, *file.parents) for file in self._files):
                changed.append(rest)
        if commit is not None:
            return commit, sorted(changed)[:MAX_CHANGED_FILES]
        self.problem = "git cannot read the repository"
        if self._process.returncode == 0:
            self.problem = "the repository has none yet"
        elif "dubious ownership" in errors:  # such a repository may name programs, which git would run
            self.problem = "git does not read the repository of another user"
        return None, []


@cache
def _installed_packages() -> dict[str, str]:
    """Return the versions of all packages that this process can import, by name. Takes a tenth of a second."""
    versions: dict[str, str] = {}
    for package in distributions():
        name = package.metadata["Name"]
        if name:  # a package that was half removed has no name
            versions.setdefault(name, package.version)
    return dict(sorted(versions.items(), key=lambda item: item[0].lower()))
