"""The temporary folder of a killed process is removed when another process creates one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain.errors import UsageError
from raytrain.loader.machine import image_memory
from raytrain.storage.temporary_files import TemporaryFolder

pytestmark = pytest.mark.not_quick

HOLD_A_FOLDER = """
from raytrain.storage.temporary_files import TemporaryFolder
folder = TemporaryFolder()
print(folder.path, flush=True)
input()
"""


REMOVE_WITHOUT_DESCRIPTORS = """
import os, resource, sys
from raytrain.storage.temporary_files import TemporaryFolder
folder = TemporaryFolder(sys.argv[1])
(folder.path / "a" / "b" / "c").mkdir(parents=True)
free = os.dup(0)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free + 2, free + 2))
folder.remove()
"""


def test_what_a_process_cannot_remove_at_its_end_the_next_one_removes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", REMOVE_WITHOUT_DESCRIPTORS, str(tmp_path)], check=True)
    assert len(list(tmp_path.iterdir())) == 1, "two descriptors are too few"
    TemporaryFolder(str(tmp_path)).remove()
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_exists_as_long_as_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "raytrain-of-something-else").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_A_FOLDER],
        env={"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        held = Path(holder.stdout.readline().strip())
        (held / "note").write_text("of a run")
        TemporaryFolder().remove()  # Belongs to another run on this machine.
        assert (held / "note").exists()
        holder.kill()
    with TemporaryFolder() as ours:
        assert ours.exists()
        assert not held.exists()
        assert (tmp_path / "raytrain-of-something-else").exists()
    assert not ours.exists()


def test_without_any_folder_for_temporary_files_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", find_none)
    for use in (TemporaryFolder, image_memory):
        with pytest.raises(UsageError, match="set TMPDIR to one"):
            use()


def test_images_are_not_kept_in_a_shared_memory_that_is_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    has_access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm" and has_access(path, mode))
    folder, num_bytes = image_memory()
    assert folder != "/dev/shm" and num_bytes > 0
