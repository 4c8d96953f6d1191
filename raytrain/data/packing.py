"""Where packed images are, and what a stranger's packed index must satisfy."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_SHARD_PATH = re.compile(r"shards/\d{6,}-[0-9a-f]{16}\.parquet")  # as pack names them; never outside the folder


@dataclass(frozen=True, eq=False)
class Packing:
    """The locations of N images in packed shards."""

    shards: tuple[str, ...]
    """Paths relative to the manifest's url."""
    shard: npt.NDArray[np.int32]  # (N,), indices into shards
    row: npt.NDArray[np.int32]  # (N,), from 0 in each shard

    def select(self, indices: npt.NDArray[np.integer]) -> Packing:
        """The locations of the images at ``indices``."""
        return replace(self, shard=self.shard[indices], row=self.row[indices])

    def check(self) -> None:
        """Raise ValueError unless these are locations that ``raytrain pack`` could have written."""
        if bad := [path for path in self.shards if not _SHARD_PATH.fullmatch(path)]:
            raise ValueError(f"{bad[0]!r} is not the path of a shard")
        check_range("shard", self.shard, 0, len(self.shards))
        check_range("row", self.row, 0)
        if (np.diff(self.shard) < 0).any():
            raise ValueError("the shards are not in order")


def read_packing(table: pa.Table, metadata: dict[str, Any]) -> Packing | None:
    """The locations that a stored manifest holds, not checked; None if its images are not packed."""
    if "shards" not in metadata:
        return None
    return Packing(tuple(metadata["shards"]), table["shard"].to_numpy(), table["row"].to_numpy())


def check_range(name: str, values: npt.NDArray[Any], start: int, stop: int = 1 << 62) -> None:
    """Raise ValueError unless all ``values`` of the column ``name`` are integers from ``start`` to ``stop - 1``."""
    if values.dtype.kind != "i" or ((values < start) | (values >= stop)).any():
        raise ValueError(f"a {name} is out of range")
