"""Training images that a worker's device decodes, here the CPU in its place: all but nvJPEG itself."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from raytrain.config import ResolvedConfig
from raytrain.config.network import Interpolation
from raytrain.data.blocks import Block, CachedBlocks, Files, LocalBatch, batches_from_stream, to_block, to_table
from raytrain.data.dataset import evaluation_format, open_dataset, training_format
from raytrain.data.images.crop_box import Cropping, cut
from raytrain.data.images.decode import decode, plain_jpeg_size
from raytrain.data.images.image_format import ImageShape
from raytrain.data.plan.batch_plan import BatchPlan, GlobalBatch
from raytrain.data.plan.partition import CacheOrder, Partition
from raytrain.data.plan.permutation import Int64s
from raytrain.errors import UsageError
from raytrain.launch import option_checks, prepare
from raytrain.launch.resumed_options import resumed_options
from raytrain.loader import machine
from raytrain.loader.choose_cache import choose_cache
from raytrain.loader.machine_batches import SharedBlocks
from raytrain.recipes import custom
from raytrain.runs.logs import STARTUP
from raytrain.training.batches import device_decoder
from raytrain.training.batches.device_decoder import DeviceDecoder, cut_and_resize
from tests.helpers.image_files import encoded, jpeg_bomb, photo, png, with_segment
from tests.helpers.memory_runs import Recorder
from tests.helpers.photographs import as_jpeg, draw
from tests.helpers.small_runs import make_images
from tests.helpers.torchcodec_here import needs_torchcodec

CPU = torch.device("cpu")


def oriented(jpeg: bytes, orientation: int) -> bytes:
    tags = b"II*\0" + struct.pack("<IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    return with_segment(jpeg, b"Exif\0\0" + tags)


def plain(height: int = 24, width: int = 40, seed: int = 0) -> bytes:
    return as_jpeg(draw(height, width, seed))


def config(**options: Any) -> ResolvedConfig:
    base = {"name": "run", "device": "cpu", "batch_size": 8, "learning_rate": 0.1, "precision": "float32"}
    pixels = {"mean": (0.5,) * 3, "std": (0.2,) * 3, "image_size": (16, 20), "decoder": "gpu", "resizer": "pillow"}
    return ResolvedConfig(**{**base, **pixels, **options})


class Source:
    """Knows keys, and has no images."""

    def keys(self, part: str, samples: list[int]) -> list[str]:
        return [f"{sample}.jpg" for sample in samples]

    train = held_out = None


def decoder(recorder: Recorder, **options: Any) -> DeviceDecoder:
    source: Any = Source()
    return DeviceDecoder(config(**options), source, CPU, recorder)


def files_of(contents: Sequence[bytes]) -> Files:
    ends = np.cumsum([len(content) for content in contents])
    lengths = np.diff(ends, prepend=0)
    return Files(np.frombuffer(b"".join(contents), np.uint8), ends - lengths, lengths)


def local_batch(contents: Sequence[bytes], epoch: int = 0, microbatches: tuple[int, ...] = ()) -> LocalBatch:
    draws = np.arange(100, 100 + len(contents))
    batch = GlobalBatch(0, epoch, 0, len(contents))
    return LocalBatch(batch, files_of(contents), draws % 3, draws, draws, microbatches or (len(contents),))


@pytest.fixture
def by_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Decode with libjpeg-turbo in place of nvJPEG, which refuses a comment "refused"; the sizes of its batches."""
    import simplejpeg

    num_files: list[int] = []

    def decode_jpegs(files: Sequence[bytes], channels: int, device: torch.device) -> list[Tensor]:
        num_files.append(len(files))
        if any(b"refused" in file for file in files):
            raise RuntimeError("nvjpegDecode failed: 4")
        kind = "GRAY" if channels == 1 else "RGB"
        pixels = [simplejpeg.decode_jpeg(file, kind, fastdct=False, fastupsample=False) for file in files]
        return [torch.from_numpy(image).permute(2, 0, 1) for image in pixels]

    monkeypatch.setattr(device_decoder, "decode_jpegs", decode_jpegs)
    return num_files


# What a device decodes.


@pytest.mark.parametrize(
    ("file", "size"),
    [
        (plain(), (24, 40)),
        (as_jpeg(draw(24, 40)[:, :, 0]), (24, 40)),
        (oriented(plain(), 3), (24, 40)),
        (oriented(plain(), 6), (40, 24)),
        (encoded(photo(), "JPEG", progressive=True), "progressive JPEG"),
        (encoded(Image.fromarray(photo()).convert("CMYK"), "JPEG"), "JPEG in RGB or CMYK"),
        (encoded(photo(), "JPEG", keep_rgb=True), "JPEG in RGB or CMYK"),
        (plain()[:-20], "JPEG without an end"),
        (with_segment(plain()[:-20], b"Exif\0\0" + plain(16, 16)), "JPEG without an end"),  # of a thumbnail
        (plain().replace(b"\xff\xc0", b"\xff\xc1"), "JPEG of a rare kind"),
        (plain().replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x0c"), "JPEG of a rare kind"),  # 12 bits
        (plain()[:100], "JPEG of a rare kind"),
        (encoded(photo(), "PNG"), "PNG"),
        (png(2, 2, 16, 0, b""), "PNG"),
        (encoded(photo(), "WEBP"), "WebP"),
        (encoded(photo(), "GIF"), "GIF"),
        (b"<html>", "no image"),
        (b"", "no image"),
    ],
    ids=lambda value: str(value)[:40] if not isinstance(value, bytes) else "",
)
def test_plain_jpegs_are_for_the_device_and_all_others_say_what_they_are(file: bytes, size: object) -> None:
    assert plain_jpeg_size(file) == size


CROPPINGS = (
    Cropping(),
    Cropping("crop", 0.875),
    Cropping("pad"),
    *(Cropping(crop_seed=seed) for seed in range(8)),
)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("shape", [ImageShape(24, 24, 3), ImageShape(90, 40, 1), ImageShape(61, 83, 3)], ids=str)
def test_crops_are_those_of_pillow_and_the_same_in_any_batch(shape: ImageShape, interpolation: Interpolation) -> None:
    # Pillow begins with the columns of some images, and rounds and clips in between; nothing here needs to be clipped.
    images = [64 + draw(*size)[:, :, : shape.channels] // 2 for size in ((61, 83), (130, 40), (7, 200))]
    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in images]
    for cropping in CROPPINGS:
        crops = dataclasses.replace(cropping, interpolation=interpolation).crops(np.arange(3), epoch=2)
        boxes = [crop(image.shape[:2], shape.size) for crop, image in zip(crops, images, strict=True)]
        together = cut_and_resize(tensors, boxes, shape.size)
        for image, tensor, box, resized in zip(images, tensors, boxes, together, strict=True):
            assert (cut_and_resize([tensor], [box], shape.size)[0] == resized).all()
            levels = np.abs(cut(image, box, shape.size).astype(int) - resized.numpy())
            assert levels.max() <= (1 if interpolation == "bilinear" else 2)


@pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="torch 2.8 has no fake GPU without a GPU")
def test_crops_of_images_on_a_gpu_stay_there() -> None:
    with FakeTensorMode():  # tensors that are on a GPU in name only
        images = [torch.zeros(3, *size, dtype=torch.uint8, device="cuda") for size in ((20, 30), (50, 10))]
        boxes = [Cropping().crop((image.shape[1], image.shape[2]), (16, 24)) for image in images]
        crops = cut_and_resize(images, boxes, (16, 24))
        assert (crops.device.type, crops.dtype, crops.shape) == ("cuda", torch.uint8, (2, 16, 24, 3))


@pytest.mark.not_quick
def test_a_batch_is_what_the_cpu_decodes_of_it(by_simplejpeg: list[int]) -> None:
    recorder = Recorder()
    contents = [plain(24, 40), encoded(photo(), "PNG"), plain(30, 21, 1), encoded(photo(), "JPEG", progressive=True)]
    grey = {"channels": 1, "mean": (0.5,), "std": (0.2,)}
    for options, channels in (({"random_resized_crop": True}, 3), ({"resize": "pad"}, 3), (grey, 1)):
        decode_files = decoder(recorder, **options, image_size=(20, 36))  # so large that a CPU decodes in full size
        batch = decode_files(local_batch(contents, epoch=3))
        shape = ImageShape(20, 36, channels)
        crops = training_format(config(**options, image_size=shape.size)).cropping.crops(batch.draws, 3)
        for file, crop, pixels in zip(contents, crops, batch.images, strict=True):
            assert np.abs(decode(file, shape, crop).astype(int) - pixels.numpy()).max() <= 1
        decode_files.close()
    assert recorder.on_cpu == {"PNG": 3, "progressive JPEG": 3} and not recorder.skipped
    assert by_simplejpeg == [1, 2] * 3  # a trial, and both plain ones at once


@pytest.mark.not_quick
def test_what_the_device_refuses_goes_to_the_cpu_and_what_both_refuse_is_left_out(by_simplejpeg: list[int]) -> None:
    recorder = Recorder()
    refused = with_segment(plain(), b"refused")
    broken = with_segment(jpeg_bomb(50_000), b"refused")  # its header is read before anything is allocated for it
    contents = [plain(), refused, b"<html>", plain(seed=2), broken, plain()[:-20]]
    decode_files = decoder(recorder)
    batch = decode_files(local_batch(contents, microbatches=(3, 3)))
    decode_files.close()
    assert batch.draws.tolist() == batch.samples.tolist() == [100, 101, 103]
    assert batch.microbatch_sizes == (2, 1) and batch.images.shape == (3, 16, 20, 3)
    assert (batch.images[0].int() - batch.images[1].int()).abs().max() <= 1
    assert by_simplejpeg == [1, 3, 1, 1, 1]  # a trial, all plain ones, and each alone
    assert recorder.on_cpu == {"JPEG that nvJPEG refuses": 1}  # of the others, the CPU decodes none, either
    reasons = {image.key: image.reason for image in recorder.skipped}
    assert list(reasons) == ["102.jpg", "104.jpg", "105.jpg"]
    assert "text" in reasons["102.jpg"] and "too large" in reasons["104.jpg"] and "decoded" in reasons["105.jpg"]


def test_a_device_gets_no_more_pixels_at_a_time_than_it_has_room_for(
    by_simplejpeg: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [plain(24, 40, seed) for seed in range(5)]
    whole = decoder(Recorder())(local_batch(contents)).images
    monkeypatch.setattr(device_decoder, "CHUNK_BYTES", 2 * 24 * 40 * 3)
    assert (decoder(Recorder())(local_batch(contents)).images == whole).all()
    assert by_simplejpeg == [1, 5, 1, 2, 2, 1]


@pytest.mark.not_quick
def test_an_image_of_another_size_than_its_header_says_goes_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_decoder, "decode_jpegs", lambda files, *_: [torch.zeros(3, 8, 8, dtype=torch.uint8)])
    recorder = Recorder()
    decode_files = decoder(recorder)
    assert decode_files(local_batch([plain()])).images.float().mean() > 50
    assert recorder.on_cpu == {"JPEG that nvJPEG refuses": 1}
    decode_files.close()


@needs_torchcodec
def test_torchcodec_decodes_upright() -> None:
    stored, on_its_side, mirrored = device_decoder.decode_jpegs(
        [plain(), oriented(plain(), 6), oriented(plain(), 2)], 3, CPU
    )
    assert stored.shape == (3, 24, 40) and stored.dtype == torch.uint8
    assert (on_its_side == stored.rot90(-1, (1, 2))).all() and (mirrored == stored.flip(2)).all()


def test_a_device_that_decodes_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(files: Sequence[bytes], channels: int, device: torch.device) -> list[Tensor]:
        raise RuntimeError("check failed\ntorchcodec was not compiled with nvJPEG support")

    monkeypatch.setattr(device_decoder, "decode_jpegs", fail)
    with pytest.raises(UsageError, match=r"^--decoder is gpu.*\(torchcodec was not compiled.*give --decoder cpu\.$"):
        decoder(Recorder())


# Who decodes.


@pytest.mark.parametrize(
    ("cuda", "codec", "problem"),
    [
        ("'13.2'", "0.17.0+cu130", None),
        ("'12.8'", "1.0.0+cu126", None),
        ("'12.8'", "0.17.0+cu130", "torchcodec 0.17.0+cu130 is built for CUDA 13, and torch for CUDA 12 (install both"),
        ("'13.2'", "0.17.0+cpu", "torchcodec 0.17.0+cpu is built for CPUs, and torch for CUDA 13 (install both"),
        ("None", "0.17.0+cu130", "torchcodec 0.17.0+cu130 is built for CUDA 13, and torch for CPUs (install both"),
        ("'13.2'", "0.15.2+cu130", "torchcodec 0.15.2+cu130 decodes no images (install raytrain[gpu-decoder]"),
        ("'13.2'", None, "torchcodec is not installed (install raytrain[gpu-decoder]"),
    ],
)
def test_a_machine_says_why_its_gpus_decode_nothing(
    cuda: str, codec: str | None, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"torch": f"__version__ = '2.15.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"}
    if codec is not None:
        versions["torchcodec"] = f"__version__ = '{codec}'\n"
    for name, text in versions.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "version.py").write_text(text)

    def distribution(name: str) -> SimpleNamespace:
        if name not in versions:
            raise PackageNotFoundError(name)
        return SimpleNamespace(locate_file=lambda path: tmp_path / path)

    assert machine.gpu_decoder_problem("cpu") == "the device is a CPU"
    monkeypatch.setattr(machine, "distribution", distribution)
    said = machine.gpu_decoder_problem("cuda")
    assert said is None if problem is None else said is not None and said.startswith(problem)


@pytest.mark.not_quick
def test_a_run_decodes_on_gpus_if_all_of_them_can_and_keeps_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STARTUP, "handlers", [caplog.handler])  # as a terminal has one
    monkeypatch.setattr(STARTUP, "propagate", False)
    (tmp_path / "images").mkdir()
    options = {"data": str(make_images(tmp_path / "images", 6)), "storage": str(tmp_path), "name": "run"}
    asked = custom(**options, batch_size=2, learning_rate=0.1, workers=1, channels_last=False)
    problems: dict[str, str | None] = {"fits": None, "lacks": "on the node 10.0.0.7 torchcodec is not installed"}
    with prepare.prepare(prepare.settle_options(asked)) as prepared, caplog.at_level("INFO", "raytrain.startup"):

        def decided(decoder: str, problem: str, device: str = "cuda", **others: Any) -> ResolvedConfig:
            config = dataclasses.replace(prepared.config, decoder=decoder, **others)
            run = dataclasses.replace(prepared, config=config)
            return run.resolve(1, device, lambda device: "float32", lambda: "pillow", lambda device: problems[problem])

        assert decided("auto", "fits").decoder == decided("gpu", "fits").decoder == "gpu"
        assert decided("cpu", "fits").decoder == "cpu" and not caplog.messages
        assert decided("auto", "lacks").decoder == "cpu"
        assert decided("auto", "fits", transforms="mine.py:own").decoder == "cpu"
        assert caplog.messages == [
            "images are decoded by the CPUs: on the node 10.0.0.7 torchcodec is not installed",
            "images are decoded by the CPUs: --transforms changes images on the CPU",
        ]
        with pytest.raises(UsageError, match=r"^--decoder is gpu.* 10\.0\.0\.7 torchcodec is not.*--decoder cpu"):
            decided("gpu", "lacks")
        before = decided("auto", "fits")

    # A resume keeps what was decided, and changes it if it is told to.
    assert resumed_options(asked, before).decoder == "gpu"
    assert resumed_options(dataclasses.replace(asked, decoder="cpu"), before).decoder == "cpu"
    assert training_format(before).as_files and not evaluation_format(before).as_files


def test_options_that_do_not_go_with_a_gpu_that_decodes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"^--decoder is gpu, and --transforms mine\.py:own changes.*omit one of them"):
        config(transforms="mine.py:own")
    with pytest.raises(UsageError, match=r"^--decoder is gpu, .* and the device is a CPU; give --decoder cpu"):
        option_checks.check_options(custom(data="images", decoder="gpu", device="cpu"))
    crops = {"random_resized_crop": True, "cache": "memory"}
    with pytest.raises(UsageError, match=r"--decoder gpu to keep files there"):
        custom(data="images", **crops)
    assert config(**crops).decoder == "gpu"


@pytest.mark.not_quick
def test_what_is_kept_in_memory_are_the_files(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    make_images(tmp_path / "images", 30)
    asked = custom(data=str(tmp_path / "images"), batch_size=4, epochs=3, random_resized_crop=True, decoder="gpu")
    data = open_dataset(asked)
    resolved = asked.resolve(name="run", num_workers=1, device="cpu", mean=data.mean, std=data.std)
    file_bytes, pixel_bytes = int(data.train.sizes_bytes.sum()), len(data.validation) * 224 * 224 * 3
    assert data.num_bytes == (file_bytes, pixel_bytes)
    assert choose_cache(resolved, data, 0, 3 * (file_bytes + pixel_bytes)).train is not None
    on_cpu = dataclasses.replace(resolved, decoder="cpu")
    assert choose_cache(on_cpu, data.decoded_as(on_cpu), 0, 1 << 40).train is None


# How files travel.


def block_of(draws: Int64s, epoch: int = 0) -> Block:
    return Block(files_of([bytes([65 + draw]) * (draw + 1) for draw in draws.tolist()]), 10 * draws, draws)


def test_files_are_split_joined_and_chosen_as_rows_of_pixels_are() -> None:
    plan = BatchPlan(num_samples=10, batch_size=4, epochs=2, seed=0)
    partition = Partition(plan, 0, (1.0,))
    blocks = [block_of(partition.row_draws(epoch, start, start + 3)) for epoch in (0, 1) for start in (0, 3, 6, 9)]
    blocks[1].labels[0] = -1
    order = CacheOrder(plan, 0, rows_per_block=3)
    kept = CachedBlocks(lambda number: block_of(order.draws(number)), order)
    missing = blocks[1].draws[0]
    seen: list[int] = []
    for local in batches_from_stream(partition, blocks, 0):
        assert local.images.contents() == [bytes([65 + sample]) * (sample + 1) for sample in local.samples.tolist()]
        assert kept.gather(local.samples).images.contents() == local.images.contents()
        seen += local.samples.tolist()
    assert sorted([*seen, missing % 10]) == sorted(2 * list(range(10)))


def test_a_table_has_the_files_of_a_block_without_a_copy() -> None:
    block = block_of(np.array([3, 0, 5]))
    assert isinstance(block.images, Files)
    block.images.lengths[1] = 0  # it could not be read
    read = to_block(to_table(block), ImageShape(1, 1, 1))
    assert isinstance(read.images, Files)
    assert read.images.contents() == [b"DDDD", b"", b"FFFFFF"]
    assert (read.labels == block.labels).all() and (read.draws == block.draws).all()
    assert np.shares_memory(read.images.data, block.images.data)


def test_processes_of_a_machine_share_the_files_of_blocks(tmp_path: Path) -> None:
    order = CacheOrder(BatchPlan(num_samples=10, batch_size=4, epochs=1, seed=0), 0, rows_per_block=4)
    sizes_bytes = np.arange(1, 11)
    first = SharedBlocks(tmp_path / "train", order, ImageShape(1, 1, 1), block_of, sizes_bytes)
    first.read_ahead()

    def never(draws: Int64s, epoch: int) -> Block:
        raise AssertionError

    second = SharedBlocks(tmp_path / "train", order, ImageShape(1, 1, 1), never, sizes_bytes)
    for number in range(3):
        block, expected = second(number), block_of(order.draws(number))
        assert isinstance(block.images, Files) and isinstance(expected.images, Files)
        assert block.images.contents() == expected.images.contents()
        assert (block.labels == expected.labels).all()
