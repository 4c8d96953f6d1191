"""Files of weights and checkpoints that unpack to far more than their size are refused before they are read."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain.errors import UsageError
from raytrain.monitor.events import Event
from raytrain.runs.stored_checkpoints import checkpoint_path
from raytrain.training.checkpoint import Checkpoints, Identity, read_checkpoint
from raytrain.training.networks.model import build_model
from raytrain.training.networks.transfer import initial_weights
from tests.helpers.stored_runs import ANIMALS, add_checkpoint, make_run, options


def deflated(data: bytes) -> bytes:
    """The same archive with compressed entries, which torch reads as well."""
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as smaller:
        for entry in archive.infolist():
            smaller.writestr(entry.filename, archive.read(entry))
    return packed.getvalue()


def bomb(content: Any) -> bytes:
    """``content`` and 100 MB of zeros in some 100 kB."""
    file = io.BytesIO()
    torch.save({"zeros": torch.zeros(25_000_000), **content}, file)
    return deflated(file.getvalue())


@pytest.fixture
def never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **more: Any) -> None:
        raise AssertionError("the archive was read")

    monkeypatch.setattr(torch, "load", load)


def test_torch_reads_a_compressed_archive() -> None:
    content = torch.load(io.BytesIO(bomb({})), weights_only=True)
    assert content["zeros"].shape == (25_000_000,)


def test_weights_that_are_a_bomb_are_refused(tmp_path: Path, never_read: None) -> None:
    (tmp_path / "bomb.pt").write_bytes(bomb({}))
    with pytest.raises(UsageError, match=r"--weights .*bomb\.pt .*unpacks to 0\.1 GB") as refused:
        initial_weights(options(weights=str(tmp_path / "bomb.pt")), ANIMALS, 0)
    assert "code" not in str(refused.value)


def test_a_checkpoint_that_is_a_bomb_is_refused(tmp_path: Path, never_read: None) -> None:
    store = make_run(tmp_path, options())
    store.put(checkpoint_path(5), bomb({}))
    with pytest.raises(UsageError, match=r"step-000000005\.pt .*unpacks to 0\.1 GB"):
        read_checkpoint(store, checkpoint_path(5))


def with_harmless_directory(archive: bytes) -> bytes:
    """The same archive with a second directory before its last record, in which every part unpacks to one byte."""
    end = archive.rfind(b"PK\5\6")
    size, offset = struct.unpack_from("<II", archive, end + 12)
    harmless, at = bytearray(archive[offset : offset + size]), 0
    while at < len(harmless):
        struct.pack_into("<I", harmless, at + 24, 1)
        at += 46 + sum(struct.unpack_from("<HHH", harmless, at + 28))
    return archive[:end] + bytes(harmless) + archive[end:]


def test_an_archive_that_torch_and_python_would_read_differently_is_refused(tmp_path: Path, never_read: None) -> None:
    store = make_run(tmp_path, options())
    for number, archive in enumerate((with_harmless_directory(bomb({})), bomb({}) + b"PK", bomb({})[:-30])):
        store.put(checkpoint_path(number), archive)
        with pytest.raises(UsageError, match=r"is not a whole checkpoint \(it is a damaged archive \(its "):
            read_checkpoint(store, checkpoint_path(number))
        (tmp_path / "bomb.pt").write_bytes(archive)
        with pytest.raises(UsageError, match=r"--weights .*bomb\.pt is not read, because it is a damaged archive"):
            initial_weights(options(weights=str(tmp_path / "bomb.pt")), ANIMALS, 0)


def test_an_archive_that_says_a_size_twice_is_refused(tmp_path: Path, never_read: None) -> None:
    file, sizes = io.BytesIO(), struct.pack("<HHQ", 1, 8, 1)
    with zipfile.ZipFile(file, "w") as archive:
        (entry := zipfile.ZipInfo("archive/data.pkl")).extra = sizes + sizes
        archive.writestr(entry, b"words")
    (tmp_path / "bomb.pt").write_bytes(file.getvalue())
    with pytest.raises(UsageError, match="it says the size of a part twice"):
        initial_weights(options(weights=str(tmp_path / "bomb.pt")), ANIMALS, 0)


def test_weights_with_a_flipped_bit_are_refused(tmp_path: Path, never_read: None) -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.full((100,), 3.0)}, file)
    damaged = bytearray(file.getvalue())
    damaged[damaged.index(struct.pack("<f", 3.0) * 100) + 7] ^= 0x40
    (tmp_path / "weights.pt").write_bytes(damaged)
    with pytest.raises(
        UsageError, match=r"damaged archive \(its part .*data/0 is not what was written\); give a whole"
    ):
        initial_weights(options(weights=str(tmp_path / "weights.pt")), ANIMALS, 0)


def test_a_run_resumes_from_the_checkpoint_before_a_bomb(tmp_path: Path) -> None:
    config = options()
    store = make_run(tmp_path, config)
    add_checkpoint(store, build_model(config.model, 3, 1, 0), config)
    store.put(checkpoint_path(5), bomb({}))
    said: list[Event] = []
    checkpoints = Checkpoints(store, Identity(config.model, ANIMALS, "", 128, 0), keep=1, report=said.append)
    read = checkpoints.read_newest()
    assert read is not None and read[0] == checkpoint_path(1)
    assert "unpacks to" in str(said[0])


def test_weights_that_are_compressed_a_little_are_read(tmp_path: Path) -> None:
    file = io.BytesIO()
    torch.save(build_model("raytrain.models:digits", 3, 1, 0).state_dict(), file)
    (tmp_path / "weights.pt").write_bytes(deflated(file.getvalue()))
    weights = initial_weights(options(weights=str(tmp_path / "weights.pt")), ANIMALS, 0)
    assert weights is not None and "0.weight" in weights
