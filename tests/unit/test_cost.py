"""What a run has cost: by the hour of machines or GPUs, over resumes, and the energy of its GPUs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

import raytrain
from raytrain.config import TrainConfig
from raytrain.config.machines import Prices
from raytrain.display.dashboard import progress_line
from raytrain.display.event_text import stop_text
from raytrain.errors import UsageError
from raytrain.launch.prepare import settle_options
from raytrain.launch.resumed_options import resumed_options
from raytrain.monitor.cost import CostMeter
from raytrain.monitor.document_writer import DocumentWriter
from raytrain.monitor.run_reader import RunReader
from raytrain.runs.documents import run_store, write_config
from raytrain.runs.machine_history import MachineUse
from raytrain.runs.outcome import StopReason
from raytrain.runs.status import RunStatus, read_status, write_status
from raytrain.training.metrics.machine_meter import GpuEnergy
from tests.helpers import small_runs
from tests.helpers.snapshots import snapshot

NEW = RunStatus(status="starting")


def use(rank: int = 0, node: str = "a", **more: Any) -> MachineUse:
    return MachineUse(rank=rank, node=node, images_per_s=1.0, data_wait_fraction=0.0, **more)


class Clock:
    """The time in hours, as seconds."""

    def __init__(self) -> None:
        self.hours = 0.0

    def __call__(self) -> float:
        return self.hours * 3600


def costs(prices: list[str], *states: tuple[float, tuple[MachineUse, ...]], before: RunStatus = NEW) -> list[Any]:
    """Return the dollars after each number of hours, with the machines that are known then."""
    clock = Clock()
    meter = CostMeter(Prices.parse(prices), before, 0.0, clock)
    found: list[Any] = []
    for hours, machines in states:
        clock.hours = hours
        found.append(meter.update(snapshot(machines=machines)).dollars)
    return found


def test_each_machine_of_a_worker_is_paid_for_once() -> None:
    both = use(0, "a"), use(1, "a"), use(2, "b")
    assert costs(["3"], (1, both), (2, (use(),))) == [6.0, 9.0]


def test_machines_are_paid_for_before_they_are_known_and_while_workers_start_again() -> None:
    gpus = (use(gpu="NVIDIA A100-SXM4-80GB"), use(1, gpu="NVIDIA L4"))
    assert costs(["A100=1.5", "L4=0.5", "A100-SXM4=2"], (1, ()), (2, gpus), (3, ())) == [0.0, 5.0, 7.5]
    machines = use(0, "a"), use(1, "b")
    assert costs(["3"], (1, ()), (2, machines), (3, ())) == [3.0, 12.0, 18.0], "one at least, until both are known"


def test_a_resumed_run_goes_on_from_what_it_has_cost() -> None:
    assert costs(["$2.50"], (2, ()), before=RunStatus(status="stopped", dollars=10.0)) == [15.0]


def test_a_gpu_without_a_price_is_named() -> None:
    meter = CostMeter(Prices.parse(["A100=1"]), NEW, 0.0, Clock())
    meter.update(snapshot(machines=(use(gpu="NVIDIA H200"), use(1))))
    assert meter.gpus_without_price == {"NVIDIA H200", "a worker without a GPU"}


def test_energy_adds_up_over_workers_attempts_and_resumes() -> None:
    meter = CostMeter(None, RunStatus(status="stopped", gpu_kwh=1.0), 0.0, Clock())
    joules = 1.8e6  # half a kWh
    meter.update(snapshot(machines=(use(gpu_joules=joules / 2), use(1, gpu_joules=joules))))
    meter.update(snapshot(machines=(use(gpu_joules=joules), use(1, gpu_joules=joules))))
    shown = meter.update(snapshot(machines=(use(gpu_joules=joules),), attempt=2))
    assert (shown.gpu_kwh, shown.dollars) == (2.5, None)
    assert progress_line(shown).rstrip().endswith("2.50 kWh  00:01:20 left")


@pytest.mark.parametrize("text", ["x", "A100", "-1", "A100=x", "3 4", "3 A100=1"])
def test_prices_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--price is .*; give dollars per machine and hour, such as 3\.06, or one"):
        TrainConfig(data="images", batch_size=1, price=tuple(text.split()))


def test_a_limit_needs_a_price() -> None:
    with pytest.raises(UsageError, match="--max-cost is 5, and no --price says what a machine or a GPU costs"):
        TrainConfig(data="images", batch_size=1, max_cost=5.0)
    assert stop_text(StopReason("cost", "5", value=5.02)) == "--max-cost 5: $5.02 are spent"


@pytest.mark.parametrize("given", [{}, {"price": ("4",), "tag": ("new",), "note": "again"}])
def test_a_resume_from_python_keeps_price_tags_and_note_that_it_does_not_give(given: dict[str, Any]) -> None:
    stored: dict[str, Any] = {"price": ("3",), "tag": ("good",), "note": "drops late"}
    options: dict[str, Any] = {"data": "images", "batch_size": 1, "name": "run"}
    resumed = resumed_options(TrainConfig(**options, **given, resume=True), TrainConfig(**options, **stored))
    expected = stored | given | {"tag": ("good", *given.get("tag", ()))}  # tags are added: somebody may have set them
    assert {name: getattr(resumed, name) for name in stored} == expected


def test_a_limit_of_a_resume_goes_by_the_price_of_the_run(images: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_cost": 20.0, "resume": True}
    for name, price in (("priced", ("3",)), ("unpriced", ())):
        write_config(run_store(str(tmp_path), name), small_runs.config(images, tmp_path, name=name, price=price))
    resumed = settle_options(small_runs.config(images, tmp_path, name="priced", **options))
    assert (resumed.price, resumed.max_cost) == (("3",), 20.0)
    for name in ("unpriced", "new"):  # which is not there yet, so that it would start
        with pytest.raises(UsageError, match="--max-cost is 20, and no --price says what a machine or a GPU costs"):
            settle_options(small_runs.config(images, tmp_path, name=name, **options))


def test_a_resume_that_has_spent_its_limit_is_refused(images: Path, tmp_path: Path) -> None:
    config = small_runs.config(images, tmp_path, name="run", price=("3",), max_cost=20.0)
    store = run_store(str(tmp_path), "run")
    write_config(store, config)
    write_status(store, RunStatus(status="stopped", step=5, num_steps=9, dollars=20.5))
    with pytest.raises(UsageError, match=r"Run 'run' has cost \$20\.50 already, and --max-cost is 20; give a higher"):
        raytrain.train(dataclasses.replace(config, resume=True))
    assert read_status(store).dollars == 20.5


def test_each_status_keeps_the_cost_and_the_time_for_the_next_attempt_and_for_who_watches(tmp_path: Path) -> None:
    store = run_store(str(tmp_path), "run")
    documents = DocumentWriter(store, 10, before=RunStatus(status="stopped", dollars=1.25, gpu_kwh=0.5, elapsed_s=90.0))
    documents.write_status("starting")
    begun = read_status(store)
    assert (begun.dollars, begun.gpu_kwh, begun.elapsed_s) == (1.25, 0.5, 90.0)
    documents.write_status("running", dataclasses.replace(snapshot(), dollars=2.0, gpu_kwh=0.75, elapsed_s=95.0))
    documents.write_status("interrupted")
    watched = RunReader(store, "run").snapshot()
    assert (watched.dollars, watched.gpu_kwh, watched.elapsed_s) == (2.0, 0.75, 95.0)


def test_a_gpu_says_its_energy_since_the_worker_began(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([1_000, 3_500])  # of NVML, in millijoules
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByUUID", {"GPU-12-34": "gpu"}.__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda gpu: next(counts))
    assert GpuEnergy(torch.device("cuda", 0)).joules() == 2.5


def test_a_cpu_and_a_gpu_that_nobody_knows_have_no_energy() -> None:
    assert GpuEnergy(torch.device("cpu")).joules() is None
    assert GpuEnergy(torch.device("cuda", 99)).joules() is None
