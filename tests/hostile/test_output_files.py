"""An output file is written where its name says."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain.errors import UsageError
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
