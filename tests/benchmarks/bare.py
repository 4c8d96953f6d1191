"""The smallest Ray Train job: two workers whose loop only writes down the time at which it was entered."""

from __future__ import annotations

import os
import tempfile

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.benchmarks.started import note


def loop() -> None:
    note()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=os.environ["RAY_TMPDIR"]) as storage:
        TorchTrainer(
            loop, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig(storage_path=storage)
        ).fit()
