"""The doctor: the problems that it finds on the nodes of a cluster, and its output."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from PIL import Image
from rich.console import Console

from raytrain.demo.s3_server import S3Server
from raytrain.diagnostics import doctor, node_probe
from raytrain.diagnostics.doctor import DoctorReport, Finding, diagnose, node_warnings
from raytrain.diagnostics.node_probe import Disk, Node, ProbeRequest, probe_node
from raytrain.display.diagnostics_tables import doctor_page
from raytrain.errors import UsageError
from raytrain.launch.gpus import Gpu
from raytrain.launch.placement import Hardware
from raytrain.launch.ray import private_api
from raytrain.launch.ray.nodes import ClusterNode, run_on_each_node
from raytrain.storage.open import open_store
from tests.helpers import fake_nvml
from tests.helpers.node_reports import HEALTHY, HERE

pytestmark = pytest.mark.usefixtures("ray_cluster")

H200 = Gpu("NVIDIA H200", 150 * 10**9, "570.86.15", "9.0")


@pytest.fixture
def images_url(s3_url: str) -> str:
    """Four images below a prefix of the S3 server."""
    png = io.BytesIO()
    Image.new("RGB", (8, 8)).save(png, "PNG")
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "dog/2.PNG", "notes.txt"):
        open_store(s3_url).put(name, png.getvalue())
    return s3_url


@pytest.fixture
def reporting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the report of the node by one with the given fields."""

    def report(**fields: Any) -> None:
        now = time.time()
        found = dataclasses.replace(HEALTHY, **{"clock_s": (now, now), **fields})
        monkeypatch.setattr(node_probe, "probe_node", lambda request, node: found)

    return report


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the size of the cluster by the given one."""

    def count(**has: Any) -> None:
        size = {"num_nodes": 1, "cpus": 8, "gpus": 0, "object_store_bytes": 1, "gpu_types": {}, **has}
        monkeypatch.setattr(doctor, "cluster_hardware", lambda: Hardware(**size))

    return count


def shown(report: DoctorReport) -> str:
    """Render a report for a terminal of 100 columns."""
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(doctor_page(report), highlight=False)
    return console.export_text()


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_healthy_cluster_has_no_findings(images_url: str, tmp_path: Path, s3: S3Server) -> None:
    report = diagnose(images_url, str(tmp_path / "runs"), None)

    assert report.ok
    (node,) = report.summary()["nodes"]
    assert node["cpus"] == 2
    assert node["report"]["read_speed"]["num_images"] == 4
    assert node["report"]["read_speed"]["images_per_s"] > 0
    assert node["report"]["writable"]
    assert node["report"]["identity"] == f"driver's environment …{s3.environment()['AWS_ACCESS_KEY_ID'][-4:]}"
    assert report.summary()["placement"]["num_workers"] == 1

    text = shown(report)
    assert "images/s" in text and "Nothing prevents training" in text
    assert images_url in text and str(tmp_path / "runs") in text
    assert list((tmp_path / "runs").iterdir()) == []
    check_no_secret(report, s3)


def check_no_secret(report: DoctorReport, s3: S3Server) -> None:
    """Check that a report, which names the end of the driver's access key, has neither the key nor its secret."""
    said = shown(report) + json.dumps(report.summary()) + repr(report)
    environment = s3.environment()
    assert environment["AWS_ACCESS_KEY_ID"][-4:] in said
    assert environment["AWS_SECRET_ACCESS_KEY"] not in said and environment["AWS_ACCESS_KEY_ID"] not in said


def test_a_storage_prefix_is_written_with_the_drivers_keys(s3_url: str, s3: S3Server) -> None:
    report = diagnose(None, s3_url, None)
    assert report.ok
    assert "not checked" in shown(report)
    assert list(open_store(s3_url).list()) == []
    check_no_secret(report, s3)


def test_a_wrong_secret_is_reported_and_not_shown(
    images_url: str, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "n0tTheRightSecret")
    report = diagnose(images_url, images_url, None)

    assert not report.ok
    (failure,) = report.failures  # Once, although both reading and writing fail.
    key = s3.environment()["AWS_ACCESS_KEY_ID"]
    assert failure.sentence.startswith(
        f"The secret key does not belong to the access key …{key[-4:]}; check AWS_SECRET_ACCESS_KEY"
    )
    said = shown(report) + json.dumps(report.summary()) + repr(report)
    assert "n0tTheRightSecret" not in said and key not in said


def test_a_missing_bucket_is_reported(s3: S3Server, tmp_path: Path) -> None:
    report = diagnose("s3://nowhere/images", str(tmp_path), None)
    assert [finding.sentence for finding in report.failures] == [
        f"There is no bucket nowhere at {s3.endpoint_url}; check the name, or create it."
    ]


def test_a_prefix_without_images_is_reported(s3_url: str, tmp_path: Path) -> None:
    open_store(s3_url).put("readme.txt", b"")
    (failure,) = diagnose(s3_url, str(tmp_path), None).failures
    assert failure.sentence.startswith(f"There are no images below {s3_url}; check --data")


@pytest.mark.skipif(not os.path.isdir("/sys"), reason="needs a folder that even root cannot write to")
def test_a_read_only_storage_folder_is_reported() -> None:
    report = diagnose(None, "/sys/runs", None)
    (failure,) = report.failures
    assert failure.sentence.startswith("This user has no permission to write to /sys/runs;")
    assert "no" in shown(report)


def test_missing_credentials_are_reported(images_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    report = diagnose(images_url, str(tmp_path), None)
    assert report.failures[0].sentence.startswith(
        f"There are no AWS credentials for {images_url}; set AWS_ACCESS_KEY_ID"
    )


def test_a_wrong_address_is_a_usage_error_at_once() -> None:
    with pytest.raises(UsageError, match="must not contain credentials"):
        diagnose("s3://key:secret@bucket", "./runs", None)


def test_a_node_that_does_not_answer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(node_probe, "probe_node", lambda request, node: threading.Event().wait())
    report = diagnose(None, str(tmp_path), None)
    (failure,) = report.failures
    assert failure.sentence.startswith("The node did not answer within 0.1 s;")
    assert failure.nodes == (report.nodes[0].address,)
    assert "no answer" in shown(report)
    json.dumps(report.summary())


def test_a_node_without_raytrain_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here_only = types.ModuleType("only_on_this_node")
    exec("def probe_node(request, node): ...", here_only.__dict__)
    monkeypatch.setitem(sys.modules, "only_on_this_node", here_only)
    monkeypatch.setattr(node_probe, "probe_node", here_only.probe_node)
    (failure,) = diagnose(None, str(tmp_path), None).failures
    assert failure.sentence == (
        "The node's Python has no only_on_this_node; install raytrain in the Python environment that runs Ray there."
    )


def test_a_storage_folder_on_several_nodes_must_be_shared(
    tmp_path: Path, s3_url: str, counting: Callable[..., None]
) -> None:
    counting(num_nodes=3)
    report = diagnose(None, str(tmp_path), None)
    assert report.ok
    assert [finding.sentence for finding in report.warnings] == [
        f"{tmp_path} is a folder; make sure that all 3 nodes share it, or use s3://bucket/prefix as --storage."
    ]
    assert diagnose(None, s3_url, None).warnings == ()


def test_too_few_cpus_to_read_images_are_reported(tmp_path: Path, counting: Callable[..., None]) -> None:
    counting(cpus=4, gpus=4)
    (warning,) = diagnose(None, str(tmp_path), None).warnings
    assert warning.sentence.startswith("The cluster has 4 CPUs, which leaves 2 to read images for 4 workers on cuda")
    counting(cpus=8, gpus=4)
    assert diagnose(None, str(tmp_path), None).warnings == ()


def test_a_cluster_without_cpus_is_reported(tmp_path: Path, counting: Callable[..., None]) -> None:
    counting(cpus=0)
    report = diagnose(None, str(tmp_path), None)
    assert not report.ok and report.placement is None
    assert "the cluster has 0 CPUs" in report.failures[0].sentence


def test_gpus_are_shown_and_those_that_ray_does_not_count_reported(
    tmp_path: Path, reporting: Callable[..., None]
) -> None:
    reporting(gpus=(H200, dataclasses.replace(H200, driver="550.54.14")), shm_bytes=64 << 20)
    report = diagnose(None, str(tmp_path), None)
    text = shown(report)
    assert "1 × H200" in text and "150 GB" in text and "driver 570.86.15" in text
    warnings = words(" ".join(finding.sentence for finding in report.warnings))
    assert report.ok
    assert "Ray counts 0 of the 2 GPUs that the NVIDIA driver reports; start Ray with --num-gpus 2" in warnings
    assert "/dev/shm has 0.1 GB and the object store" in warnings
    node = dataclasses.replace(report.nodes[0], object_store_bytes=5 << 29)
    assert any("--shm-size 3g or more" in sentence for sentence in node_warnings(node)), "2 GiB would be too little"
    assert "The nodes have NVIDIA drivers 550.54.14, 570.86.15; install the same one" in warnings


def test_another_version_on_a_node_is_a_failure(tmp_path: Path, reporting: Callable[..., None]) -> None:
    reporting(versions={**node_probe.versions(), "torch": "1.0"})
    (failure,) = diagnose(None, str(tmp_path), None).failures
    here = node_probe.versions()["torch"]
    assert failure.sentence == f"torch is 1.0 on the node but {here} here; install the same version."


def test_what_this_ray_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = private_api.Improvement("workers start slowly", ("ray:no_such_thing",))
    monkeypatch.setattr(private_api, "IMPROVEMENTS", (lacking,))
    warning = Finding(f"Ray {ray.__version__} lacks ray.no_such_thing, so workers start slowly.")
    assert warning in diagnose(None, str(tmp_path), None).warnings


def test_a_wrong_clock_and_a_full_disk_are_reported(tmp_path: Path, reporting: Callable[..., None]) -> None:
    reporting(clock_s=(time.time() + 100, time.time() + 101), disk=Disk(10**9, 50 * 10**9))
    report = diagnose(None, str(tmp_path), None)
    clock, disk = (words(finding.sentence) for finding in report.warnings)
    assert re.match(r"The node's clock is at least (9\d|10[01]) s ahead of this machine's; ", clock)
    assert disk.startswith("The disk of the temporary folder is 98% full, and Ray writes images to it")
    assert report.ok


def test_a_clock_that_is_behind_is_reported() -> None:
    node = Node("10.0.0.1", "0" * 8, 8, 0, 10**9, 10**9, HEALTHY, clock_ahead_s=-42)
    (warning,) = doctor.node_warnings(node)
    assert warning.startswith("The node's clock is at least 42 s behind this machine's")


def test_gpus_that_ray_counts_and_the_driver_does_not_are_a_failure() -> None:
    node = Node("10.0.0.1", "0" * 8, 8, 2, 10**9, 10**9, HEALTHY)
    (failure,) = doctor.group_by_sentence([node], lambda node: doctor.node_failures(node, node_probe.versions()))
    assert (failure.sentence, failure.nodes) == (
        "The NVIDIA driver reports no GPU, but Ray counts 2; check the driver, and that a container runs with --gpus "
        "all.",
        ("10.0.0.1",),
    )


def test_a_finding_about_many_nodes_is_shown_once() -> None:
    nodes = tuple(Node(f"10.0.0.{i}", f"{i:08x}", 4, 0, 10**9, 10**9, error="The node sleeps.") for i in range(9))
    some = Finding("It is dark.", tuple(node.address for node in nodes[:5]))
    everywhere = Finding("It is late.", tuple(node.address for node in nodes))
    text = shown(DoctorReport(None, "/runs", {"ray": None}, None, nodes, None, (some, everywhere), ()))
    assert "10.0.0.0, 10.0.0.1, 10.0.0.2 and 2 more: It is dark." in text
    assert "All 9 nodes: It is late." in text
    assert "ray not installed" in text


def request(storage: Path) -> ProbeRequest:
    return ProbeRequest(storage=open_store(str(storage)))


def test_gpus_are_those_that_the_driver_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gb10 = Gpu("NVIDIA GB10", 0, "570.86.15", "12.1")
    fake_nvml.install(monkeypatch, [H200, gb10])
    report = probe_node(request(tmp_path / "runs"), HERE)
    assert (report.gpus, report.problems) == ((H200, gb10), ())


def test_torch_that_cannot_use_the_gpus_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, [H200])
    too_old = "raise RuntimeError('The NVIDIA driver on your system is too old.')"
    monkeypatch.setattr(node_probe, "TORCH_CHECK", too_old)
    (problem,) = probe_node(request(tmp_path / "runs"), dataclasses.replace(HERE, gpus=1)).problems
    assert problem == (
        "torch cannot compute on the GPUs (RuntimeError: The NVIDIA driver on your system is too old); "
        "install an NVIDIA driver and a torch that fit each other."
    )


def test_a_node_imports_no_torch(tmp_path: Path) -> None:
    script = f"""if True:
        import sys
        from raytrain.storage.open import open_store
        from raytrain.launch.ray.nodes import ClusterNode, NodeResult
        from raytrain.diagnostics.node_probe import ProbeRequest, probe_node
        node = ClusterNode("127.0.0.1", "0", 1, 0, 1, 1)
        assert probe_node(ProbeRequest(storage=open_store({str(tmp_path)!r})), node).writable
        print([name for name in ("torch", "ray") if name in sys.modules])
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@dataclasses.dataclass(frozen=True)
class Times:
    """Can be called, and is no function."""

    factor: int

    def __call__(self, node: ClusterNode) -> float:
        return self.factor * node.cpus


def test_whatever_can_be_called_runs_on_each_node() -> None:
    (answer,) = run_on_each_node(Times(3), 60)
    assert (answer.result, answer.error) == (6.0, None)
