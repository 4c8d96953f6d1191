"""Decoding: images look as in Pillow and browsers, and bad files are refused quickly with a reason."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simplejpeg
from PIL import Image, ImageCms, ImageFile, ImageOps

from raytrain.data.images.decode import decode, read_header, shrink, turn_upright
from raytrain.data.images.fetch_and_decode import ImageReader
from raytrain.data.images.image_format import BadImage, ImageShape
from raytrain.data.labels.folders import build_manifest
from raytrain.storage.open import open_store
from tests.helpers.image_files import (
    HEIGHT,
    WIDTH,
    Array,
    encoded,
    jpeg_bomb,
    photo,
    png,
    png_chunk,
    with_segment,
)

SHAPE, GREY_SHAPE = ImageShape(HEIGHT, WIDTH, 3), ImageShape(HEIGHT, WIDTH, 1)


def alpha() -> Array:
    """Opacity of each pixel: from 0 on the left to 255 on the right, (24, 40)."""
    return np.broadcast_to(np.linspace(0, 255, WIDTH).astype(np.uint8), (HEIGHT, WIDTH))


def on_white(colours: Array, opacity: Array) -> npt.NDArray[np.float64]:
    weight = opacity[..., None] / 255
    return colours * weight + 255 * (1 - weight)


def black_png(side: int) -> bytes:
    """Make a black PNG of ``side`` x ``side`` without holding its pixels in memory, by repeating a compressed piece."""
    num_bytes, pieces = side * (1 + 3 * side), 200
    packer = zlib.compressobj(9, wbits=-15)
    piece = packer.compress(bytes(num_bytes // pieces)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = struct.pack(">I", (num_bytes % 65521) << 16 | 1)  # Adler-32 of this number of zeros.
    assert num_bytes % pieces == 0
    return png(side, side, 8, 2, b"\x78\x9c" + piece * pieces + b"\x03\x00" + checksum)


def as_pillow_shows(data: bytes, mode: str = "RGB") -> Array:
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(ImageOps.exif_transpose(image).convert(mode))


def assert_close(shown: npt.NDArray[Any], expected: npt.NDArray[Any], tolerance: float) -> None:
    difference = np.abs(shown.astype(float).squeeze() - expected.astype(float)).max()
    assert difference <= tolerance, f"differs by up to {difference}"


# Images that are decoded.


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P"])
def test_common_formats_are_decoded_as_by_pillow(format: str, mode: str) -> None:
    image = Image.fromarray(photo()).convert(mode)
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(image.convert("RGB") if (format, mode) == ("JPEG", "P") else image, format, **options)
    tolerance = 10 if format == "JPEG" else 0
    assert_close(decode(data, SHAPE), as_pillow_shows(data), tolerance)
    assert_close(decode(data, GREY_SHAPE), as_pillow_shows(data, "L"), tolerance)


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"quality": 30}, {"subsampling": "4:4:4"}, {"restart_marker_rows": 1}]
)
def test_all_kinds_of_jpeg_are_decoded_as_by_pillow(options: dict[str, Any]) -> None:
    data = encoded(photo(), "JPEG", **options)
    assert_close(decode(data, SHAPE), as_pillow_shows(data), 3)
    assert_close(decode(data, GREY_SHAPE), as_pillow_shows(data, "L"), 3)


def test_cmyk_is_decoded_to_its_original_colours() -> None:
    data = encoded(Image.fromarray(photo()).convert("CMYK"), "JPEG", quality=95)
    assert b"Adobe" in data[:200]  # The marker of inverted values.
    assert_close(decode(data, SHAPE), photo(), 16)
    assert_close(decode(data, GREY_SHAPE), as_pillow_shows(data, "L"), 3)


def test_cmyk_without_adobe_marker_is_decoded_as_by_pillow() -> None:
    data = encoded(Image.fromarray(photo()).convert("CMYK"), "JPEG", quality=95)
    start = data.index(b"\xff\xee")
    plain = data[:start] + data[start + 16 :]
    assert b"Adobe" not in plain
    assert_close(decode(plain, SHAPE), as_pillow_shows(plain), 3)


def test_16_bits_per_channel_become_8() -> None:
    deep = photo().astype(np.uint16) * 256 + 77
    assert_close(decode(encoded(Image.fromarray(deep[:, :, 0]), "PNG"), GREY_SHAPE), photo()[:, :, 0], 0)
    assert_close(decode(encoded(Image.fromarray(deep[:, :, 0]), "PNG"), SHAPE)[:, :, 2], photo()[:, :, 0], 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    assert_close(decode(png(WIDTH, HEIGHT, 16, 2, zlib.compress(rows)), SHAPE), photo(), 0)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_transparent_pixels_become_white(format: str) -> None:
    data = encoded(
        np.dstack([photo(), alpha()]), format, **({"lossless": True, "exact": True} if format == "WEBP" else {})
    )
    assert_close(decode(data, SHAPE), on_white(photo(), alpha()), 1)


def test_transparent_grey_pixels_become_white() -> None:
    grey = photo()[:, :, :1]
    data = encoded(Image.merge("LA", [Image.fromarray(grey[:, :, 0]), Image.fromarray(alpha())]), "PNG")
    assert_close(decode(data, GREY_SHAPE), on_white(grey, alpha()).squeeze(), 1)


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_the_transparent_entry_of_a_palette_becomes_white(format: str) -> None:
    image = Image.fromarray(photo()).quantize(16)
    hidden = np.asarray(image) == 5
    data = encoded(image, format, transparency=5)
    expected = np.where(hidden[:, :, None], 255, np.asarray(image.convert("RGB")))
    assert hidden.any() and not hidden.all()
    assert_close(decode(data, SHAPE), expected, 0)


def test_a_transparent_colour_becomes_white() -> None:
    data = encoded(photo(), "PNG", transparency=tuple(photo()[3, 4].tolist()))
    expected = photo()
    expected[3, 4] = 255
    assert_close(decode(data, SHAPE), expected, 0)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_used(format: str) -> None:
    first, second = (Image.fromarray(picture) for picture in (photo(), 255 - photo()))
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(first, format, save_all=True, append_images=[second], duration=100, **options)
    with Image.open(io.BytesIO(data)) as image:
        assert getattr(image, "n_frames", 1) == 2
    assert_close(decode(data, SHAPE), as_pillow_shows(encoded(first, format, **options)), 0)


UPRIGHT: dict[int, Callable[[Array], Array]] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: np.rot90(a, 2),
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),  # Must be rotated clockwise.
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_images_are_rotated_by_their_exif_orientation(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}}.get(format, {})
    upright = UPRIGHT[orientation](photo())
    shape = ImageShape(*upright.shape)
    assert_close(decode(encoded(photo(), format, exif=exif, **lossless), shape), upright, 6 if format == "JPEG" else 0)


@pytest.mark.parametrize(
    "exif", [b"Exif\0\0", b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"]
)
def test_a_damaged_exif_block_is_ignored(exif: bytes) -> None:
    assert_close(decode(encoded(photo(), "JPEG", quality=100, subsampling=0, exif=exif), SHAPE), photo(), 6)


XMP = (
    b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    b'<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)
XMP_SEGMENT = b"http://ns.adobe.com/xap/1.0/\0" + XMP


def with_xmp_text(data: bytes) -> bytes:
    """Return a PNG with an XMP block that says that the image lies on its side."""
    start = data.index(b"IDAT") - 4
    return data[:start] + png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP) + data[start:]


@pytest.mark.parametrize(
    ("data", "tolerance"),
    [
        (with_segment(encoded(photo(), "JPEG", quality=100, subsampling=0), XMP_SEGMENT), 6),
        (with_segment(encoded(Image.fromarray(photo()).convert("CMYK"), "JPEG", quality=100), XMP_SEGMENT), 12),
        (with_xmp_text(encoded(photo(), "PNG")), 0),
        (encoded(photo(), "WEBP", lossless=True, xmp=XMP), 0),
    ],
    ids=["jpeg", "cmyk", "png", "webp"],
)
def test_the_orientation_in_xmp_is_ignored_as_by_browsers(data: bytes, tolerance: float) -> None:
    assert_close(decode(data, SHAPE), photo(), tolerance)
    # The paths of `pack --shorter-side` and of an image that Pillow has opened turn it as little.
    shrunk = shrink(data, HEIGHT // 2)
    assert shrunk is not None and shrunk.shape == (HEIGHT // 2, WIDTH // 2, 3)
    with Image.open(io.BytesIO(data)) as image:
        assert turn_upright(image).size == (WIDTH, HEIGHT)


def exif_block(*fields: tuple[int, int, int, bytes]) -> bytes:
    """Make an EXIF block of big-endian fields: tag, type, count and four bytes."""
    rows = b"".join(struct.pack(">HHI", tag, kind, count) + value for tag, kind, count, value in fields)
    return b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", len(fields)) + rows + bytes(4)


@pytest.mark.parametrize(
    ("orientation", "is_turned"),
    [
        ((0x0112, 3, 1, b"\0\x06\0\0"), True),
        ((0x0112, 3, 1, b"\0\x09\0\0"), False),  # no orientation
        ((0x0112, 3, 1, bytes(4)), False),
        ((0x0112, 4, 1, b"\0\0\0\x06"), False),  # of another type, which browsers do not take
        ((0x0112, 3, 2, b"\0\x06\0\0"), False),
    ],
)
@pytest.mark.parametrize("format", ["JPEG", "CMYK", "PNG", "WEBP"])
def test_the_exif_orientation_is_read_as_by_browsers(
    format: str, orientation: tuple[int, int, int, bytes], is_turned: bool
) -> None:
    exif = exif_block((0x0100, 4, 1, struct.pack(">I", WIDTH)), orientation)
    image = Image.fromarray(photo()).convert("CMYK" if format == "CMYK" else "RGB")
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(image, "JPEG" if format == "CMYK" else format, exif=exif, **options)
    upright = UPRIGHT[6 if is_turned else 1](photo())
    assert_close(decode(data, ImageShape(*upright.shape)), upright, 25 if format in ("JPEG", "CMYK") else 0)


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
def test_the_limit_of_jpegs_is_the_same_on_their_side(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow's own limit, which is smaller than that of JPEGs
    exif = exif_block((0x0112, 3, 1, b"\0\x06\0\0"))
    data = encoded(Image.fromarray(photo()).convert(mode), "JPEG", exif=exif, quality=95)
    upright = UPRIGHT[6](photo())
    assert_close(decode(data, ImageShape(*upright.shape)), upright, 25)
    assert read_header(data) == ("JPEG", WIDTH, HEIGHT)
    shrunk = shrink(data, HEIGHT // 2)
    assert shrunk is not None and shrunk.shape == (WIDTH // 2, HEIGHT // 2, 3)


@pytest.mark.parametrize(("side", "limit"), [(16_300, ""), (16_400, "268,435,456")])
@pytest.mark.parametrize("exif", [b"", exif_block((0x0112, 3, 1, b"\0\x06\0\0"))], ids=["upright", "on its side"])
def test_jpegs_of_268_million_pixels_are_decoded_and_no_larger_ones(
    side: int, limit: str, exif: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = jpeg_bomb(side)
    data = with_segment(bomb, exif) if exif else bomb
    if limit:
        with pytest.raises(BadImage, match=f"the image is too large: .* at most {limit} are decoded"):
            decode(data, SHAPE)
    else:
        monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args, **options: photo())
        shape = UPRIGHT[6 if exif else 1](photo()).shape
        assert (decode(data, ImageShape(*shape)) == UPRIGHT[6 if exif else 1](photo())).all()


def halves(depth: int, left: int, right: int) -> bytes:
    """Return the rows of a grey PNG of 16 x 4 pixels, whose left half has one value and whose right half another."""
    per_byte = 8 // depth
    row = b"".join(
        bytes([sum(value << depth * at for at in range(per_byte))]) * (8 // per_byte) for value in (left, right)
    )
    return zlib.compress((b"\0" + row) * 4)


@pytest.mark.parametrize(("depth", "left", "right"), [(1, 0, 1), (1, 1, 0), (2, 1, 2), (4, 5, 10), (8, 80, 160)])
def test_the_transparent_value_of_a_grey_png_becomes_white(depth: int, left: int, right: int) -> None:
    data = png(16, 4, depth, 0, halves(depth, left, right), struct.pack(">H", left))
    for pixels in (decode(data, ImageShape(4, 16, 1)), shrink(data, 2)):
        assert pixels is not None
        assert set(pixels[:, : pixels.shape[1] // 4].flat) == {255}
        assert set(pixels[:, -pixels.shape[1] // 4 :].flat) == {right * 255 // (2**depth - 1)}


def test_a_transparent_colour_of_16_bits_becomes_white_where_all_bits_are_its_own() -> None:
    colours = [(0x1234, 0x5678, 0x9ABC), (0x1200, 0x5678, 0x9ABC), (0x3400, 0x7800, 0xBC00), (0x1234, 0x5678, 0x9ABC)]
    rows = b"\0" + b"".join(struct.pack(">3H", *colour) for colour in colours)
    data = png(4, 1, 16, 2, zlib.compress(rows), struct.pack(">3H", *colours[0]))
    expected = [[255] * 3, [0x12, 0x56, 0x9A], [0x34, 0x78, 0xBC], [255] * 3]
    assert decode(data, ImageShape(1, 4, 3)).tolist() == [expected]


@pytest.mark.parametrize("transparent", [None, 3])
def test_nothing_is_beside_a_frame_that_is_smaller_than_its_gif(transparent: int | None) -> None:
    options = {} if transparent is None else {"transparency": transparent}
    image = Image.fromarray(np.arange(32, dtype=np.uint8).reshape(4, 8) % 7, "P")
    image.putpalette([value for colour in range(7) for value in (30 * colour, 10, 200)])
    data = bytearray(encoded(image, "GIF", **options))
    data[6:10] = struct.pack("<HH", 12, 10)
    start = data.index(struct.pack("<B4H", 0x2C, 0, 0, 8, 4))
    data[start + 1 : start + 5] = struct.pack("<HH", 3, 5)
    expected = np.full((10, 12, 3), 255, np.uint8)
    colours = np.asarray(image.convert("RGB"))
    expected[5:9, 3:11] = np.where((np.asarray(image) == transparent)[..., None], 255, colours)
    assert_close(decode(bytes(data), ImageShape(10, 12, 3)), expected, 0)


def test_colour_profiles_are_not_used() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    for format, options in (("PNG", {}), ("JPEG", {"quality": 100, "subsampling": 0}), ("WEBP", {"lossless": True})):
        data = encoded(photo(), format, icc_profile=profile, **options)
        assert_close(decode(data, SHAPE), photo(), 6 if format == "JPEG" else 0)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_an_image_of_one_pixel_is_scaled_to_the_shape(format: str) -> None:
    shown = decode(encoded(np.full((1, 1, 3), 200, np.uint8), format), SHAPE)
    assert shown.shape == (HEIGHT, WIDTH, 3) and np.abs(shown.astype(int) - 200).max() <= 4


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_a_large_image_is_scaled_to_the_shape(format: str) -> None:
    large = np.asarray(Image.fromarray(photo()).resize((WIDTH * 20, HEIGHT * 10), Image.Resampling.BICUBIC))
    assert_close(decode(encoded(large, format, **({"quality": 95} if format == "JPEG" else {})), SHAPE), photo(), 20)


# Files that are refused.


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"this is no image", "the file is text, such as an error of a server or a path"),
        (b"P5 16 16 255\n" + bytes(range(256)), "not an image that can be read"),
        (b"<!DOCTYPE html><html></html>", "the file is text, such as a page of a web server"),
        (
            b"\x1f\x8b\x08\0" + bytes(30),
            "the file is compressed with gzip; decompress it",
        ),  # objects stored by gsutil -Z
        (bytes(128) + b"DICM" + bytes(30), "the file is DICOM, which is not read; convert it to PNG or JPEG"),
        (bytes(4) + b"ftyphevc" + bytes(30), "the file is HEIC, which is not read; convert it to PNG or JPEG"),
        (b"\xff\xd8\xff", "the file is a damaged image, or of a rare kind"),
        (encoded(photo(), "PNG").replace(b"IHDR", b"IHDX"), "the file is a damaged image"),
        (bytes(1000), "the file is nothing but zeros"),
        (encoded(photo(), "JPEG2000"), "the file is JPEG 2000, which is not read"),
        (b"\xff\x0a" + bytes(40), "the file is JPEG XL"),
        (b"\0\0\0\x18ftypisom" + bytes(40), "the file is a video or the like"),
        (encoded(photo(), "TIFF"), "the file is TIFF, which is not read"),
        (b"\0\0\0\x18ftypheic" + bytes(40), "the file is HEIC"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "a pointer of Git LFS"),
        (encoded(photo(), "EPS"), "the file is text"),  # Pillow would start another program.
    ],
)
def test_files_that_are_not_images_are_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BadImage, match=reason):
        decode(data, SHAPE)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "BMP"])
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_truncated_files_are_refused(format: str, kept: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    data = encoded(noise, format)
    with pytest.raises(BadImage, match=r"cannot be decoded: \w|a damaged image"):
        decode(data[: int(len(data) * kept)], SHAPE)


def test_truncated_jpegs_with_exif_or_progressive_order_are_refused() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    for options in ({"exif": exif}, {"progressive": True}):
        data = encoded(photo(), "JPEG", **options)
        with pytest.raises(BadImage, match="cannot be decoded"):
            decode(data[: -len(data) // 4], SHAPE)


@pytest.mark.parametrize(
    "bomb",
    [
        pytest.param(lambda: black_png(20_000), id="png"),
        pytest.param(lambda: black_png(12_000), id="png below Pillow's limit"),
        pytest.param(lambda: jpeg_bomb(65_500), id="jpeg"),
        pytest.param(lambda: jpeg_bomb(12_000, progressive=True), id="progressive jpeg below Pillow's limit"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_decompression_bomb_is_refused_by_its_header(
    bomb: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bomb()
    assert len(data) < 2_000_000
    for decoder, name in ((ImageFile.ImageFile, "load"), (simplejpeg, "decode_jpeg")):
        monkeypatch.setattr(decoder, name, lambda *args, **options: pytest.fail("it was decoded"))
    with pytest.raises(BadImage, match="the image is too large: "):
        decode(data, SHAPE)


def test_any_damaged_file_is_decoded_or_refused() -> None:
    chance = random.Random(0)
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    files = [encoded(noise, format, **options) for format, options in FUZZED]
    refused, reasons = 0, set[str]()
    for round_ in range(600):
        data = bytearray(files[round_ % len(files)])
        for _ in range(chance.choice((1, 3, 20))):
            data[chance.randrange(chance.choice((60, len(data))))] = chance.randrange(256)
        try:
            assert decode(bytes(data), SHAPE).shape == (HEIGHT, WIDTH, 3)
        except BadImage as error:
            refused += 1
            reasons.add(str(error))
    assert 100 < refused < 600 and all(reasons) and not any("\n" in reason for reason in reasons)


FUZZED: list[tuple[str, dict[str, Any]]] = [
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("JPEG", {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"}),
    ("PNG", {}),
    ("GIF", {}),
    ("WEBP", {"lossless": True}),
    ("WEBP", {}),
    ("BMP", {}),
]


def test_the_suffix_does_not_matter(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for name, format in (("a/1.png", "JPEG"), ("a/2.jpg", "PNG"), ("b/3.jpeg", "GIF"), ("b/4.gif", "TIFF")):
        store.put(name, encoded(photo(), format))
    images, bad = ImageReader(store, SHAPE).read(build_manifest(store))
    assert bad == {3: "the file is TIFF, which is not read; convert it to PNG or JPEG"}
    assert not images[3].any()
    assert_close(images[0], photo(), 30)
    assert_close(images[1], photo(), 0)
