"""`raytrain pack --shorter-side` packs larger images as smaller JPEGs, and says so."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps
from rich.console import Console

from raytrain.cli.main import main
from raytrain.config import TrainConfig
from raytrain.data.images.fetch_and_decode import read_contents, require_bytes
from raytrain.data.labels.folders import build_manifest
from raytrain.datasets.pack import PackResult, pack
from raytrain.diagnostics.look import look_at
from raytrain.display.look import look_page
from raytrain.errors import UsageError
from raytrain.storage.open import open_store
from tests.helpers.photographs import as_jpeg, draw


def packed_into(source: Path, destination: Path, *shrinking: int) -> PackResult:
    options = dict(zip(("shorter_side", "quality"), shrinking, strict=False))
    return pack(source, destination, **options, console=Console(file=io.StringIO()))


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """A photograph in each of several kinds of file, larger ones and smaller ones."""
    pixels = draw(60, 90)
    lies = Image.Exif()
    lies[0x0112] = 6
    files = {
        "large.jpg": as_jpeg(pixels),
        "rotated.jpg": as_jpeg(pixels, exif=lies),
        "grey.jpg": as_jpeg(pixels[:, :, 0]),
        "small.jpg": as_jpeg(pixels[:32, :40]),
        "large.png": saved(Image.fromarray(pixels).convert("RGBA"), "PNG"),
        "broken.jpg": b"\xff\xd8\xff" + bytes(5000),
        "flat.png": saved(Image.new("RGB", (90, 60)), "PNG"),  # no JPEG of it takes fewer bytes
    }
    for number, (name, data) in enumerate(files.items()):
        file = tmp_path / "photographs" / "ab"[number % 2] / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return tmp_path / "photographs"


def saved(image: Image.Image, format: str) -> bytes:
    file = io.BytesIO()
    image.save(file, format)
    return file.getvalue()


def test_larger_images_are_packed_as_smaller_jpegs_and_others_as_they_are(photographs: Path, tmp_path: Path) -> None:
    result = packed_into(photographs, tmp_path / "packed", 32, 90)
    manifest = build_manifest(open_store(str(tmp_path / "packed")))
    contents = read_contents(open_store(manifest.url), manifest)
    packed = {
        Path(key).name: require_bytes(data) for key, data in zip(manifest.keys.to_pylist(), contents, strict=True)
    }
    before = {file.name: file.read_bytes() for file in photographs.rglob("*.*")}
    same = {"small.jpg", "broken.jpg", "flat.png"}
    assert {name for name in before if packed[name] == before[name]} == same
    shapes = {"large.jpg": (48, 32), "rotated.jpg": (32, 48), "grey.jpg": (48, 32), "large.png": (48, 32)}
    for name in before.keys() - same:
        with Image.open(io.BytesIO(packed[name])) as image, Image.open(io.BytesIO(before[name])) as original:
            assert (image.format, image.size, image.mode) == ("JPEG", shapes[name], "L" if "grey" in name else "RGB")
            upright = ImageOps.exif_transpose(original).convert(image.mode)
            expected = upright.resize(image.size, Image.Resampling.BICUBIC)
            difference = np.abs(np.asarray(image).astype(int) - np.asarray(expected)).mean()
            assert difference < 12  # there is much noise, and a JPEG stores colours at half the size
    assert manifest.sizes_bytes.sum() == result.num_bytes == sum(map(len, packed.values()))
    assert manifest.shrinking == (32, 90) and len(manifest.select(np.arange(2)).shrinking or ()) == 2


def test_shrunk_images_are_packed_again_only_if_they_change(photographs: Path, tmp_path: Path) -> None:
    def again(shorter_side: int = 32, quality: int = 90) -> int:
        return packed_into(photographs, tmp_path / "packed", shorter_side, quality).num_written

    num_shards = again()
    assert num_shards > 0 and again() == 0
    assert again(quality=80) > 0


@pytest.mark.not_quick
def test_look_says_how_images_were_shrunk(
    photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--shorter-side", "32", "--quality", "80"]
    assert main(["pack", str(photographs), str(tmp_path / "packed"), *arguments]) == 0
    result = look_at(TrainConfig(data=str(tmp_path / "packed"), batch_size=2, image_size=(8, 8), storage=str(tmp_path)))
    assert result.summary()["shrinking"] == {"shorter_side": 32, "quality": 80}
    Console(file=sys.stdout, width=120).print(look_page(result))
    assert "JPEGs of quality 80, shorter side 32, if larger" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [(0, 90), (320, 0), (320, 101)])
def test_an_impossible_shrinking_is_refused(wrong: tuple[int, int], photographs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--shorter-side is .* and --quality"):
        packed_into(photographs, tmp_path / "packed", *wrong)


@pytest.mark.parametrize("fraction", [-1, 1.5, float("nan"), float("inf")])
def test_an_impossible_fraction_of_bad_rows_is_refused(fraction: float, photographs: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--max-bad-fraction is .*; it must be at least 0"):
        pack(photographs, tmp_path / "packed", max_bad_fraction=fraction)
