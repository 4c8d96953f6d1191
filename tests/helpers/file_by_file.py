"""How the tests share processes: what pytest-xdist asks of ``conftest.py``.

Each process has an S3 server and folders of its own. It gets whole files, so that the fixtures of a module are made
once. The tests on the session's Ray cluster come first, and one process has them all, so that one cluster starts, and
none is waited for at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from raytrain.loader.machine import cores

_FEWEST, _MOST = 3, 4


def num_processes(config: pytest.Config) -> int:
    """Return the number of processes beside pytest's own; 0 if that runs the tests itself.

    Most runs of the tests keep two cores busy, so there is a process for every two cores; at most four, each of which
    imports all tests, and at least three, as each waits for processes and timers in between: two left two cores idle
    for three tenths of the suite. One file is not worth another process. Slow tests may look at the whole machine, fill
    its memory or make its networks. What tests print with ``-s`` would come from no terminal.
    """
    files = {argument.partition("::")[0] for argument in config.args}
    is_one_file = len(files) == 1 and files.pop().endswith(".py")
    has_slow_tests = config.option.markexpr not in ("not slow", "quick")
    prints = config.option.capture == "no"
    return 0 if is_one_file or has_slow_tests or prints else min(max(_FEWEST, cores() // 2), _MOST)


class FileByFile(LoadScopeScheduling):
    """Give each process one file after the other, in the order of ``conftest.py``, but all tests on a cluster to one.

    That order has some files twice, with their tests on a cluster and with those beside one.
    """

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        self.config.option.loadscopereorder = False  # otherwise files with many tests would come first
        files = [nodeid.partition("::")[0] for nodeid in collection]
        # Either kind is in the order of its files, so the tests on a cluster end where a file is before the last one.
        num_on_cluster = next((i for i, (one, following) in enumerate(pairwise(files), 1) if following < one), 0)
        self._units = {
            nodeid: "on a cluster" if i < num_on_cluster else file
            for i, (nodeid, file) in enumerate(zip(collection, files, strict=True))
        }

    def _split_scope(self, nodeid: str) -> str:
        return self._units[nodeid]
