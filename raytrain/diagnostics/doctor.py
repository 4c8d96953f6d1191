"""What each node of a cluster has, and whether it can read the data and write the runs: each trouble with what to do."""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.console import RenderableType

from raytrain import recipes
from raytrain.backends.ray.cluster import Hardware, Placement, connection, hardware, place
from raytrain.diagnostics.node_probe import NodeReport, ProbeRequest, examine, versions
from raytrain.display.doctor_tables import cpus, doctor_page, size, workers
from raytrain.errors import UsageError
from raytrain.storage.base import Store
from raytrain.storage.credentials import OwnRoleOr
from raytrain.storage.errors import explain
from raytrain.storage.open import open_store

_ANSWER_WITHIN_S = 120.0
_METHODS = {"env": "environment", "shared-credentials-file": "profile", "config-file": "profile", "sso": "single sign-on"}


@dataclass(frozen=True)
class Node:
    """A node as Ray knows it, and what it answered; ``silence`` says why it did not."""

    address: str
    id: str
    cpus: float
    gpus: float
    memory_bytes: int
    object_store_bytes: int
    answer: NodeReport | None = None
    silence: str | None = None


class Finding(NamedTuple):
    """One sentence that says what to do, and the addresses of the nodes that it is about (none: the cluster)."""

    sentence: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class DoctorReport:
    """What :func:`diagnose` found. Holds no secret."""

    data: str | None
    storage: str
    versions: dict[str, str | None]
    placement: Placement | None
    nodes: tuple[Node, ...]
    failures: tuple[Finding, ...]
    warnings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing stands in the way of training; warnings do not."""
        return not self.failures

    def summary(self) -> dict[str, Any]:
        """The report as plain values."""
        fields = dataclasses.asdict(self)
        for level in ("failures", "warnings"):
            fields[level] = [trouble._asdict() for trouble in getattr(self, level)]
        return {"ok": self.ok, **fields}

    def __rich__(self) -> RenderableType:
        return doctor_page(self)


def diagnose(data: str | None, storage: str, address: str | None) -> DoctorReport:
    """Ask every node of the cluster at ``address`` what it has and whether it can read ``data`` and write ``storage``.

    Raises UsageError where there is no cluster or a URL is wrong, StorageError where the AWS configuration is broken.
    """
    data_store, run_store = open_store(data) if data else None, open_store(storage)
    with connection(address) as cluster:
        cluster.connect()
        with _lending([store for store in (data_store, run_store) if store is not None]) as lent:
            nodes = ask(ProbeRequest(_entered(data_store, lent), _entered(run_store, lent), lent.source, lent.resolved_by))
        found = hardware()
    placement, refused = _placed(found)
    about_all = (lent.problem, refused), (_crowded(found, placement), _unshared(run_store, found))
    failures, warnings = ([Finding(sentence) for sentence in sentences if sentence] for sentences in about_all)
    own = versions()
    return DoctorReport(
        data=data_store and data_store.url,
        storage=run_store.url,
        versions=own,
        placement=placement,
        nodes=nodes,
        failures=(*failures, *_gathered(nodes, _failures)),
        warnings=(*warnings, *_gathered(nodes, lambda node: _warnings(node, own))),
    )


@dataclass(frozen=True)
class _Lent:
    """This process's credentials, on loan to the nodes; ``problem`` says why there are none."""

    source: OwnRoleOr | None = None
    resolved_by: str = ""
    problem: str | None = None


@contextmanager
def _lending(stores: Sequence[Store]) -> Iterator[_Lent]:
    """Lend what the nodes need to enter ``stores``: nothing where those are folders."""
    in_s3 = [store.url for store in stores if store.settings is not None]
    if not in_s3:
        yield _Lent()
        return
    import ray

    from raytrain.backends.ray.coordinator import CredentialLender, ServedCredentials, start_coordinator

    coordinator = start_coordinator(f"doctor-{uuid.uuid4().hex[:8]}")
    source = OwnRoleOr(ServedCredentials(coordinator))
    try:
        try:
            CredentialLender(coordinator)
            ray.get(coordinator.outcome.remote())  # calls from here are answered in order: it has them now
            lent = _Lent(source, _resolved_by())
        except Exception as error:
            lent = _Lent(source, problem=str(explain(error, in_s3[0])))
        yield lent
    finally:
        ray.kill(coordinator)


def _entered(store: Any, lent: _Lent) -> Any:
    return store.with_credentials(lent.source) if store is not None and lent.source is not None else store


def _resolved_by() -> str:
    """Which step of the AWS chain gave this process its credentials."""
    import botocore.session  # pyright: ignore[reportMissingTypeStubs]

    method = getattr(botocore.session.Session().get_credentials(), "method", "")
    return _METHODS.get(method, "role" if "role" in method else method)


def ask(question: ProbeRequest) -> tuple[Node, ...]:
    """Put the question to all nodes at once, for a node may be out of order, and reading together is what training does."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(examine)
    asked: list[tuple[Node, Any]] = []
    for node, node_id in _alive():
        pinned = task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False))
        asked.append((node, pinned.remote(question, node.gpus)))
    ray.wait([ref for _, ref in asked], num_returns=len(asked), timeout=_ANSWER_WITHIN_S)
    return tuple(_answered(node, ref) for node, ref in asked)


def _alive() -> Iterator[tuple[Node, str]]:
    import ray

    for node in ray.nodes():
        if node["Alive"]:
            has, node_id = node["Resources"], node["NodeID"]
            memory_bytes, object_store_bytes = int(has.get("memory", 0)), int(has.get("object_store_memory", 0))
            cpus, gpus = has.get("CPU", 0.0), has.get("GPU", 0.0)
            yield Node(node["NodeManagerAddress"], node_id[:8], cpus, gpus, memory_bytes, object_store_bytes), node_id


def _answered(node: Node, ref: Any) -> Node:
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        return dataclasses.replace(node, answer=ray.get(ref, timeout=0))
    except GetTimeoutError:
        ray.cancel(ref, force=True)
        silence = f"The node gave no answer within {_ANSWER_WITHIN_S:g} s; look whether it is overloaded, or start Ray there anew."
    except Exception as error:
        silence = _silence(error)
    return dataclasses.replace(node, silence=silence)


def _silence(error: Exception) -> str:
    if missing := re.search(r"No module named '(\w+)", str(error)):
        return f"The node's Python has no {missing[1]}; install raytrain in the environment in which Ray runs there."
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"The node could not answer ({lines[-1].rstrip('.')}); look at it, or start Ray there anew."


def _placed(found: Hardware) -> tuple[Placement | None, str | None]:
    """What ``--workers auto`` comes to, or why it comes to nothing."""
    try:
        return place(recipes.custom(), found), None
    except UsageError as error:
        return None, str(error)


def _crowded(found: Hardware, placement: Placement | None) -> str | None:
    if placement is None:
        return None
    left, wanted = placement.data_cpus * placement.num_workers, placement.num_workers if placement.device == "cuda" else 1
    if left > wanted - 0.01:  # shares of CPUs are rounded down
        return None
    return (
        f"The cluster has {cpus(found.cpus)}, which leaves {left:.2g} to read images for {workers(placement)}, which will wait for "
        "them; add CPUs, or use fewer --workers."
    )


def _unshared(store: Store, found: Hardware) -> str | None:
    if store.settings is not None or found.num_nodes == 1:
        return None
    return f"{store.url} is a folder; see that all {found.num_nodes} nodes share it, or use s3://bucket/prefix as --storage."


def _failures(node: Node) -> Iterator[str]:
    if node.answer is None:
        assert node.silence is not None
        yield node.silence
        return
    yield from node.answer.problems
    if node.gpus >= 1 and not node.answer.gpus:
        yield f"nvidia-smi sees no GPU, and Ray counts {node.gpus:g}; check the driver, and that a container is run with --gpus all."


def _warnings(node: Node, own: dict[str, str | None]) -> Iterator[str]:
    if node.answer is None:
        return
    if node.gpus < len(node.answer.gpus):
        there = len(node.answer.gpus)
        yield f"Ray counts {node.gpus:g} of the {there} GPUs that nvidia-smi sees; start Ray with --num-gpus {there} to use them all."
    if node.answer.shm_bytes is not None and node.answer.shm_bytes < node.object_store_bytes:
        yield (
            f"/dev/shm has {size(node.answer.shm_bytes)} and the object store {size(node.object_store_bytes)}, so that images pass "
            f"through the disk; run the container with --shm-size {node.object_store_bytes / 2**30:.0f}g or more."
        )
    for name, version in node.answer.versions.items():
        if version != own[name]:
            yield f"{name} is {version or 'missing'} there and {own[name] or 'missing'} here; install the same version."


def _gathered(nodes: Iterable[Node], told_by: Callable[[Node], Iterator[str]]) -> list[Finding]:
    """Each sentence once, with all of the nodes that it is true of."""
    gathered: dict[str, list[str]] = {}
    for node in nodes:
        for sentence in told_by(node):
            gathered.setdefault(sentence, []).append(node.address)
    return [Finding(sentence, tuple(where)) for sentence, where in gathered.items()]
