"""Check every node of a cluster: its hardware and versions, and whether it can read the data and write the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raytrain import recipes
from raytrain.backends.placement import Hardware, Placement, place
from raytrain.backends.ray.connection import connection
from raytrain.backends.ray.hardware import cluster_hardware
from raytrain.diagnostics.cluster_probe import Node, probe_nodes
from raytrain.diagnostics.findings import (
    Finding,
    Versions,
    different_nvidia_drivers,
    folder_on_many_nodes,
    group_by_sentence,
    node_failures,
    node_warnings,
    too_few_data_cpus,
)
from raytrain.diagnostics.network_probe import AllReduce, measure_all_reduce
from raytrain.diagnostics.node_probe import ProbeRequest, versions
from raytrain.errors import UsageError
from raytrain.storage.base import Store
from raytrain.storage.clouds.cloud import Cloud
from raytrain.storage.clouds.s3 import S3, credential_method
from raytrain.storage.credentials import LentCredentials
from raytrain.storage.open import open_store
from raytrain.storage.request_errors import explain

_CREDENTIAL_METHODS = {
    "env": "environment",
    "shared-credentials-file": "profile",
    "config-file": "profile",
    "sso": "single sign-on",
}


@dataclass(frozen=True)
class DoctorReport:
    """What :func:`diagnose` found. Contains no secret.

    ``failures`` prevent training, ``warnings`` do not. ``placement`` is that of ``--workers auto``, None if the cluster
    is too small for any. ``all_reduce`` is None on a single node, and if a node did not answer.
    """

    data: str | None
    storage: str
    versions: Versions
    placement: Placement | None
    nodes: tuple[Node, ...]
    all_reduce: AllReduce | None
    failures: tuple[Finding, ...]
    warnings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing prevents training."""
        return not self.failures

    def summary(self) -> dict[str, Any]:
        """The report as plain values."""
        fields = dataclasses.asdict(self)
        for level in ("failures", "warnings"):
            fields[level] = [finding._asdict() for finding in getattr(self, level)]
        return {"ok": self.ok, **fields}


def diagnose(data: str | None, storage: str, address: str | None) -> DoctorReport:
    """Check whether every node of the cluster at ``address`` can read ``data`` and write to ``storage``.

    Raises UsageError if there is no cluster or a URL is wrong, StorageError if the configuration of a cloud is broken.
    """
    data_store, run_store = open_store(data) if data else None, open_store(storage)
    with connection(address) as cluster:
        cluster.connect()
        with _lending_credentials([store for store in (run_store, data_store) if store is not None]) as lent:
            nodes = probe_nodes(lent.to_request(data_store, run_store))
        all_reduce = _measure_all_reduce(nodes)
        found = cluster_hardware()
    placement, too_small = _place_workers(found)
    own_versions = versions()
    cluster_warnings = (
        too_few_data_cpus(found, placement),
        folder_on_many_nodes(run_store, found.num_nodes),
        different_nvidia_drivers(nodes),
    )
    return DoctorReport(
        data=data_store and data_store.url,
        storage=run_store.url,
        versions=own_versions,
        placement=placement,
        nodes=nodes,
        all_reduce=all_reduce,
        failures=_findings(lent.problem, too_small, all_reduce and all_reduce.problem)
        + group_by_sentence(nodes, lambda node: node_failures(node, own_versions)),
        warnings=_findings(*cluster_warnings) + group_by_sentence(nodes, node_warnings),
    )


def _measure_all_reduce(nodes: Sequence[Node]) -> AllReduce | None:
    reports = [node.report for node in nodes if node.report is not None]
    return measure_all_reduce([len(report.gpus) for report in reports]) if len(reports) == len(nodes) else None


@dataclass(frozen=True)
class _LentCredentials:
    """This process's credentials on loan to the nodes. ``problem`` is a sentence that says why there are none."""

    source: LentCredentials | None = None
    found_in: str = ""
    problem: str | None = None

    def to_request(self, data: Store | None, storage: Store) -> ProbeRequest:
        """The request to check these stores with the lent credentials."""
        return ProbeRequest(data and self._lend_to(data), self._lend_to(storage), self.source, self.found_in)

    def _lend_to(self, store: Store) -> Store:
        return store if self.source is None else store.with_lent_credentials(self.source)


@contextmanager
def _lending_credentials(stores: Sequence[Store]) -> Iterator[_LentCredentials]:
    """Lend the nodes this process's credentials if one of ``stores`` is in a bucket."""
    store = next((store for store in stores if store.cloud is not None), None)
    if store is None:
        yield _LentCredentials()
        return
    from raytrain.backends.ray.credential_server import serving_credentials  # imports Ray

    with serving_credentials(stores) as (served, _):
        try:
            lent = _LentCredentials(served, _credential_method(store.cloud))
        except Exception as error:
            lent = _LentCredentials(served, problem=str(explain(error, store.url, store.cloud)))
        yield lent


def _credential_method(cloud: Cloud | None) -> str:
    """Which step of the AWS credential chain found this process's credentials, in a word; empty for another cloud."""
    method = credential_method() if isinstance(cloud, S3) else ""
    return _CREDENTIAL_METHODS.get(method, "role" if "role" in method else method)


def _place_workers(found: Hardware) -> tuple[Placement | None, str | None]:
    """The placement of ``--workers auto``, or why the cluster is too small for it."""
    try:
        return place(recipes.custom(), found), None
    except UsageError as error:
        return None, str(error)


def _findings(*sentences: str | None) -> tuple[Finding, ...]:
    return tuple(Finding(sentence) for sentence in sentences if sentence)
