"""Train the loop of loop.py: python train.py [name of the run]."""

from __future__ import annotations

import sys
from pathlib import Path

import raytrain
from raytrain.demo.demo import render_digits


def main(name: str = "first") -> None:
    """Train, or continue a run that was stopped."""
    if not Path("images").exists():
        render_digits("images")  # something to start with; replace it by your own folder or s3://bucket/prefix below
    config = raytrain.TrainConfig(  # the other options keep their defaults
        name=name,
        resume=Path("runs", name).exists(),
        data="images/train",
        test_data="images/test",
        loop="loop.py:train",
        image_size=(28, 28),
        channels=1,
        epochs=4,
        batch_size=256,
        schedule="cosine",
        warmup_epochs=1,
    )
    result = raytrain.train(config)
    print(f"{name}: {result.status} after step {result.steps}. README.md says how to use it.")


if __name__ == "__main__":
    main(*sys.argv[1:])
