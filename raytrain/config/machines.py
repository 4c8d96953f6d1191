"""Options of the machines: the workers, their devices, and the cluster that they are on."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from raytrain.config.option_marks import KnownAs, Mark
from raytrain.config.option_values import (
    NUMBERS,
    TEXTS,
    Accepts,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    option_field,
    section,
)
from raytrain.errors import UsageError, flag

DeviceType = Literal["auto", "cpu", "cuda"]

_DEVICE = r"auto|cpu|cuda|cuda:(\d+(,\d+)*|[A-Za-z][\w-]*)"


@dataclass(frozen=True)
class Prices:
    """Prices of an hour in dollars: of each machine, or of each GPU by a part of its name."""

    per_machine: float | None = None
    by_gpu: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Prices:
        """Return the prices that ``texts``, at least one, name; raise UsageError for a text that names none.

        A price of each machine, which names no GPU, must be the only one.

        Example: ``Prices.parse(["A100=1.8"]).of_gpu("NVIDIA A100-SXM4-80GB") == 1.8``
        """
        matched = [re.fullmatch(r"(?:([^=]+)=)?\$?(\d*\.?\d+(?:e[-+]?\d+)?)", text) for text in texts]
        parts = [(match[1], float(match[2])) for match in matched if match]
        gpu_prices = tuple((gpu, price) for gpu, price in parts if gpu)
        are_finite = all(math.isfinite(price) for _, price in parts)
        if not are_finite or len(parts) < len(texts) or (len(gpu_prices) < len(parts) and len(parts) > 1):
            raise UsageError(
                f"--price is {' '.join(texts)!r}; give dollars per machine and hour, such as 3.06, or one price per "
                "hour for each type of GPU, such as A100=1.8 L4=0.7."
            )
        for index, (gpu, _) in enumerate(gpu_prices):
            if gpu.lower() in [other.lower() for other, _ in gpu_prices[:index]]:
                raise UsageError(f"--price is {' '.join(texts)!r}, which has two prices of {gpu}; give one.")
        return cls(by_gpu=gpu_prices) if gpu_prices else cls(per_machine=parts[0][1])

    def of_gpu(self, name: str) -> float | None:
        """Return the dollars per hour of the GPU with this ``name``; None if none of the types in ``by_gpu`` fits.

        A type fits if it is a part of the name, in upper or lower case; of several, the longest one counts.
        """
        fitting = [(len(gpu), price) for gpu, price in self.by_gpu if gpu.lower() in name.lower()]
        return max(fitting)[1] if fitting else None


@section
class MachineOptions:
    """Workers, and the machines that they run on."""

    workers: Annotated[
        PositiveInt | str,
        "N|auto|MIN..MAX",
        Mark.COMMON,
        Mark.SWEEPABLE,
        Mark.DECIDED_ANEW,
        Mark.OF_LAUNCHER,
        KnownAs("gpus num-gpus devices nproc-per-node world-size num-processes"),
    ] = option_field(default="auto", converter=Accepts[int | str | Sequence[int], int | str]())
    """Processes that train. auto: one per GPU, else as many on CPUs as fit beside the readers; 1..4: elastic."""
    device: Annotated[
        str,
        "auto|cpu|cuda|cuda:0,2|cuda:A100",
        Mark.COMMON,
        Mark.DECIDED_ANEW,
        KnownAs("gpu gpu-ids cuda cpu no-cuda accelerator"),
    ] = "auto"
    """auto: GPUs if there are any; cuda:0,2: GPUs by their numbers in `raytrain devices`; cuda:A100: GPUs of a type."""
    backend: Annotated[Literal["ray", "local"], Mark.COMMON, Mark.DECIDED_ANEW, Mark.OF_LAUNCHER] = "ray"
    """ray trains on a cluster, or on a Ray of its own on this machine; local on this machine without Ray."""
    address: Annotated[str | None, Mark.DECIDED_ANEW, Mark.OF_COMMAND, Mark.OF_LAUNCHER] = None
    """Ray cluster to use; by default RAY_ADDRESS, then one that you started on this machine, then a new local one."""
    threads_per_worker: PositiveInt | None = None
    """CPU threads that each worker computes with; by default the node's cores, divided among its workers."""
    worker_load: Annotated[tuple[NonNegativeFloat, ...] | None, Mark.DECIDED_ANEW] = option_field(
        default=None, converter=NUMBERS
    )
    """Relative size of each worker's local batch, such as 1 1 0 2; 0 leaves a worker idle."""
    wait_for_machines_s: Annotated[NonNegativeFloat, Mark.DECIDED_ANEW, Mark.OF_LAUNCHER] = 0.0
    """Wait up to this many seconds if the cluster has too few machines for the workers, and an autoscaler adds more."""
    price: Annotated[tuple[str, ...], "X|GPU=X", Mark.DESCRIBES_RUN] = option_field(default=(), converter=TEXTS)
    """Dollars per machine and hour, such as 3.06, or per hour of a type of GPU, such as A100=1.8 L4=0.7."""
    max_cost: PositiveFloat | None = None
    """Stop with a checkpoint when all attempts together cost this many dollars by --price; in a sweep, all trials."""
    scope_keys: Annotated[bool, Mark.OF_LAUNCHER] = False
    """Lend the cluster AWS keys that are good for the images and this run only, if AWS STS issues such keys."""

    @property
    def prices(self) -> Prices | None:
        """``price``, parsed; None if it is not given."""
        return Prices.parse(self.price) if self.price else None

    @property
    def elastic_workers(self) -> tuple[int, int] | None:
        """The minimum and maximum number of workers if ``workers`` is a range such as 1..4, else None."""
        fewest, dots, most = str(self.workers).partition("..")
        return (int(fewest), int(most)) if dots else None

    @property
    def device_type(self) -> DeviceType:
        """``device`` without the numbers or the type of GPUs: auto, cpu or cuda. A ResolvedConfig never has auto."""
        return self.device.partition(":")[0]  # pyright: ignore[reportReturnType]

    @property
    def gpus(self) -> str | None:
        """The numbers of this machine's GPUs to train on, such as 0,2; None for all GPUs."""
        chosen = self.device.partition(":")[2]
        return chosen if chosen[:1].isdecimal() else None

    @property
    def accelerator_type(self) -> str | None:
        """The type of GPU to train on, as Ray names it, such as A100; None for any."""
        chosen = self.device.partition(":")[2]
        return chosen if chosen[:1].isalpha() else None

    def loads(self, num_workers: int) -> tuple[float, ...]:
        """Return the load of each of ``num_workers`` workers, relative to the others: by default, all have the same.

        Example: ``TrainConfig(batch_size=8).loads(2) == (1.0, 1.0)``
        """
        return self.worker_load or (1.0,) * num_workers


def check_machines(options: MachineOptions) -> None:
    """Raise UsageError if ``workers`` or ``device`` is malformed, or the options of machines contradict each other."""
    # The number of workers. Each worker of a fixed number may have a load of its own.
    workers = options.workers
    if isinstance(workers, str) and workers != "auto" and not re.fullmatch(r"\d+\.\.\d+", workers):
        raise UsageError(f"--workers is {workers!r}; give a number, auto, or a range such as 1..4.")
    if options.elastic_workers is not None:
        fewest, most = options.elastic_workers
        if not 1 <= fewest <= most:
            raise UsageError(f"--workers is {workers}; a range starts at 1 or more and must not end below its start.")
        if options.worker_load is not None:
            raise UsageError(f"--worker-load needs a fixed number of --workers, which is {workers}; omit one of them.")

    # The devices; a GPU that is named twice would train two workers.
    numbers = (options.gpus or "").split(",")
    if not re.fullmatch(_DEVICE, options.device) or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"--device is {options.device!r}; give auto, cpu, cuda, numbers of GPUs, each once, such as cuda:0,2, or a "
            "type of GPU, such as cuda:A100."
        )
    if options.worker_load is not None and sum(options.worker_load) <= 0:
        raise UsageError(f"--worker-load is {options.worker_load}; at least one number must be above 0.")
    if options.worker_load is not None and not math.isfinite(sum(options.worker_load)):
        raise UsageError(f"--worker-load is {options.worker_load}, whose sum is infinite; give smaller numbers.")

    if options.price:
        Prices.parse(options.price)

    # The local backend has no cluster, so an option of a cluster is a mistake there.
    is_used_by_option = {
        "workers": options.elastic_workers is not None,
        "address": options.address is not None,
        "scope_keys": options.scope_keys,
        "wait_for_machines_s": options.wait_for_machines_s > 0,
        "device": options.accelerator_type is not None,
    }
    for name, is_used in is_used_by_option.items():
        if is_used and options.backend == "local":
            raise UsageError(
                f"{flag(name)} is {getattr(options, name)}, which is for a Ray cluster, and --backend is local; change "
                "one of them."
            )
