"""The files for KubeRay have the fields that its resources have, and the values that a run needs.

The fields are written down here as far as the files use them; KubeRay's own schema is not a part of this repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

CLUSTER = Path(__file__).parents[2] / "cluster"
JOB_FIELDS = {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"}
CLUSTER_FIELDS = {
    *("rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions"),
    *("headGroupSpec", "workerGroupSpecs"),
}
GROUP_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


def job() -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / "kuberay" / "ray-job.raytrain.yaml").read_text())


def cluster(kind: str) -> dict[str, Any]:
    if kind == "RayJob":
        return job()["spec"]["rayClusterSpec"]
    document = yaml.safe_load((CLUSTER / "kuberay" / "ray-cluster.yaml").read_text())
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", "RayCluster")
    return document["spec"]


def test_the_job_ends_its_cluster_and_continues_after_a_failure() -> None:
    assert (job()["apiVersion"], job()["kind"]) == ("ray.io/v1", "RayJob")
    spec = job()["spec"]
    assert spec.keys() <= JOB_FIELDS
    assert spec["shutdownAfterJobFinishes"] and spec["ttlSecondsAfterFinished"] and spec["backoffLimit"]
    assert " --resume " in spec["entrypoint"]


def test_the_command_of_the_job_is_one_that_raytrain_understands() -> None:
    from raytrain.cli.commands import COMMANDS
    from raytrain.cli.parser import parse

    program, *words = job()["spec"]["entrypoint"].split()
    command = parse([word for word in words if word != "--resume"], COMMANDS)  # which would look into the bucket
    assert (program, command.func.__name__, command.keywords["config"].name) == ("raytrain", "train", "first")


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
def test_a_cluster_asks_for_a_token_and_has_no_idle_workers(kind: str) -> None:
    spec = cluster(kind)
    assert spec.keys() <= CLUSTER_FIELDS
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["autoscalerOptions"]["idleTimeoutSeconds"] == 300
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert all(group.keys() <= GROUP_FIELDS for group in spec["workerGroupSpecs"])
    assert {group["minReplicas"] for group in spec["workerGroupSpecs"]} == {0}


@pytest.mark.parametrize("kind", ["RayJob", "RayCluster"])
def test_pods_have_time_for_a_checkpoint_and_an_account_and_gpus_are_tolerated(kind: str) -> None:
    groups = [cluster(kind)["headGroupSpec"], *cluster(kind)["workerGroupSpecs"]]
    for pod in (group["template"]["spec"] for group in groups):
        assert (pod["terminationGracePeriodSeconds"], pod["serviceAccountName"]) == (300, "raytrain")
        (container,) = pod["containers"]
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        tolerated = [each["key"] for each in pod.get("tolerations", ())]
        assert tolerated == (["nvidia.com/gpu"] if has_gpu else [])


def test_the_page_takes_the_token_and_the_port_of_the_cluster_in_the_file() -> None:
    document = yaml.safe_load((CLUSTER / "kuberay" / "ray-cluster.yaml").read_text())
    page = (CLUSTER / "README.md").read_text()
    # KubeRay names the secret of the token after the cluster, and its service, too.
    name = document["metadata"]["name"]
    assert f"kubectl get secret {name} --template='{{{{.data.auth_token}}}}' | base64 --decode" in page
    assert f"kubectl port-forward service/{name}-head-svc 8265" in page
