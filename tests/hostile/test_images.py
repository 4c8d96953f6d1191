"""Image files that are made to cost memory or time are refused before they are decoded."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from raytrain.data.images.decode import decode
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import BadImage, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.storage.open import open_store
from tests.helpers.image_files import encoded, jpeg_bomb, png

SHAPE = ImageShape(32, 32, 3)
TRANSPARENT_PNG, EXIF = 6, b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
MEASURE = """
import resource, sys
from pathlib import Path
from raytrain.data.images.decode import decode
from raytrain.data.images.image_format import BadImage, ImageShape
shape = ImageShape(32, 32, 3)
for example in sys.argv[2:]:
    decode(Path(example).read_bytes(), shape)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode(Path(sys.argv[1]).read_bytes(), shape)
except BadImage:
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def many_scans(side: int, num_scans: int) -> bytes:
    """A progressive JPEG whose last scan, which refines nothing, is repeated."""
    data = encoded(Image.new("RGB", (side, side), "grey"), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xc4")  # the table of the last scan stands before it
    return data[:-2] + data[start:-2] * num_scans + data[-2:]


def blank(side: int, format: str, mode: str = "RGB", **options: Any) -> Callable[[], bytes]:
    return lambda: encoded(Image.new(mode, (side, side)), format, **options)


@pytest.mark.parametrize(
    "large",
    [
        pytest.param(lambda: png(8_000, 8_000, 8, TRANSPARENT_PNG, b""), id="transparent png"),
        pytest.param(lambda: png(9_000, 9_000, 8, 2, b""), id="png"),
        pytest.param(blank(6_000, "WEBP", lossless=True), id="webp"),
        pytest.param(blank(6_000, "WEBP", save_all=True, append_images=[Image.new("RGB", [6_000, 6_000], "red")])),
        pytest.param(blank(9_000, "GIF", "P"), id="gif"),
        pytest.param(lambda: jpeg_bomb(10_000, progressive=True), id="progressive jpeg"),
        pytest.param(lambda: jpeg_bomb(10_000, progressive=True, exif=EXIF), id="progressive jpeg with exif"),
        pytest.param(lambda: jpeg_bomb(10_000, progressive=True).replace(b"\xff\xda", b"\xff\xd9", 9), id="one scan"),
        pytest.param(lambda: jpeg_bomb(20_000), id="jpeg"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_would_take_half_a_gigabyte_is_refused_by_its_header(
    large: Callable[[], bytes], tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(large())
    with pytest.raises(BadImage, match=r"the image is too large: [\d,]+ × [\d,]+ pixels"):
        decode((tmp_path / "large").read_bytes(), SHAPE)
    assert peak_bytes(tmp_path / "large") < 16 << 20


@pytest.mark.parametrize(
    "photo",
    [
        pytest.param(blank(5_000, "WEBP", "RGBA", lossless=True), id="webp"),
        pytest.param(blank(6_500, "PNG", "RGBA"), id="transparent png"),
        pytest.param(blank(8_000, "PNG"), id="png"),
        pytest.param(blank(6_500, "JPEG", progressive=True, exif=EXIF), id="progressive jpeg with exif"),
        pytest.param(blank(10_500, "JPEG", exif=EXIF), id="jpeg with exif"),
        pytest.param(blank(14_200, "JPEG"), id="jpeg of 200 megapixels"),
    ],
)
def test_an_image_as_large_as_is_allowed_takes_no_more_than_half_a_gigabyte(
    photo: Callable[[], bytes], tmp_path: Path
) -> None:
    (tmp_path / "photo").write_bytes(photo())
    assert peak_bytes(tmp_path / "photo") < 544 << 20


def peak_bytes(file: Path) -> int:
    """Memory that decoding takes in a process that has decoded a small image of each kind before."""
    small = [file.with_name(f"small{number}") for number in range(3)]
    for path, format in zip(small, ("JPEG", "PNG", "WEBP"), strict=True):
        Image.new("RGB", (8, 8)).save(path, format)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURE, str(file), *map(str, small)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_progressive_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(BadImage, match=r"too large: 2,000 × 2,000 pixels in 510 scans of a JPEG"):
        decode(many_scans(2_000, 500), SHAPE)
    with pytest.raises(BadImage, match="in 510 scans"):
        decode(many_scans(2_000, 500).replace(b"\xff\xdb", b"\xff\xe1\0\x08Exif\0\0\xff\xdb", 1), SHAPE)


def test_a_large_progressive_jpeg_may_have_fewer_scans() -> None:
    assert decode(many_scans(4_000, 40), SHAPE).shape == (32, 32, 3)
    with pytest.raises(BadImage, match="too large: 6,000 × 6,000 pixels in 50 scans"):
        decode(many_scans(6_000, 40), SHAPE)


def test_a_thumbnail_does_not_make_a_photograph_progressive() -> None:
    """Phones write photographs of 200 megapixels, and a small JPEG into each."""
    photo = encoded(Image.new("RGB", (14_200, 14_200)), "JPEG")
    thumbnail = encoded(Image.new("RGB", (160, 120)), "JPEG", progressive=True)
    segment = b"\xff\xe2" + (2 + len(thumbnail)).to_bytes(2, "big") + thumbnail
    assert decode(photo[:2] + segment + photo[2:], SHAPE).shape == (32, 32, 3)


def test_a_progressive_jpeg_of_a_usual_encoder_is_decoded() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for options in ({}, {"exif": EXIF}, {"subsampling": "4:4:4"}):
        assert decode(encoded(photo, "JPEG", progressive=True, **options), SHAPE).shape == (32, 32, 3)
    assert decode(many_scans(64, 50), SHAPE).shape == (32, 32, 3)


def test_costly_files_count_as_images_that_cannot_be_read(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    good = encoded(np.zeros((8, 8, 3), np.uint8), "PNG")
    for name, data in {
        "a/1.png": good,
        "a/2.png": png(9_000, 9_000, 8, 2, b""),
        "b/3.jpg": many_scans(4_000, 99),
    }.items():
        store.put(name, data)
    images, bad = ImageReader(store, SHAPE).read(build_manifest(store))
    assert len(images) == 3 and list(bad) == [1, 2]
    assert bad[1].startswith("the image is too large: 9,000 × 9,000 pixels") and "in 109 scans" in bad[2]


def test_a_picture_drawn_from_a_large_photograph_is_upright() -> None:
    """A JPEG with EXIF that does not fit is decoded at a fraction of its size, and rotated as any other."""
    side = 9_000
    picture = Image.new("RGB", (side, side), "black")
    picture.paste("white", (0, 0, side, side // 2))
    file = io.BytesIO()
    picture.save(file, "JPEG", exif=EXIF)  # turn clockwise: what is on top goes to the right
    shown = decode(file.getvalue(), SHAPE)
    assert shown[:, 20:].min() > 250 and shown[:, :12].max() < 5
