"""``breakpoint()`` in a loop: a debugger in a real terminal, and elsewhere a sentence that says what it needs."""

from __future__ import annotations

import bdb
import errno
import os
import pty
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import raytrain
from raytrain.demo.demo import render_digits
from raytrain.errors import RaytrainError
from raytrain.launch.debugger import terminal_of_command
from raytrain.recipes import digits
from raytrain.runs.documents import SUMMARY, read_json
from raytrain.storage.open import open_store
from tests.helpers.own_loops import train_loop

LOOP = """
import torch
import torch.nn.functional as F

def train(run):
    model = run.prepare(run.build_model())
    optimizer = run.prepare(torch.optim.SGD(model.parameters(), lr=0.01))
    for epoch in run.epochs():
        for batch in epoch:
            secret = 6 * 7000 + run.progress.step
            if run.progress.step < 2:
                breakpoint()
            F.cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            optimizer.zero_grad()
"""
RAYTRAIN = Path(sys.executable).with_name("raytrain")
TERMINAL = {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("debugged")
    render_digits(path / "digits", num_images=100)
    (path / "loop.py").write_text(LOOP)
    return path


def command(name: str, *options: str) -> list[str]:
    data = ["--data", "digits/train", "--test-data", "digits/test", "--device", "cpu", "--max-steps", "3"]
    return [str(RAYTRAIN), "train", "digits", *data, "--name", name, "--loop", "loop.py:train", *options]


class Terminal:
    """A terminal that a person would sit at: its ``device`` is that of a command."""

    def __init__(self) -> None:
        self._person, self.device = pty.openpty()
        self.text = ""

    def answer(self, question: str, answer: str) -> str:
        """Wait for ``question``, type ``answer``; return what was on the screen since the last answer."""
        while question not in self.text:
            assert select.select([self._person], [], [], 60)[0], self.text
            self.text += os.read(self._person, 4096).decode(errors="replace")
        before, self.text = self.text, ""
        os.write(self._person, f"{answer}\n".encode())
        return before


def test_a_debugger_opens_in_the_terminal_and_the_run_goes_on(folder: Path) -> None:
    terminal = Terminal()
    ends: dict[str, Any] = {"stdin": terminal.device, "stdout": terminal.device, "stderr": terminal.device}
    with subprocess.Popen(
        command("asked", "--backend", "local", "--workers", "1"), cwd=folder, env={**os.environ, **TERMINAL}, **ends
    ) as process:
        stops_at = 13 if sys.version_info < (3, 13) else 12  # before the next line, or at the breakpoint's own
        assert f"loop.py({stops_at})train()" in terminal.answer("(Pdb) ", "p secret")
        answered = terminal.answer("(Pdb) ", "c")
        assert "42000" in answered and "╭" not in answered  # the picture of the run is not drawn over it
        terminal.answer("(Pdb) ", "p secret")
        assert "42001" in terminal.answer("(Pdb) ", "c")
        terminal.answer("finished", "")
        assert process.wait(60) == 0
    assert read_json(open_store(str(folder / "runs" / "asked")), SUMMARY)["status"] == "finished"


def quitting(run: raytrain.Run) -> None:
    raise bdb.BdbQuit  # as pdb does at the command q


def test_who_quits_the_debugger_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RaytrainError, match=r"its loop was left in a debugger, .*`raise bdb\.BdbQuit"):
        train_loop(quitting, tmp_path)


@pytest.mark.slow  # what the sentence says is tested above, and that a debugger opens in a command as well
def test_who_quits_the_debugger_of_a_command_ends_it(folder: Path) -> None:
    terminal = Terminal()
    ends: dict[str, Any] = {"stdin": terminal.device, "stdout": terminal.device, "stderr": subprocess.PIPE}
    with subprocess.Popen(
        command("left", "--backend", "local", "--workers", "1"), cwd=folder, env={**os.environ, **TERMINAL}, **ends
    ) as process:
        terminal.answer("(Pdb) ", "q")
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "its loop was left in a debugger" in str(errors) and "Traceback" not in str(errors)


NO_TERMINAL = "breakpoint() in the loop (loop.py, line 12: `breakpoint()`) needs a terminal and a single worker"
WHERE = "in a terminal with --backend local --workers 1"


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--backend", "local"), ("--address", "local")], ids=["local", "ray"])
def test_a_command_without_a_terminal_says_what_it_needs(folder: Path, words: tuple[str, str]) -> None:
    done = subprocess.run(
        command(f"without-{words[1]}", *words, "--workers", "1"),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=200,
    )
    said = done.stderr.decode()
    assert NO_TERMINAL in said and WHERE in said, said
    assert done.returncode != 0 and "Traceback" not in said


@pytest.mark.parametrize("workers", [1, 2])
def test_where_there_is_no_terminal_or_several_workers_a_sentence_says_what_it_needs(
    folder: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if workers == 1:
        monkeypatch.setattr(os, "isatty", lambda descriptor: False)
    data = {"data": f"{folder}/digits/train", "test_data": f"{folder}/digits/test", "storage": f"{folder}/runs"}
    options: dict[str, Any] = {**data, "name": f"{workers}-workers", "loop": f"{folder}/loop.py:train", "max_steps": 3}
    with pytest.raises(RaytrainError, match=re.escape(NO_TERMINAL)) as raised:
        raytrain.train(digits(**options, device="cpu", backend="local", workers=workers))
    assert WHERE in str(raised.value)


def test_a_terminal_without_a_name_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that has file systems of its own, and the terminal of the machine around it."""

    def without_a_name(descriptor: int) -> str:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    monkeypatch.setattr(os, "ttyname", without_a_name)
    assert terminal_of_command() is None
