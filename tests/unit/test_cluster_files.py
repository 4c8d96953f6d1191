"""The cluster files are valid for Ray's launcher and AWS, and grant only the permissions that are needed."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws

CLUSTER = Path(__file__).parents[2] / "cluster"
REGION = "us-west-2"


@pytest.fixture
def config() -> dict[str, Any]:
    """The launcher's configuration with Ray's defaults filled in."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    filled = prepare_config(yaml.safe_load((CLUSTER / "aws.yaml").read_text()))
    validate_config(filled)
    return filled


@pytest.fixture
def account(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mocked AWS account with the stack of iam.yaml."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    with mock_aws():
        boto3.client("cloudformation", REGION).create_stack(
            StackName="raytrain",
            TemplateBody=(CLUSTER / "iam.yaml").read_text(),
            Parameters=[{"ParameterKey": "Bucket", "ParameterValue": "images"}],
            Capabilities=["CAPABILITY_NAMED_IAM"],
        )
        yield boto3.client("iam", REGION)


def test_only_workers_have_gpus_and_idle_workers_end(config: dict[str, Any], account: Any) -> None:
    types = config["available_node_types"]
    assert {name: num_gpus(kind["node_config"]["InstanceType"]) for name, kind in types.items()} == {
        "head": 0,
        "gpu": 1,
    }
    assert types["gpu"]["min_workers"] < types["gpu"]["max_workers"] <= config["max_workers"]
    assert 0 < config["idle_timeout_minutes"] <= 15


def num_gpus(instance_type: str) -> int:
    (described,) = boto3.client("ec2", REGION).describe_instance_types(InstanceTypes=[instance_type])["InstanceTypes"]
    return sum(gpu["Count"] for gpu in described.get("GpuInfo", {}).get("Gpus", []))


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


def test_no_task_runs_on_the_head(config: dict[str, Any]) -> None:
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert "CPU" not in yaml.safe_load((CLUSTER / "aws.yaml").read_text())["available_node_types"]["gpu"]["resources"]
    assert all("--num-cpus" not in command for command in config["head_start_ray_commands"])


def test_files_copied_to_the_machines_exist_and_contain_no_credentials(config: dict[str, Any]) -> None:
    mounts = config["file_mounts"]
    assert all((CLUSTER.parent / local).exists() for local in mounts.values() if not local.startswith("~"))
    assert [local for local in mounts.values() if local.startswith("~")] == ["~/.ray/auth_token"]
    assert "AWS_" not in yaml.safe_dump(config)


def test_the_commands_have_valid_shell_syntax(config: dict[str, Any]) -> None:
    for kind in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        for command in config[kind]:
            assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0, command
    assert all(
        "dashboard-host" not in word for command in config["head_start_ray_commands"] for word in shlex.split(command)
    )
