"""Digests of tensors, by which workers find out whether theirs are the same."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from raytrain.training.exact.agreement import digest_of_tensors

pytestmark = pytest.mark.not_quick  # torch's profiler takes seconds to start
LARGE = 14_000_000  # elements, more than are added up at a time


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.float8_e4m3fn])
def test_a_digest_of_a_large_tensor_takes_little_memory(dtype: torch.dtype) -> None:
    values = torch.ones(LARGE, dtype=torch.uint8).to(dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        digest = digest_of_tensors([values])
    assert digest.tolist() == [[LARGE, LARGE // 2, LARGE // 3 + 1, pytest.approx(LARGE**0.5)]]
    allocated = max(event.self_cpu_memory_usage for event in profiled.events() or [])
    assert 1_000_000 < allocated < 60_000_000  # as float64 the tensor has 112 MB


@pytest.mark.parametrize("size", [100, LARGE])
def test_it_changes_if_two_elements_change_places(size: int) -> None:
    values = torch.zeros(size)
    values[0] = 1.0
    assert not torch.equal(digest_of_tensors([values]), digest_of_tensors([values.flip(0)]))
