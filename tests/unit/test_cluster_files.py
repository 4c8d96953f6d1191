"""The cluster files are valid for Ray's launcher and AWS, and grant only the permissions that are needed."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws
from packaging.requirements import Requirement

from raytrain.launch.ray.connection import HEAD_AWAY_S

pytestmark = pytest.mark.not_quick

CLUSTER = Path(__file__).parents[2] / "cluster"
REGION = "us-west-2"


LAUNCHER_FILES = ("aws.yaml", "gcp.yaml", "onprem.yaml")


def launcher_config(name: str, text: str | None = None) -> dict[str, Any]:
    """A configuration of Ray's launcher with Ray's defaults filled in; raises ValidationError if Ray would."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    filled = prepare_config(yaml.safe_load(text or (CLUSTER / name).read_text()))
    validate_config(filled)
    return filled


@pytest.fixture
def config() -> dict[str, Any]:
    return launcher_config("aws.yaml")


@pytest.fixture
def empty_account(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mocked AWS account."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with mock_aws():
        yield boto3.client("iam", REGION)


@pytest.fixture
def account(empty_account: Any) -> Any:
    """A mocked AWS account with the stack of iam.yaml."""
    create_stack(Bucket="images")
    return empty_account


def create_stack(**parameters: str) -> None:
    boto3.client("cloudformation", REGION).create_stack(
        StackName="raytrain",
        TemplateBody=(CLUSTER / "iam.yaml").read_text(),
        Parameters=[{"ParameterKey": key, "ParameterValue": value} for key, value in parameters.items()],
        Capabilities=["CAPABILITY_NAMED_IAM"],
    )


def test_gpus_are_on_workers_alone_which_run_only_while_they_are_used(config: dict[str, Any], account: Any) -> None:
    types = config["available_node_types"]
    assert {name: num_gpus(kind["node_config"]["InstanceType"]) for name, kind in types.items()} == {
        "ray.head.default": 0,
        "ray.worker.gpu.spot": 1,
        "ray.worker.gpu.on_demand": 1,
        "ray.worker.gpu4.spot": 4,
        "ray.worker.cpu.spot": 0,
    }
    assert all(kind["min_workers"] == 0 for kind in types.values())
    assert config["idle_timeout_minutes"] == 5


def num_gpus(instance_type: str) -> int:
    (described,) = boto3.client("ec2", REGION).describe_instance_types(InstanceTypes=[instance_type])["InstanceTypes"]
    return sum(gpu["Count"] for gpu in described.get("GpuInfo", {}).get("Gpus", []))


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_the_block_for_a_container_is_valid_too(name: str) -> None:
    text = (CLUSTER / name).read_text()
    block = re.search(r"^# docker:\n(#   .*\n)+", text, re.MULTILINE)
    assert block
    filled = launcher_config(name, text.replace(block[0], re.sub("^# ", "", block[0], flags=re.MULTILINE)))
    assert filled["docker"]["image"] == f"rayproject/ray:{pinned()['ray']}-py312-gpu"


def test_what_is_not_commented_out_uses_no_container(config: dict[str, Any]) -> None:
    assert config["docker"] == {}


@pytest.mark.parametrize(
    ("unavailable", "asked", "expected"),
    [
        ((), {"GPU": 1, "CPU": 1}, "ray.worker.gpu.spot"),
        (("ray.worker.gpu.spot",), {"GPU": 1, "CPU": 1}, "ray.worker.gpu.on_demand"),
        ((), {"GPU": 4, "CPU": 4}, "ray.worker.gpu4.spot"),
        ((), {"CPU": 1}, "ray.worker.cpu.spot"),
        (("ray.worker.cpu.spot",), {"CPU": 1}, "ray.worker.cpu.spot"),  # no machine with GPUs for decoding alone
    ],
)
@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_the_autoscaler_takes_spot_machines_first_and_others_if_there_are_none(
    name: str, unavailable: tuple[str, ...], asked: dict[str, Any], expected: str, account: Any
) -> None:
    from ray.autoscaler._private.node_provider_availability_tracker import NodeProviderAvailabilityTracker
    from ray.autoscaler._private.resource_demand_scheduler import get_nodes_for
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    tracker = NodeProviderAvailabilityTracker(timer=lambda: 0.0)
    for kind in unavailable:
        no_capacity = NodeLaunchException("InsufficientInstanceCapacity", "none left", None)
        tracker.update_node_availability(of_cloud(kind, name), 0, no_capacity)
    scorer = functools.partial(script("on_demand_fallback").score, node_availability_summary=tracker.summary())
    head = launcher_config(name)["head_node_type"]
    added, missing = get_nodes_for(with_resources(name), {}, head, 20, [asked], scorer)
    assert (added, missing) == ({of_cloud(expected, name): 1}, [])


def of_cloud(node_type: str, name: str) -> str:
    """The name that a file gives to a node type: Google's labels have no dots."""
    return node_type if name == "aws.yaml" else node_type.replace(".", "_")


def test_google_allows_the_names_of_node_types_as_labels() -> None:
    config = launcher_config("gcp.yaml")
    names = [config["cluster_name"], *config["available_node_types"]]
    assert [name for name in names if not re.fullmatch(r"[a-z0-9_-]{1,63}", name)] == []


@functools.cache
def with_resources(name: str) -> dict[str, Any]:
    """The node types of a file; of AWS's, with the resources that Ray finds out from EC2."""
    config = launcher_config(name)
    if config["provider"]["type"] == "aws":
        from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

        config = AWSNodeProvider.fillout_available_node_types_resources(config)
    return config["available_node_types"]


def script(name: str) -> Any:
    """A script that the head runs, as a module."""
    spec = importlib.util.spec_from_file_location(name, CLUSTER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_head_starts_the_autoscaler_and_what_ends_it_with_files_that_are_there(config: dict[str, Any]) -> None:
    commands = " ".join(config["head_start_ray_commands"])
    assert "RAY_AUTOSCALER_UTILIZATION_SCORER=on_demand_fallback.score" in commands
    assert {"~/cluster/end_when_idle.py", "~/cluster/on_demand_fallback.py"} <= set(config["file_mounts"])
    assert "python ~/cluster/end_when_idle.py ~/ray_bootstrap_config.yaml" in commands


def test_an_idle_cluster_is_ended_after_half_an_hour_without_a_job() -> None:
    looks = iter([False] * 29 + [True] + [False] * 40)
    script("end_when_idle").wait_until_idle(looks)
    assert len(list(looks)) == 10


def test_a_cloud_that_refuses_to_end_an_idle_cluster_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ending, calls = script("end_when_idle"), list[str]()

    def end_cluster(config: Any) -> None:
        calls.append("end")
        if calls.count("end") == 1:
            raise RuntimeError("RequestLimitExceeded")

    def look() -> Iterator[bool]:
        calls.append("looks")
        yield from [False] * 30 if len(calls) == 1 else [True] * 5 + [False]

    monkeypatch.setattr(ending, "end_cluster", end_cluster)
    monkeypatch.setattr(ending, "looks", look)
    ending.end_when_idle({})
    assert calls == ["looks", "end", "looks", "end"], "not while a job runs, and soon after it"
    assert capsys.readouterr().out == "The cluster could not be ended, and is tried again: RequestLimitExceeded\n"


def test_rays_provider_starts_spot_machines_and_an_idle_cluster_ends_them_all(
    config: dict[str, Any], account: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's provider for AWS, against a mocked EC2: with the machine image, which AWS resolves, replaced."""
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.providers import _get_node_provider

    monkeypatch.setenv("HOME", str(tmp_path))  # Ray keeps the key pair there that it creates
    (tmp_path / ".ssh").mkdir()
    ec2 = boto3.client("ec2", REGION)
    image = ec2.describe_images()["Images"][0]["ImageId"]
    for kind in config["available_node_types"].values():
        kind["node_config"]["ImageId"] = image
    ready = bootstrap_aws(config)
    provider = _get_node_provider(ready["provider"], ready["cluster_name"], use_cache=False)
    for name, kind in (("ray.head.default", "head"), ("ray.worker.gpu.spot", "worker")):
        tags = {"ray-node-type": kind, "ray-user-node-type": name}
        provider.create_node(ready["available_node_types"][name]["node_config"], tags, 1)
    assert sorted(machine.get("InstanceLifecycle", "") for machine in running(ec2)) == ["", "spot"]
    script("end_when_idle").end_cluster(ready)
    assert running(ec2) == []


def running(ec2: Any) -> list[dict[str, Any]]:
    states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    found = ec2.describe_instances(Filters=states)["Reservations"]
    return [machine for reservation in found for machine in reservation["Instances"]]


def test_every_machine_has_a_profile_of_the_stack(config: dict[str, Any], account: Any) -> None:
    named = {kind["node_config"]["IamInstanceProfile"]["Name"] for kind in config["available_node_types"].values()}
    made = {profile["InstanceProfileName"] for profile in account.list_instance_profiles()["InstanceProfiles"]}
    assert named == made == {"raytrain-head", "raytrain-worker"}


def test_only_the_head_may_start_machines(account: Any) -> None:
    actions = {profile: allowed(account, profile) for profile in ("raytrain-head", "raytrain-worker")}
    assert {"s3:GetObject", "s3:PutObject", "s3:ListBucket"} <= actions["raytrain-worker"] < actions["raytrain-head"]
    assert {action.split(":")[0] for action in actions["raytrain-worker"]} == {"s3"}
    assert {"ec2:RunInstances", "ec2:TerminateInstances", "iam:PassRole", "ssm:GetParameters"} <= actions[
        "raytrain-head"
    ]


def allowed(iam: Any, profile: str) -> set[str]:
    """Every action that the role of a profile allows."""
    return {action for statement in statements_of(iam, profile) for action in listed(statement["Action"])}


def statements_of(iam: Any, profile: str) -> list[dict[str, Any]]:
    """Every statement of the policies of a profile's role."""
    (role,) = iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]
    documents = []
    for attached in iam.list_attached_role_policies(RoleName=role["RoleName"])["AttachedPolicies"]:
        policy = iam.get_policy(PolicyArn=attached["PolicyArn"])["Policy"]
        version = iam.get_policy_version(PolicyArn=policy["Arn"], VersionId=policy["DefaultVersionId"])
        documents.append(version["PolicyVersion"]["Document"])
    return [statement for document in documents for statement in document["Statement"]]


def resources(statement: dict[str, Any]) -> list[str]:
    return listed(statement["Resource"])


def listed(action: str | list[str]) -> list[str]:
    return [action] if isinstance(action, str) else action


def test_the_stack_has_no_yaml_aliases_which_aws_refuses() -> None:
    assert not [token for token in yaml.scan((CLUSTER / "iam.yaml").read_text()) if isinstance(token, yaml.AliasToken)]


@pytest.mark.parametrize("action", ["ec2:TerminateInstances", "ec2:RunInstances", "ec2:CreateTags"])
def test_the_head_may_change_the_machines_of_this_cluster_only(
    action: str, config: dict[str, Any], account: Any
) -> None:
    statements = [each for each in statements_of(account, "raytrain-head") if action in listed(each["Action"])]
    on_machines = [each for each in statements if any(arn == "*" or ":instance/" in arn for arn in resources(each))]
    assert on_machines
    for statement in on_machines:
        required = statement["Condition"]["StringEquals"]
        tags = {required.get(f"aws:{kind}Tag/ray-cluster-name") for kind in ("Resource", "Request")}
        assert tags - {None} == {config["cluster_name"]}


def test_the_head_may_not_tag_a_machine_that_is_not_of_this_cluster(account: Any) -> None:
    for statement in statements_of(account, "raytrain-head"):
        if "ec2:CreateTags" in listed(statement["Action"]):
            required = statement["Condition"]["StringEquals"]
            starts_one = required.get("ec2:CreateAction") == "RunInstances"
            assert starts_one or "aws:ResourceTag/ray-cluster-name" in required
            assert resources(statement) == [arn for arn in resources(statement) if ":instance/" in arn]


def test_no_statement_of_the_head_changes_machines_by_a_wildcard(account: Any) -> None:
    for statement in statements_of(account, "raytrain-head"):
        if resources(statement) == ["*"]:
            assert listed(statement["Action"]) == ["ec2:Describe*"]


def test_other_images_are_only_read_and_a_key_of_ones_own_only_used(empty_account: Any) -> None:
    create_stack(Bucket="runs", DataBucket="images", KmsKeyArn="arn:aws:kms:us-west-2:1:key/2")
    statements = statements_of(empty_account, "raytrain-worker")
    granted = {arn.rpartition(":")[2]: set(listed(each["Action"])) for each in statements for arn in resources(each)}
    assert granted["images/*"] == {"s3:GetObject"}
    assert granted["key/2"] == {"kms:Decrypt", "kms:GenerateDataKey"}
    assert "s3:PutObject" in granted["runs/*"]


def test_the_bucket_removes_uploads_that_nobody_ends(empty_account: Any) -> None:
    client = boto3.client("s3", "us-east-1")
    client.create_bucket(Bucket="runs")
    rules = json.loads((CLUSTER / "lifecycle.json").read_text())
    client.put_bucket_lifecycle_configuration(Bucket="runs", LifecycleConfiguration=rules)
    (rule,) = client.get_bucket_lifecycle_configuration(Bucket="runs")["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 2} and rule["Status"] == "Enabled"


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml"])
def test_no_task_runs_on_the_head(name: str) -> None:
    config = launcher_config(name)
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}
    assert all("--num-cpus" not in command for command in config["head_start_ray_commands"])


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_files_copied_to_the_machines_exist_and_contain_no_credentials(name: str) -> None:
    config = launcher_config(name)
    mounts = config["file_mounts"]
    assert all((CLUSTER.parent / local).exists() for local in mounts.values() if not local.startswith("~"))
    assert [local for local in mounts.values() if local.startswith("~")] == ["~/.ray/auth_token"]
    assert "AWS_" not in yaml.safe_dump(config)


@pytest.mark.parametrize("name", LAUNCHER_FILES)
def test_the_commands_have_valid_shell_syntax(name: str) -> None:
    config = launcher_config(name)
    for kind in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        for command in config[kind]:
            assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0, command
    assert all(
        "dashboard-host" not in word for command in config["head_start_ray_commands"] for word in shlex.split(command)
    )


def test_the_dashboard_shows_metrics_that_a_run_has() -> None:
    from raytrain.runs.metric_row import MetricRow
    from raytrain.trackers.tracker import row_metrics

    measured = {"loss": 0.5, "accuracy": 0.5}
    columns = {"samples_seen": 1, "learning_rate": 0.1, "images_per_s": 9.0, "data_wait_fraction": 0.1}
    rows = [MetricRow(kind="step", step=1, epoch=1, metrics=measured, **columns)]
    rows.append(MetricRow(kind="evaluation", step=1, epoch=1, metrics=measured))
    known = {f"raytrain_{name.replace('/', '_')}" for row in rows for name in row_metrics(row)} | {"raytrain_step"}
    dashboard = (CLUSTER / "monitoring" / "grafana-dashboard.json").read_text()
    assert "raytrain_train_loss" in known
    assert set(re.findall(r"raytrain_\w+", dashboard)) <= known


def test_prometheus_looks_for_the_run_at_the_port_of_the_tracker() -> None:
    from raytrain.trackers.prometheus import DEFAULT_PORT

    scraped = yaml.safe_load((CLUSTER / "monitoring" / "prometheus.yaml").read_text())["scrape_configs"]
    targets = {each["job_name"]: each.get("static_configs", [{}])[0].get("targets") for each in scraped}
    assert targets == {"raytrain": [f"localhost:{DEFAULT_PORT}"], "ray": None}


STOP_WAIT = re.compile(r"RAY_JOB_STOP_WAIT_TIME_S\W*=?\s*\"?(\d+)")


@pytest.mark.parametrize("name", [*LAUNCHER_FILES, "anyscale.yaml", "Dockerfile"])
def test_a_stopped_job_has_time_for_a_checkpoint(name: str) -> None:
    assert STOP_WAIT.findall((CLUSTER / name).read_text())[-1] == "300"


@pytest.mark.parametrize("name", [*LAUNCHER_FILES, "skypilot.yaml", "slurm.sbatch", "Dockerfile"])
def test_all_machines_do_without_the_head_as_long_as_the_command_does(name: str) -> None:
    assert f"RAY_gcs_rpc_server_reconnect_timeout_s={HEAD_AWAY_S}" in (CLUSTER / name).read_text()


@pytest.mark.not_quick
def test_a_head_that_cannot_start_ends_the_task_of_skypilot(tmp_path: Path) -> None:
    (tmp_path / "ray").write_text('#!/bin/bash\n[ "$1" = health-check ] || echo "port in use"\nexit 1\n')
    (tmp_path / "ray").chmod(0o755)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "bin").symlink_to(tmp_path)
    variables = {
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "SKYPILOT_NODE_IPS": "10.0.0.1",
        "SKYPILOT_TASK_ID": "1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
    }
    script = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())["run"]
    done = subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 1
    assert "port in use" in done.stdout and "Ray could not start" in done.stderr


@pytest.mark.parametrize("name", ["docs/cluster.md", "cluster/anyscale.yaml"])
def test_nothing_of_raytrain_is_left_out_of_a_packed_checkout(name: str) -> None:
    from ray._private.thirdparty.pathspec.pathspec import PathSpec  # no public function says what a package leaves out

    found = re.search(r'excludes"?: (\[.*?\])', (CLUSTER.parent / name).read_text())
    assert found is not None
    left_out = PathSpec.from_lines("gitwildmatch", yaml.safe_load(found[1]))
    package = [str(path.relative_to(CLUSTER.parent)) for path in (CLUSTER.parent / "raytrain").rglob("*.py")]
    assert left_out.match_file("runs/first/metrics.jsonl")
    assert [path for path in package if left_out.match_file(path)] == []


def pinned() -> dict[str, str]:
    """The version of each package that machines get."""
    lines = (CLUSTER / "requirements.txt").read_text().splitlines()
    return dict(line.partition(" ")[0].split("==") for line in lines)


def test_every_dependency_is_pinned_to_a_version_that_raytrain_allows() -> None:
    from importlib.metadata import requires

    allowed = [Requirement(each) for each in requires("raytrain") or () if "extra ==" not in each]
    needed = {each.name for each in allowed} | {"boto3", "google-api-python-client"}
    outside = [str(each) for each in allowed if not each.specifier.contains(pinned().get(each.name, "0"))]
    assert (needed - set(pinned()), outside) == (set(), []), "make requirements.txt anew, as cluster/README.md says"


def test_every_file_names_the_version_of_ray_that_is_pinned() -> None:
    files = [path for path in CLUSTER.rglob("*.*") if path.suffix != ".pyc"]
    named = [re.findall(r"(?:ray:|rayVersion: )(\d+\.\d+\.\d+)", path.read_text()) for path in files]
    dockerfile = re.findall(r"ray:(\d+\.\d+\.\d+)", (CLUSTER / "Dockerfile").read_text())
    versions = {version for found in (*named, dockerfile) for version in found}
    assert versions == {pinned()["ray"]}
