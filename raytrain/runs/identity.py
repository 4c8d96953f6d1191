"""What a run is made of: a run resumes only with the same model, classes, images, batch size, seed and sampling."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from raytrain.config import TrainConfig
from raytrain.errors import UsageError


@dataclass(frozen=True)
class Identity:
    """What a run and its checkpoints are made of.

    ``batch_size`` is the global batch's; None if the number of workers is yet to decide it.
    """

    model: str
    classes: tuple[str, ...]
    manifest_digest: str
    batch_size: int | None
    seed: int
    sampling: str = "uniform"

    @classmethod
    def of(cls, config: TrainConfig, classes: tuple[str, ...] = (), manifest_digest: str = "") -> Identity:
        """The identity of a run with these options and images; without images, as far as the options show it."""
        return cls(config.model, classes, manifest_digest, config.batch_size, config.seed, config.sampling)

    def check(self, other: Identity, what: str) -> None:
        """Raise UsageError with the first difference if ``what``, a run or a checkpoint, has the identity ``other``."""
        for name, mine in asdict(self).items():
            theirs = getattr(other, name)
            if theirs != mine:
                raise UsageError(
                    f"{what} was made with {_difference(name, theirs, mine)}: resume with the options that it was made "
                    "with, or start a new run under another --name."
                )


def _difference(name: str, theirs: Any, mine: Any) -> str:
    if name == "classes":
        pairs = enumerate(zip_longest(theirs, mine, fillvalue="none"))
        place, their, my = next((place, *pair) for place, pair in pairs if pair[0] != pair[1])
        numbers = f"{len(theirs):,} classes, and this run has {len(mine):,}"
        return f"{numbers}, of which number {place} is {their} there and {my} here"
    if name == "manifest_digest":
        return f"other images (manifest {theirs[:8]}…), and this run has those of manifest {mine[:8]}…"
    return f"{name.replace('_', ' ')} {theirs}, and this run has {mine}"
