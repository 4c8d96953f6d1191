"""The temporary folder of a process that was killed goes with the next one that makes one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.storage.tempdir import TemporaryFolder

HOLD_ONE = """
from raytrain.storage.tempdir import Scratch
scratch = Scratch()
print(scratch.path, flush=True)
input()
"""


def test_a_folder_lives_as_long_as_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "raytrain-of-something-else").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_ONE], env={"TMPDIR": str(tmp_path)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        (held / "note").write_text("of a run")
        TemporaryFolder().remove()  # of another run beside it
        assert (held / "note").exists()
        holder.kill()
    with TemporaryFolder() as ours:
        assert ours.exists()
        assert not held.exists()
        assert (tmp_path / "raytrain-of-something-else").exists()
    assert not ours.exists()
