"""Loops of well-known methods, as people write them: on one and on two workers they end as plain PyTorch does.

Plain PyTorch runs the same functions with ``Plain``, which hands out whole global batches and adds nothing.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.loops_beside_torch import NUM_IMAGES_WITH_EMPTY_SLICES, check
from tests.helpers.loops_of_others import LOOPS, OF_MORE_THAN_ONE_IMAGE


def test_they_end_as_with_plain_pytorch_also_if_a_worker_has_no_images_in_some_steps(tmp_path: Path) -> None:
    loops = tuple(loop for loop in LOOPS if loop not in OF_MORE_THAN_ONE_IMAGE)
    check(loops, tmp_path, NUM_IMAGES_WITH_EMPTY_SLICES)


def test_those_that_need_more_than_one_image_on_each_worker_end_as_with_plain_pytorch(tmp_path: Path) -> None:
    check(OF_MORE_THAN_ONE_IMAGE, tmp_path)
