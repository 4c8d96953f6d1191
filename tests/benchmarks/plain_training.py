"""What people write by hand: one epoch of cifar10's network on a folder, for torchrun, without a test or a checkpoint.

``python -m torch.distributed.run --nproc-per-node 2 -m tests.benchmarks.plain_training FOLDER``
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

from raytrain.models import cifar10
from tests.benchmarks.started import note

_BATCH = 256


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    normal = Normalize((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    data = ImageFolder(folder, Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), ToTensor(), normal]))
    sampler = DistributedSampler[tuple[torch.Tensor, int]](data)
    loader = DataLoader(data, _BATCH, sampler=sampler, num_workers=1)
    model = DistributedDataParallel(cifar10(len(data.classes), 3).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-10)
    for images, labels in loader:
        loss = F.cross_entropy(model(images.to(memory_format=torch.channels_last)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note()
    print(f"loss {loss.item():.3f}")  # pyright: ignore[reportPossiblyUnbound]
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
