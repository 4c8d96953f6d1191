"""What the doctor finds on the nodes of a cluster, and how it says it."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from raytrain.backends.ray.cluster import Hardware
from rich.console import Console

from raytrain.demo.s3_server import EmbeddedS3
from raytrain.diagnostics import doctor, node_probe
from raytrain.diagnostics.doctor import DoctorReport, diagnose
from raytrain.diagnostics.node_probe import Gpu, NodeReport, ProbeRequest, examine
from raytrain.errors import UsageError
from raytrain.storage.open import open_store

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
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the node answer what the test says."""

    def answer(**fields: Any) -> None:
        well = NodeReport(versions=node_probe.versions(), gpus=(), shm_bytes=None, identity=None, reading=None, writable=True, problems=())
        found = dataclasses.replace(well, **fields)
        monkeypatch.setattr(doctor, "examine", lambda question, num_gpus: found)

    return answer


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the cluster be as large as the test says."""

    def count(**has: Any) -> None:
        monkeypatch.setattr(doctor, "hardware", lambda: Hardware(**{"num_nodes": 1, "cpus": 8, "gpus": 0, "object_store_bytes": 1, **has}))

    return count


def shown(report: DoctorReport) -> str:
    """What a terminal of 100 columns shows."""
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(report, highlight=False)
    return console.export_text()


def words(text: str) -> str:
    return " ".join(text.split())


def test_all_is_well(images_url: str, tmp_path: Path, s3: EmbeddedS3) -> None:
    report = diagnose(images_url, str(tmp_path / "runs"), None)

    assert report.ok
    (node,) = report.summary()["nodes"]
    assert node["cpus"] == 2
    assert node["answer"]["reading"]["num_images"] == 4
    assert node["answer"]["reading"]["images_per_s"] > 0
    assert node["answer"]["writable"]
    assert node["answer"]["identity"] == f"driver's environment …{s3.environment()['AWS_ACCESS_KEY_ID'][-4:]}"
    assert report.summary()["placement"]["num_workers"] == 1

    text = shown(report)
    assert "images/s" in text and "Nothing stands in the way" in text
    assert images_url in text and str(tmp_path / "runs") in text
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_storage_prefix_is_written_with_the_drivers_keys(s3_url: str) -> None:
    report = diagnose(None, s3_url, None)
    assert report.ok
    assert "not asked" in shown(report)
    assert list(open_store(s3_url).list()) == []


def test_a_secret_that_does_not_fit_is_told_and_not_shown(images_url: str, s3: EmbeddedS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "n0tTheRightSecret")
    report = diagnose(images_url, images_url, None)

    assert not report.ok
    (failure,) = report.failures  # once, though neither reading nor writing works
    key = s3.environment()["AWS_ACCESS_KEY_ID"]
    assert failure.sentence.startswith(f"The secret key does not belong to the access key …{key[-4:]}; check AWS_SECRET_ACCESS_KEY")
    said = shown(report) + json.dumps(report.summary()) + repr(report)
    assert "n0tTheRightSecret" not in said and key not in said


def test_the_secret_is_not_shown(images_url: str, s3: EmbeddedS3) -> None:
    report = diagnose(images_url, images_url, None)
    said = shown(report) + json.dumps(report.summary()) + repr(report)
    environment = s3.environment()
    assert environment["AWS_ACCESS_KEY_ID"][-4:] in said
    assert environment["AWS_SECRET_ACCESS_KEY"] not in said and environment["AWS_ACCESS_KEY_ID"] not in said


def test_a_bucket_that_does_not_exist(s3: EmbeddedS3, tmp_path: Path) -> None:
    report = diagnose("s3://nowhere/images", str(tmp_path), None)
    assert [trouble.sentence for trouble in report.failures] == [
        f"There is no bucket nowhere at {s3.endpoint_url}; check the name, or create it."
    ]


def test_a_prefix_without_images(s3_url: str, tmp_path: Path) -> None:
    open_store(s3_url).put("readme.txt", b"")
    (failure,) = diagnose(s3_url, str(tmp_path), None).failures
    assert failure.sentence.startswith(f"There are no images below {s3_url}; check --data")


@pytest.mark.skipif(not os.path.isdir("/sys"), reason="needs a folder that even root cannot write to")
def test_a_storage_folder_that_can_only_be_read() -> None:
    report = diagnose(None, "/sys/runs", None)
    (failure,) = report.failures
    assert failure.sentence.startswith("This user has no permission for /sys/runs;")
    assert "no" in shown(report)


def test_without_credentials(images_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    report = diagnose(images_url, str(tmp_path), None)
    assert report.failures[0].sentence.startswith(f"There are no AWS credentials for {images_url}; set AWS_ACCESS_KEY_ID")


def test_a_wrong_address_is_a_usage_error_at_once() -> None:
    with pytest.raises(UsageError, match="must not contain credentials"):
        diagnose("s3://key:secret@bucket", "./runs", None)


def test_a_node_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_ANSWER_WITHIN_S", 0.1)
    monkeypatch.setattr(doctor, "examine", lambda question, num_gpus: threading.Event().wait())
    report = diagnose(None, str(tmp_path), None)
    (failure,) = report.failures
    assert failure.sentence.startswith("The node gave no answer within 0.1 s;")
    assert failure.nodes == (report.nodes[0].address,)
    assert "no answer" in shown(report)
    json.dumps(report.summary())


def test_a_node_without_raytrain_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here_only = types.ModuleType("only_on_this_node")
    exec("def examine(question, num_gpus): ...", here_only.__dict__)
    monkeypatch.setitem(sys.modules, "only_on_this_node", here_only)
    monkeypatch.setattr(doctor, "examine", here_only.examine)
    (failure,) = diagnose(None, str(tmp_path), None).failures
    assert failure.sentence == ("The node's Python has no only_on_this_node; install raytrain in the environment in which Ray runs there.")


def test_a_folder_on_several_nodes_has_to_be_shared(tmp_path: Path, s3_url: str, counting: Callable[..., None]) -> None:
    counting(num_nodes=3)
    report = diagnose(None, str(tmp_path), None)
    assert report.ok
    assert [trouble.sentence for trouble in report.warnings] == [
        f"{tmp_path} is a folder; see that all 3 nodes share it, or use s3://bucket/prefix as --storage."
    ]
    assert diagnose(None, s3_url, None).warnings == ()


def test_too_few_cpus_to_read_images(tmp_path: Path, counting: Callable[..., None]) -> None:
    counting(cpus=4, gpus=4)
    (warning,) = diagnose(None, str(tmp_path), None).warnings
    assert warning.sentence.startswith("The cluster has 4 CPUs, which leaves 2 to read images for 4 workers on cuda")
    counting(cpus=8, gpus=4)
    assert diagnose(None, str(tmp_path), None).warnings == ()


def test_no_cpus_at_all(tmp_path: Path, counting: Callable[..., None]) -> None:
    counting(cpus=0)
    report = diagnose(None, str(tmp_path), None)
    assert not report.ok and report.placement is None
    assert "the cluster has 0 CPUs" in report.failures[0].sentence


def test_gpus_are_shown_and_those_that_ray_leaves_out_told(tmp_path: Path, answering: Callable[..., None]) -> None:
    answering(gpus=(H200, H200), shm_bytes=64 << 20, versions={**node_probe.versions(), "torch": "1.0"})
    report = diagnose(None, str(tmp_path), None)
    text = shown(report)
    assert "2 × H200" in text and "150 GB" in text and "driver 570.86.15" in text
    warnings = words(" ".join(trouble.sentence for trouble in report.warnings))
    assert report.ok
    assert "Ray counts 0 of the 2 GPUs that nvidia-smi sees; start Ray with --num-gpus 2" in warnings
    assert "/dev/shm has 0.1 GB and the object store" in warnings
    assert f"torch is 1.0 there and {node_probe.versions()['torch']} here" in warnings


def test_gpus_that_ray_counts_and_nobody_sees_are_a_failure() -> None:
    answer = NodeReport(node_probe.versions(), (), None, None, None, True, ())
    node = doctor.Node("10.0.0.1", "0" * 8, 8, 2, 10**9, 10**9, answer)
    (failure,) = doctor._gathered([node], doctor._failures)
    assert failure == (
        "nvidia-smi sees no GPU, and Ray counts 2; check the driver, and that a container is run with --gpus all.",
        ("10.0.0.1",),
    )


def test_troubles_of_many_nodes_are_told_once() -> None:
    nodes = tuple(doctor.Node(f"10.0.0.{i}", f"{i:08x}", 4, 0, 10**9, 10**9, silence="The node sleeps.") for i in range(9))
    some = doctor.Finding("It is dark.", tuple(node.address for node in nodes[:5]))
    everywhere = doctor.Finding("It is late.", tuple(node.address for node in nodes))
    text = shown(DoctorReport(None, "/runs", {"ray": None}, None, nodes, (some, everywhere), ()))
    assert "10.0.0.0, 10.0.0.1, 10.0.0.2 and 2 more: It is dark." in text
    assert "All 9 nodes: It is late." in text
    assert "ray not installed" in text


def question(storage: Path) -> ProbeRequest:
    return ProbeRequest(None, open_store(str(storage)), None, "")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    """An nvidia-smi that prints ``output``."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_gpus_are_read_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "NVIDIA H200, 143771, 570.86.15, 9.0\nNVIDIA GB10, [N/A], 580.65.06, 12.1")
    answer = examine(question(tmp_path / "runs"), num_gpus=0)
    assert answer.gpus == (Gpu("NVIDIA H200", 143771 << 20, "570.86.15", "9.0"), Gpu("NVIDIA GB10", 0, "580.65.06", "12.1"))
    assert answer.problems == ()


def test_torch_that_cannot_use_the_gpus_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "NVIDIA H200, 143771, 570.86.15, 9.0")
    monkeypatch.setattr(node_probe, "_TRY_TORCH", "raise RuntimeError('The NVIDIA driver on your system is too old.')")
    (problem,) = examine(question(tmp_path / "runs"), num_gpus=1).problems
    assert problem == (
        "torch cannot compute on the GPUs (RuntimeError: The NVIDIA driver on your system is too old); "
        "install a driver and a torch that fit each other."
    )


def test_a_node_imports_no_torch(tmp_path: Path) -> None:
    script = f"""if True:
        import sys
        from raytrain.storage.open import open_store
        from raytrain.diagnostics.node_probe import Question, examine
        assert examine(Question(None, open_store({str(tmp_path)!r}), None, ""), 0).writable
        print([name for name in ("torch", "ray") if name in sys.modules])
    """
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
