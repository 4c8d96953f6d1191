"""How fast machines add up tensors over the network: started on each of them at the same time, as a process.

    python -m raytrain.diagnostics.all_reduce_check RANK NUM_RANKS HOST PORT DEVICE

Prints bytes/s in the last line, counted as nccl-tests counts its bus bandwidth: of the N ranks of a ring, each sends
2(N-1)/N times the tensor (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_MEET_WITHIN = timedelta(seconds=30)
_WARM_UP_BYTES = 1 << 20
_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
_ROUNDS = 3


def main() -> None:
    """Meet the other ranks at ``tcp://HOST:PORT``, which rank 0 opens, and measure."""
    rank, num_ranks, host, port, device = sys.argv[1:]
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"tcp://{host}:{port}",
        rank=int(rank),
        world_size=int(num_ranks),
        timeout=_MEET_WITHIN,
    )
    try:
        print(_bytes_per_s(torch.device(device), int(num_ranks)))
    finally:
        dist.destroy_process_group()


def _bytes_per_s(device: torch.device, num_ranks: int) -> float:
    _seconds(torch.ones(_WARM_UP_BYTES // 4, device=device))  # the first one connects
    tensor = torch.ones(_BYTES[device.type] // 4, device=device)
    seconds = min(_seconds(tensor) for _ in range(_ROUNDS))
    return 2 * (num_ranks - 1) / num_ranks * tensor.nbytes / seconds


def _seconds(tensor: torch.Tensor) -> float:
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
