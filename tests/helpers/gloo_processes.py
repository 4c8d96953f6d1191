"""Run a function in a few processes of one gloo process group."""

from __future__ import annotations

import gc
import io
import os
import runpy
import socket
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def run_in_processes(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on every rank of a default process group, and return its results by rank.

    ``function`` is defined at the top of a module, so that it can be pickled. An error on any rank is raised here. The
    processes are those of :func:`forking_context`.
    """
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(world_size, mp_context=forking_context()) as pool:
        futures = [pool.submit(_run, rank, world_size, folder, function, args) for rank in range(world_size)]
        return [torch.load(io.BytesIO(future.result()), weights_only=False) for future in futures]


def run_until_one_ends(world_size: int, function: Callable[..., Any], *args: Any) -> None:
    """Call ``function(*args)`` on every rank, and kill all processes as soon as one has ended, as launchers may.

    They have the environment variables of this process, such as the keys of a test's bucket.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = forking_context()
        processes = [
            context.Process(target=_run, args=(rank, world_size, folder, function, args, dict(os.environ)))
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        wait([process.sentinel for process in processes])
        for process in processes:
            process.kill()
            process.join()


def run_script(script: Path, world_size: int) -> str:
    """Run a script on ``world_size`` processes with the variables that torchrun sets, and return what all print.

    They are processes of :func:`forking_context`: torchrun and its workers would import torch once each.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
        shared["MASTER_PORT"] = str(free.getsockname()[1])
    with ProcessPoolExecutor(world_size, mp_context=forking_context()) as pool:
        ranks = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
        return "".join(future.result() for future in [pool.submit(_run_script, script, rank) for rank in ranks])


def end_groups_of_earlier_runs() -> None:
    """Destroy all process groups of this process but the default one: those of runs that it has trained before.

    A worker trains one run, whose groups end with the process. Each has a thread that wakes a hundred times a second:
    those of a hundred runs would take more time than the runs.
    """
    if dist.is_initialized():
        groups = distributed_c10d._world.pg_map  # pyright: ignore[reportPrivateUsage]
        for group in [group for group in groups if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
        gc.collect()  # a group ends with the last object that has it, and those of a run have each other


def forking_context() -> ForkServerContext:
    """Return what forks processes from one that has imported what they need, because the imports take seconds."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        [
            *("raytrain.launch.local.agent", "tests.helpers.folder_runs"),
            *("torch._dynamo", "torchvision.transforms.v2", "torchmetrics"),
        ]
    )
    return context


def _run_script(script: Path, variables: dict[str, str]) -> str:
    gc.freeze()
    os.environ.update(variables)
    os.chdir(script.parent)
    torch.set_num_threads(1)
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    if dist.is_initialized():
        dist.destroy_process_group()
    return printed.getvalue()


def _run(
    rank: int,
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    gc.freeze()  # otherwise the first backward of a run would look at all that has been imported
    os.environ.update(environment)
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)  # as torchrun says, so that the workers share the cores
    torch.set_num_threads(1)
    rendezvous = f"file://{Path(folder) / 'rendezvous'}"
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    try:
        result = io.BytesIO()
        torch.save(function(*args), result)
        return result.getvalue()
    finally:
        dist.destroy_process_group()
