"""An output file is written where its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.errors import StorageError, UsageError
from raytrain.storage.folder import FolderStore
from raytrain.storage.open import check_output, write_output


@pytest.mark.parametrize(
    ("output", "folder"), [("/x.csv", "/"), ("x.csv", "."), ("./x.csv", "."), ("//x.csv", "/"), ("/tmp/x.csv", "/tmp")]
)
def test_the_file_is_written_into_its_folder(output: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(FolderStore, "put", lambda self, path, data: written.append(self._file(path)))
    check_output(output, (".csv",))
    write_output(output, b"")
    assert [str(Path(file).resolve()) for file in written] == [str(Path(folder).resolve() / "x.csv")]


def test_a_bucket_alone_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="bucket"):
        check_output("s3://x.csv", (".csv",))
    with pytest.raises(UsageError, match="bucket"):
        write_output("s3://x.csv", b"")
    assert not list(tmp_path.iterdir())


def test_a_place_that_takes_no_file_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"/proc/x\.csv cannot be written: no file can be made there"):
        check_output("/proc/x.csv", (".csv",))
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(UsageError, match="which is a folder; name a file in it"):
        check_output(f"{tmp_path}/x.csv", (".csv",))
    check_output(f"{tmp_path}/y.csv", (".csv",))
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]
