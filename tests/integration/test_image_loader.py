"""`raytrain.ImageLoader`: the same batches on any number of processes, in mid-epoch after a resume, without a run."""

from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor

import raytrain
from raytrain import ImageLoader, StorageError, UsageError
from raytrain.storage.open import open_store
from raytrain.training.exact import images_of_tensors
from tests.helpers.folder_runs import folder_run, train_here
from tests.helpers.gloo_processes import run_in_processes
from tests.helpers.small_runs import make_images, put_images
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.not_quick

SIZE = {"image_size": 12, "mean": (0.4,) * 3, "std": (0.2,) * 3}
NUM_TRAINED = 81  # a tenth of the 90 images is held out


def loaders(images: Path | str, world_size: int, **options: Any) -> list[ImageLoader]:
    """Return the loaders of ``world_size`` processes, all in this one."""
    options = {"batch_size": 20, **SIZE, **options}
    return [ImageLoader(images, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def global_batches(loaders: list[ImageLoader]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield samples, images and labels of each step of an epoch, of all processes together."""
    for batches in zip(*loaders, strict=True):
        used = [batch for batch in batches if batch.num_used]
        samples = [sample for batch in used for sample in batch.samples.tolist()]
        yield samples, torch.cat([batch.images for batch in used]), torch.cat([batch.labels for batch in used])


def epoch(loaders: list[ImageLoader]) -> list[tuple[list[int], Tensor, Tensor]]:
    return list(global_batches(loaders))


def assert_same(one: Any, other: Any) -> None:
    assert len(one) == len(other)
    for (samples, pixels, labels), (other_samples, other_pixels, other_labels) in zip(one, other, strict=True):
        assert samples == other_samples
        assert torch.equal(pixels, other_pixels)
        assert torch.equal(labels, other_labels)


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_each_sample_comes_once_an_epoch_in_the_same_batches_on_any_number_of_processes(
    images: Path, cache: str
) -> None:
    options = {"cache": cache, "flip": "random", "translate": 2}
    alone, three = loaders(images, 1, **options), loaders(images, 3, **options)
    first, second = epoch(alone), epoch(alone)
    assert sorted(sample for samples, _, _ in first for sample in samples) == list(range(NUM_TRAINED))
    assert [len(samples) for samples, _, _ in first] == [20, 20, 20, 20, 1]
    assert [samples for samples, _, _ in first] != [samples for samples, _, _ in second]
    assert_same(epoch(three), first)
    assert_same(epoch(three), second)
    for loader in (*alone, *three):
        loader.close()


def test_a_state_goes_on_in_mid_epoch_on_another_number_of_processes(images: Path) -> None:
    whole = epoch(loaders(images, 1))
    two = loaders(images, 2)
    before = [next(batches) for batches in [global_batches(two)] for _ in range(3)]
    states = [loader.state_dict() for loader in two]
    assert states[0] == states[1] and states[0]["next_step"] == 3

    resumed = loaders(images, 3)
    for loader in resumed:
        loader.load_state_dict(states[0])
    assert_same([*before, *epoch(resumed)], whole)
    assert [len(loader) for loader in resumed] == [5] * 3 and {loader.epoch for loader in resumed} == {1}


def test_a_loop_that_leaves_an_epoch_begins_the_next_one(images: Path) -> None:
    (left,), (whole,) = loaders(images, 1), loaders(images, 1)
    batch = next(iter(left))
    pixels, labels = batch
    assert batch[0] is pixels and batch[1] is labels  # as scripts with torch's DataLoader say, too
    epoch([whole])
    assert_same(epoch([left]), epoch([whole]))


def test_a_loop_after_one_that_failed_reads_anew(images: Path, tmp_path: Path) -> None:
    fault = tmp_path / "fault"

    def changed(image: Tensor) -> Tensor:
        if fault.exists():
            raise OSError("the server of the masks does not answer")
        return image

    fault.touch()
    with ImageLoader(images, batch_size=20, transforms=changed, **SIZE) as loader:
        with pytest.raises(Exception, match="the server of the masks does not answer"):
            epoch([loader])
        fault.unlink()
        assert len(epoch([loader])) == 5


def test_the_shorter_last_batch_can_be_left_out(images: Path) -> None:
    (loader,) = loaders(images, 1, drop_last=True)
    assert len(loader) == 4
    assert [len(samples) for samples, _, _ in (*epoch([loader]), *epoch([loader]))] == [20] * 8
    assert loader.epoch == 2


def test_a_state_of_the_last_step_goes_on_with_the_next_epoch(images: Path) -> None:
    """Also if a shorter batch follows, which is left out."""
    (left,), (alone,), (resumed,) = (loaders(images, 1, drop_last=True) for _ in range(3))
    states = [left.state_dict() for _ in left]
    assert states[-1]["next_step"] == 5 and left.epoch == 1
    epoch([alone])
    second = epoch([alone])
    for next_step in (5, 4):  # the latter of a loader that leaves nothing out
        resumed.load_state_dict({**states[-1], "next_step": next_step})
        assert resumed.epoch == 1
        assert_same(epoch([resumed]), second)


def test_epochs_come_to_an_end_if_there_is_a_number_of_them(images: Path) -> None:
    (loader,) = loaders(images, 1, epochs=1)
    epoch([loader])
    with pytest.raises(UsageError, match="epochs is 1, and the loop asks for another one"):
        next(iter(loader))


def test_the_keys_of_a_batch_are_those_of_its_images(images: Path) -> None:
    loader = ImageLoader(images, batch_size=20, image_size=12, mean=(0.0,) * 3, std=(1.0,) * 3)
    for batch in (*loader, *loader.validation):
        keys = loader.keys(batch)
        pixels = [np.asarray(Image.open(images / key)) for key in keys]
        expected = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255
        torch.testing.assert_close(batch.images, expected)
    loader.close()


def test_test_images_are_each_on_one_process(images: Path) -> None:
    two = loaders(images, 2)
    for _ in range(2):
        found = [sample for loader in two for batch in loader.validation for sample in batch.samples.tolist()]
        assert sorted(found) == list(range(9)) and two[0].validation.num_images == 9


def test_test_images_may_outlive_the_name_of_their_loader(images: Path) -> None:
    test = ImageLoader(images, batch_size=20, **SIZE).validation
    gc.collect()
    assert sum(batch.num_used for batch in test) == 9


def test_batches_are_those_of_a_run(images: Path, tmp_path: Path) -> None:
    seen: list[Any] = []

    def loop(run: raytrain.Run) -> None:
        model = run.prepare(run.build_model())
        optimizer = run.prepare(run.build_optimizer(model))
        for of_run in run.epochs():
            for batch in of_run:
                seen.append((batch.samples.tolist(), batch.images, batch.labels))
                run.loss(model(batch.images), batch.targets).backward()
                optimizer.step()

    options: dict[str, Any] = {"flip": "alternating", "rotation": 10.0, "mixup": 0.2, "precision": "float32"}
    train_here(folder_run(images, tmp_path, "run", loop=loop, **options))
    del options["precision"]
    (loader,) = loaders(images, 1, translate=1, epochs=2, **options)
    assert_same([*epoch([loader]), *epoch([loader])], seen)


def test_a_bucket_is_read_with_the_credentials_of_the_environment(images: Path, s3_url: str) -> None:
    put_images(images, open_store(s3_url))
    (bucket,), (folder,) = loaders(s3_url, 1), loaders(images, 1)
    assert_same(epoch([bucket]), epoch([folder]))


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_images_that_cannot_be_read_are_left_out_and_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cache: str
) -> None:
    images = make_images(tmp_path)
    for number in (0, 1):
        (images / "red" / f"00{number}.png").write_bytes(b"no image")
    (loader,) = loaders(images, 1, max_bad_fraction=0.05, cache=cache)
    with caplog.at_level(logging.WARNING, "raytrain"):
        for _ in range(2):
            num_read = sum(len(samples) for samples, _, _ in epoch([loader]))
            assert num_read + sum(batch.num_used for batch in loader.validation) == 88
    assert sorted(image.key for image in loader.skipped) == ["red/000.png", "red/001.png"]
    assert caplog.text.count("Images left out so far: 1") == caplog.text.count("Images left out so far: 2") == 1


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_too_many_images_that_cannot_be_read_end_a_loop(tmp_path: Path, cache: str) -> None:
    images = make_images(tmp_path)
    for number in (0, 1):
        (images / "red" / f"00{number}.png").write_bytes(b"no image")
    (strict,) = loaders(images, 1, cache=cache)
    # Other processes fill the cache, and may have found both images before the loop asks for any.
    with suppress(UsageError):
        next(iter(strict.validation))
    wait_for(lambda: cache == "none" or len(strict.skipped) == 2, "they are not reported")
    with pytest.raises(UsageError, match=r"of 90 images cannot be read, such as red/00\d.png .* max_bad_fraction"):
        epoch([strict])


@pytest.mark.parametrize("cache", ["none", "memory"])
@pytest.mark.usefixtures("new_decoders")
def test_an_image_that_kills_its_decoder_is_left_out(
    cache: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "helpers" / "deadly_decoder")
    images = make_images(tmp_path)
    Image.new("RGB", (12, 12)).save(images / "red" / "deadly.jpg", comment=b"deadly:segfault")
    (loader,) = loaders(images, 1, max_bad_fraction=0.05, cache=cache)
    read = sum(len(samples) for samples, _, _ in epoch([loader])) + sum(batch.num_used for batch in loader.validation)
    assert read == 90
    assert [image.key for image in loader.skipped] == ["red/deadly.jpg"]
    if cache == "none":  # of a kept block, this process may have had the image decoded in isolation first
        assert "killed by SIGSEGV; images are decoded in isolation now" in caplog.text


# Bad input.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_workers": 4}, r"no option num_workers \(all CPUs that are free read images ahead;"),
        ({"learning_rate": 0.1}, "ImageLoader has no option learning_rate; it takes those of the data"),
        ({"flipp": "random"}, r"no option flipp \(did you mean flip\?\)"),
        ({"rank": 1}, "only one of rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank 2 and world_size 2; the ranks of N processes are 0 to N-1"),
        ({"rank": -1, "world_size": 2}, "rank -1 and world_size 2"),
        ({"rank": 0, "world_size": 0}, "rank 0 and world_size 0"),
        ({"image_size": "8..12"}, "grows with the epochs; give epochs"),
        ({"rank": "0", "world_size": "2"}, "rank '0' and world_size '2'; .* whole numbers"),
        ({"batch_size": 0}, "batch"),
        ({"batch_size": "8/worker"}, "batch_size is '8/worker', and ImageLoader takes a whole number"),
        ({"batch_size": 64 / 2}, "batch_size is 32.0, and ImageLoader takes a whole number"),
        ({"batch_size": 100, "drop_last": True}, "drop_last leaves out the only batch .* there are 81 training images"),
        ({"device": "gpu"}, "device is 'gpu', which torch does not know"),
        ({"transforms": [torch.clone]}, r"transforms is a list, and ImageLoader takes one function .*Compose\("),
        ({"data": None}, "--data is None; give text"),
        ({"data": ""}, "data is empty"),
    ],
)
def test_options_that_do_not_fit_are_refused(images: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ImageLoader(**{"data": images, "batch_size": 20, **options})


def test_a_folder_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="There is no folder"):
        ImageLoader(tmp_path / "nowhere", batch_size=20)


def test_a_state_of_other_images_or_batches_is_refused(images: Path, tmp_path: Path) -> None:
    state = loaders(images, 1)[0].state_dict()
    shutil.copytree(images, tmp_path / "fewer")
    (tmp_path / "fewer" / "red" / "000.png").unlink()
    others = [loaders(images, 1, batch_size=10), loaders(images, 1, seed=1), loaders(tmp_path / "fewer", 1)]
    for (loader,), name in zip(others, ("batch_size 20", "seed 0", "images 81"), strict=True):
        with pytest.raises(UsageError, match=f"of a loader with {name}"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {"model": 1}, {"next_step": -1}, {"next_step": 1.5}, 3, None])
def test_what_is_no_state_is_refused(state: Any, images: Path) -> None:
    with pytest.raises(UsageError, match="got something else than the state of a loader"):
        loaders(images, 1)[0].load_state_dict(state)


def test_two_loaders_of_one_process_have_images_of_their_own(images: Path) -> None:
    """Whatever their options, each keeps its own decoded images, and its own place."""
    (small,), (large,), (other,) = loaders(images, 1), loaders(images, 1, image_size=16), loaders(images, 1, seed=1)
    expected = [epoch(loaders(images, 1)), epoch(loaders(images, 1, image_size=16)), epoch(loaders(images, 1, seed=1))]
    found = list(zip(*map(global_batches, ([small], [large], [other])), strict=True))
    for wanted, batches in zip(expected, zip(*found, strict=True), strict=True):
        assert_same(batches, wanted)


def test_tensors_after_the_last_batch_are_not_taken_for_its_images(images: Path) -> None:
    with raytrain.ImageLoader(images, batch_size=8, image_size=12, validation_fraction=0.2) as loader:
        for split in (loader, loader.validation):
            own = [(images.clone(), len(images)) for images, _ in split]
            assert all(images_of_tensors.known_or_expected(copied, rows) is None for copied, rows in own)


def test_mixed_images_come_in_no_pair_with_labels(images: Path) -> None:
    def unpacked(batch: raytrain.Batch) -> Tensor:
        _, labels = batch
        return labels

    (loader,) = loaders(images, 1, mixup=0.2)
    for take in (unpacked, lambda batch: batch[1]):
        with pytest.raises(UsageError, match=r"take batch\.images and batch\.targets by their names"):
            take(next(iter(loader)))
        assert all(take(batch).ndim == 1 for batch in loader.validation)  # which are not mixed


def test_images_are_normalised_by_the_mean_and_std_that_a_loader_names(images: Path) -> None:
    options: dict[str, Any] = {"batch_size": 20, "image_size": 12, "validation_fraction": 0.2}
    with ImageLoader(images, **options) as loader:
        raw = ImageLoader(images, **options, mean=(0.0,) * 3, std=(1.0,) * 3)
        (normalised, _), (pixels, _) = next(iter(loader)), next(iter(raw))
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (loader.mean, loader.std))
    torch.testing.assert_close(normalised, (pixels - mean) / std)


def test_a_batch_of_another_type_has_the_same_labels_and_samples(images: Path) -> None:
    (loader,) = loaders(images, 1, cutmix=1.0)
    batch = next(iter(loader))
    moved = batch.to("cpu", torch.bfloat16, memory_format=torch.channels_last)
    assert moved.images.dtype == moved.targets.dtype == torch.bfloat16
    assert moved.images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moved.labels, batch.labels)
    assert torch.equal(moved.samples, batch.samples)


def test_images_are_not_mixed_over_processes_that_cannot_talk(images: Path) -> None:
    for option in ("mixup", "cutmix"):
        one, _ = loaders(images, 2, **{option: 0.2})
        with pytest.raises(UsageError, match="mix the images of all 2 processes, which cannot talk"):
            next(iter(one))


def decoding_processes() -> set[psutil.Process]:
    """Return those that decode for this one. A process of an earlier test may have ended, and not be gone yet."""
    found: set[psutil.Process] = set()
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "raytrain.loader.decoder_processes" in " ".join(each.cmdline()):
                found.add(each)
    return found


@pytest.mark.usefixtures("new_decoders")
@pytest.mark.parametrize("num_read", [0, 1])
def test_a_loader_that_nobody_has_any_more_leaves_no_process(images: Path, num_read: int) -> None:
    before = decoding_processes()
    (loader,) = loaders(images, 1)
    (started,) = decoding_processes() - before  # they import what they need before the first batch is asked for
    for _, _ in zip(range(num_read), loader, strict=False):
        assert decoding_processes() - before == {started}
    del loader
    gc.collect()
    wait_for(lambda: not started.is_running() or started.status() == psutil.STATUS_ZOMBIE, "it runs on")


@pytest.mark.usefixtures("new_decoders")
@pytest.mark.parametrize("refused", [{"data": "nowhere"}, {"batch_size": 200, "drop_last": True}])
def test_a_refused_loader_leaves_no_process(images: Path, refused: dict[str, Any]) -> None:
    before = decoding_processes()
    with pytest.raises((UsageError, StorageError)) as error:  # which keeps the loader
        ImageLoader(**{"data": images, "batch_size": 20, **SIZE, **refused})
    assert decoding_processes() <= before
    assert error.value.__traceback__ is not None


@pytest.mark.usefixtures("new_decoders")
def test_loops_that_cannot_begin_leave_no_process(images: Path) -> None:
    process = psutil.Process()
    before = {child.pid for child in process.children()}

    class OfThisProcess:
        def __call__(self, image: Tensor) -> Tensor:
            return image

        def __reduce__(self) -> str:
            raise TypeError("it holds a connection")

    with ImageLoader(images, batch_size=20, transforms=OfThisProcess(), **SIZE) as loader:
        for _ in range(2):
            with pytest.raises(UsageError, match="it holds a connection"):
                next(iter(loader))
        wait_for(lambda: {child.pid for child in process.children()} <= before, deadline_s=60)


@pytest.mark.parametrize("num_read", [0, 1, 5])
def test_a_closed_loader_says_so(images: Path, num_read: int) -> None:
    (loader,) = loaders(images, 1)
    batches = iter(loader)
    for _ in range(num_read):
        next(batches)
    loader.close()
    for asked in (*([batches] if num_read == 1 else []), loader, loader.validation):
        with pytest.raises(UsageError, match="closed ImageLoader"):
            next(iter(asked))


def files_without_names() -> set[str]:
    """Return the files that this process has open and that have no name, as those of kept images."""
    targets: set[str] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this listing
            targets.add(os.readlink(descriptor))
    return {target for target in targets if target.endswith(" (deleted)")}


@pytest.mark.skipif(sys.platform != "linux", reason="kept images have names elsewhere")
def test_a_closed_loader_keeps_no_images(images: Path) -> None:
    before = files_without_names()
    (loader,) = loaders(images, 1, cache="memory")
    epoch([loader])
    kept = files_without_names() - before
    loader.close()

    def are_freed() -> bool:  # by the thread that read ahead, which notices within a tenth of a second
        gc.collect()
        return not kept & files_without_names()

    assert kept
    wait_for(are_freed, "files of kept images are open")


def test_two_loops_over_one_loader_at_once_are_refused(images: Path) -> None:
    (loader,) = loaders(images, 1)
    with pytest.raises(UsageError, match="two loops at once need a loader each"):
        list(zip(loader, loader, strict=False))
    assert len(epoch([loader])) == 5


def test_a_copy_of_a_loader_goes_on_from_the_same_place_with_processes_of_its_own(images: Path) -> None:
    (loader,), (whole,) = loaders(images, 1, cache="none"), loaders(images, 1)
    next(iter(loader))
    others = copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))
    epoch([whole])
    second = epoch([whole])
    for each in (loader, *others):
        assert_same(epoch([each]), second)
        assert sum(batch.num_used for batch in each.validation) == 9
        each.close()


@pytest.mark.usefixtures("new_decoders")
def test_a_forked_process_reads_by_itself(images: Path) -> None:
    """Its loader has begun in the process that it is a fork of, whose threads and pipes it cannot use."""
    (loader,), (whole,) = loaders(images, 1, cache="none"), loaders(images, 1)
    next(iter(loader))
    epoch([whole])
    second = [samples for samples, _, _ in epoch([whole])]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=lambda: results.put([samples for samples, _, _ in epoch([loader])]))
    process.start()
    assert results.get(timeout=60) == second
    process.join()
    assert [samples for samples, _, _ in epoch([loader])] == second


def test_a_rank_in_the_environment_that_is_none_is_refused(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, world_size in (("x", "2"), ("1", ""), ("0", "-2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(UsageError, match=f"RANK is '{rank}' and WORLD_SIZE"):
            next(iter(ImageLoader(images, batch_size=20, **SIZE)))


@pytest.mark.parametrize("given", ["x", "0", "-2"])
def test_a_number_of_processes_here_that_is_none_is_refused(
    images: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    with pytest.raises(UsageError, match=f"LOCAL_WORLD_SIZE is '{given}' in the environment"):
        next(iter(ImageLoader(images, batch_size=20, **SIZE)))


def test_processes_that_cannot_talk_divide_the_memory_of_their_machine(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed_bytes = 90 * 12 * 12 * 3
    monkeypatch.setattr("raytrain.loader.choose_cache.image_memory", lambda: (str(tmp_path), 3 * needed_bytes))
    for number, fits in ((3, True), (4, False)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(number))
        (loader,) = loaders(images, 1, cache="memory")
        with nullcontext() if fits else pytest.raises(UsageError, match="--cache is memory, and the images take"):
            next(iter(loader))
        loader.close()


def test_a_gpu_that_is_not_there_is_refused_and_other_devices_are_obeyed(images: Path) -> None:
    with pytest.raises(UsageError, match=r"device is cuda:99, and the GPUs that .* are \d+"):
        next(iter(ImageLoader(images, batch_size=20, device="cuda:99", **SIZE)))
    (loader,) = loaders(images, 1, device="meta")
    assert {each.device.type for batch in (next(iter(loader)),) for each in batch} == {"meta"}


# Processes that talk to each other.


def _read_together(images: Path) -> list[Any]:
    loader = ImageLoader(images, batch_size=20, **SIZE)
    return [(batch.samples.tolist(), batch.num_used) for _ in range(2) for batch in loader]


def _give_other_options(images: Path) -> str:
    try:
        ImageLoader(images, batch_size=20 + dist.get_rank(), **SIZE)
    except UsageError as error:
        return str(error)
    return ""


def _differ_in_what_no_option_says(images: Path) -> list[str]:
    """Return what is said to a process that leaves batches out, or has transforms of its own, unlike the other."""
    is_first = dist.get_rank() == 0
    said = list[str]()
    cases: list[dict[str, Any]] = [{"drop_last": is_first}, {"transforms": None if is_first else torch.clone}]
    for options in cases:
        with ImageLoader(images, batch_size=20, **SIZE, **options) as loader:
            try:
                next(iter(loader))
            except UsageError as error:
                said.append(str(error))
    return said


def _load_other_states(images: Path) -> str:
    loader = ImageLoader(images, batch_size=20, **SIZE)
    loader.load_state_dict({**loader.state_dict(), "next_step": dist.get_rank()})
    try:
        next(iter(loader))
    except UsageError as error:
        return str(error)
    return ""


def test_processes_of_a_group_share_the_work_and_refuse_to_differ(images: Path) -> None:
    one, two = run_in_processes(2, _read_together, images)
    (alone,) = loaders(images, 1)
    expected = [samples for samples, _, _ in (*epoch([alone]), *epoch([alone]))]
    pairs = zip(one, two, strict=True)
    assert [[*first[:used], *second[:other]] for (first, used), (second, other) in pairs] == expected
    assert (
        run_in_processes(2, _give_other_options, images)
        == ["Process 1 has a loader of other options than process 0; give all processes the same."] * 2
    )
    differs = "Process 1 has a loader of other images or options than process 0; give all processes the same."
    assert run_in_processes(2, _differ_in_what_no_option_says, images) == [[differs] * 2] * 2
    assert (
        run_in_processes(2, _load_other_states, images)
        == ["Process 1 has its loader at another step than process 0; give all processes the same."] * 2
    )


def _train_with_parallel(images: Path) -> list[Tensor]:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Dropout(0.3)
    model = raytrain.parallel(torch.nn.Sequential(*layers, torch.nn.Linear(400, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with ImageLoader(images, batch_size=20, flip="random", **SIZE) as loader:
        for _ in range(2):
            for pixels, labels in loader:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(pixels), labels).backward()
                optimizer.step()
        dist.barrier()  # the first process keeps the decoded images for all
    return [value.detach().clone() for value in model.state_dict().values()]


def test_parallel_networks_train_on_its_batches_as_one_process_would(images: Path) -> None:
    """The last batch of an epoch has one image, so that all processes but one have a placeholder."""
    (alone,) = run_in_processes(1, _train_with_parallel, images)
    for number in (2, 3):
        for weights in run_in_processes(number, _train_with_parallel, images):
            torch.testing.assert_close(weights, alone, rtol=1e-4, atol=1e-6)
