"""A worker's speed and the use of its machine are measured every few seconds."""

from __future__ import annotations

import dataclasses
import socket
import time

import pytest
import torch

from raytrain.runs.machine_history import MachineUse
from raytrain.training.metrics.machine_meter import MachineMeter


def measured(monkeypatch: pytest.MonkeyPatch, device: torch.device, steps: int = 50) -> list[MachineUse]:
    """What a worker reports that takes a step of 8 images every 0.2 s, and waits for half of the time."""
    reported: list[MachineUse] = []
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    meter = MachineMeter(3, device, reported.append)
    for step in range(steps):
        now_s += 0.2
        meter.step(8, 0.1, step)
    return reported


def test_a_worker_says_every_five_seconds_how_fast_it_is_and_what_its_machine_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = measured(monkeypatch, torch.device("cpu"), steps=52)
    assert (first.rank, first.node, first.images_per_s, first.data_wait_fraction) == (
        3,
        socket.gethostname(),
        40.0,
        0.5,
    )
    assert second.images_per_s == 40.0
    assert (first.step, second.step) == (24, 49)
    assert first.memory_bytes is not None and first.memory_total_bytes is not None
    assert 0 < first.memory_bytes < first.memory_total_bytes
    assert first.cpu_fraction is not None and 0 <= first.cpu_fraction <= 1
    assert first.gpu is None


def test_a_gpu_is_measured_and_one_that_tells_nothing_of_its_use_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "utilization", lambda device: 75)
    told = measured(monkeypatch, torch.device("cuda", 0))[0]
    assert (told.gpu, told.gpu_fraction, told.gpu_memory_bytes, told.gpu_memory_total_bytes) == ("H200", 0.75, 50, 80)

    def refuse(device: torch.device) -> int:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    silent = measured(monkeypatch, torch.device("cuda", 0))[0]
    known = dataclasses.replace(silent, cpu_fraction=None, memory_bytes=None, shared_memory_bytes=None)
    assert known.gpu_fraction is None and known.gpu_memory_bytes == 50
