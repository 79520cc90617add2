"""SageMaker's requests from settings, old and new, and their validation; the script of an instance, run here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import toy
import yaml
from followed_pages import blocks_of

from terakoya.errors import UserError
from terakoya_clusters.launchers.sagemaker.request import METRICS
from terakoya_launch.options import LaunchOptions
from terakoya_launch.plan import PlannedLaunch, plan_launch

pytest.importorskip("botocore", reason="its model of SageMaker validates the requests")

ROLE = "arn:aws:iam::123456789012:role/service-role/AmazonSageMaker-ExecutionRole-1"
REQUIRED = {
    "role": ROLE,
    "image_uri": "123456789012.dkr.ecr.ap-northeast-1.amazonaws.com/terakoya:1",
    "output_path": "s3://models/out",
}
SHARED = {"file_system_id": "fs-0123456789abcdef0", "directory_path": "/abcdefgh/stores"}
NETWORK = {"subnets": ["subnet-1a"], "security_group_ids": ["sg-1"]}
SAMPLE = {
    "aws_config": {"role": ROLE},
    "fsx_config": {
        "subnets": ["subnet-1a", "subnet-1b"],
        "security_group_ids": ["sg-1"],
        "file_system_id": "fs-0123456789abcdef0",
        "train_directory_path": "/abcdefgh/ns1/train",
        "validation_directory_path": "/abcdefgh/ns1/validation",
    },
}


def planned(folder: Path, settings: Mapping[str, Any], store: str = "train/wiki", **changes: Any) -> PlannedLaunch:
    """The plan of a toy run whose store is `store` on the instances."""
    file = folder / "run.json"
    file.write_text(json.dumps(toy.parameters(Path(store), **changes)))
    given = {key: value for key, value in REQUIRED.items() if key != "role" or "aws_config" not in settings}
    return plan_launch("sagemaker", file, folder / "run", settings={**given, **settings})


def request(plan: PlannedLaunch) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((plan.folder / "request.json").read_text())
    return content


def test_a_config_sample_is_converted(tmp_path: Path) -> None:
    plan = planned(tmp_path, SAMPLE, batch_size={"0": 10, "1": 6})
    content = request(plan)
    assert content["RoleArn"] == ROLE
    assert content["VpcConfig"] == {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1a", "subnet-1b"]}
    sources = {channel["ChannelName"]: channel["DataSource"] for channel in content["InputDataConfig"]}
    assert sources["train"]["FileSystemDataSource"] == {
        "FileSystemId": "fs-0123456789abcdef0",
        "FileSystemAccessMode": "rw",
        "FileSystemType": "FSxLustre",
        "DirectoryPath": "/abcdefgh/ns1/train",
    }
    assert sources["validation"]["FileSystemDataSource"]["DirectoryPath"] == "/abcdefgh/ns1/validation"
    assert content["ResourceConfig"] == {
        "InstanceType": "ml.p4d.24xlarge", "InstanceCount": 2, "VolumeSizeInGB": 100,
    }  # fmt: skip
    assert content["StoppingCondition"] == {"MaxRuntimeInSeconds": 86_400}
    assert "--out /opt/ml/input/data/train/runs/run" in plan.plan.files["entry.sh"]


def test_the_settings_in_the_documentation_are_accepted(tmp_path: Path) -> None:
    page = "plugins/terakoya_clusters/launchers/sagemaker/SAGEMAKER.md"
    (text,) = [block.content for block in blocks_of(page) if block.what == "sagemaker.json"]
    content = request(planned(tmp_path, json.loads(text), batch_size={"0": 128, "1": 128}))
    assert (
        content["ResourceConfig"]["InstanceCount"] == 2
        and content["StoppingCondition"]["MaxRuntimeInSeconds"] == 432_000
    )


def test_every_setting_has_its_place_in_the_request(tmp_path: Path) -> None:
    settings = {
        "instance_type": "ml.g5.xlarge", "volume_size": 50, "max_run": 3600, "use_spot_instances": True,
        "max_wait": 7200, "max_retry_attempts": 2, "checkpoint_s3_uri": "s3://models/checkpoints/",
        "channels": {"train": "s3://stores/wiki"}, "environment": {"NCCL_DEBUG": "INFO"},
        "hyperparameters": {"max_steps": 20}, "metric_definitions": {"resumed": "resumed from .* at step ([0-9]+)"},
        "tags": {"project": "寺子屋"}, "code_location": "s3://models/code", "setup": ["ulimit -n 65536"],
    }  # fmt: skip
    plan = planned(tmp_path, settings)
    content = request(plan)
    assert content["ResourceConfig"]["InstanceType"] == "ml.g5.xlarge"
    assert content["EnableManagedSpotTraining"] is True
    assert content["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 7200}
    assert content["CheckpointConfig"] == {"S3Uri": "s3://models/checkpoints/run", "LocalPath": "/opt/ml/checkpoints"}
    assert content["RetryStrategy"] == {"MaximumRetryAttempts": 2}
    assert content["Environment"] == {"NCCL_DEBUG": "INFO"}
    assert content["HyperParameters"] == {"max_steps": "20"}
    assert content["Tags"] == [{"Key": "project", "Value": "寺子屋"}]
    assert "VpcConfig" not in content
    channels = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"] for channel in content["InputDataConfig"]
    }
    assert channels == {"train": "s3://stores/wiki", "job": f"s3://models/code/{content['TrainingJobName']}/job"}
    metrics = {metric["Name"]: metric["Regex"] for metric in content["AlgorithmSpecification"]["MetricDefinitions"]}
    assert metrics == {**METRICS, "resumed": "resumed from .* at step ([0-9]+)"}
    script = plan.plan.files["entry.sh"]
    assert "--set max_steps=20" in script and "ulimit -n 65536\n" in script
    assert re.fullmatch(r"run-\d{8}-\d{6}", content["TrainingJobName"])
    assert plan.plan.commands[-1].startswith("aws sagemaker create-training-job --cli-input-json file://")


@pytest.mark.parametrize(
    ("settings", "nodes", "message"),
    [
        ({**SAMPLE, "aws_config": {"role": ROLE, "rool": "x"}}, 1, r"aws_config\.rool: unknown key; known: role"),
        ({**SAMPLE, "aws_config": {"role": "arn:aws:iam::<aws_account_id>:role/x"}}, 1, "role: <aws_account_id>"),
        ({"channels": {"train": "s3://stores"}}, 1, "the run would be lost with its instance"),
        (
            {"channels": {"train": "s3://stores"}, "checkpoint_s3_uri": "s3://models/c"},
            2,
            "2 instances write one run together: give a channel with file_system_id",
        ),
        ({"channels": {"train": SHARED}}, 1, "subnets: a file system is reached through subnets"),
        ({**SAMPLE, "instance_count": 3}, 2, "instance_count is 3, but batch_size has an entry for each of 2"),
        ({**SAMPLE, "run_folder": "elsewhere/run"}, 1, "to start with a channel .* available: train, validation"),
        ({**SAMPLE, "max_run": 3600, "max_wait": 7200}, 1, "max_wait: needs use_spot_instances"),
        ({**SAMPLE, "environment": {"HF_TOKEN": "hf_x"}}, 1, "environment.HF_TOKEN: looks like a secret"),
        ({**SAMPLE, "channels": {"job": "s3://stores"}}, 1, 'none "job"'),
        ({**SAMPLE, "aws_config": {"role": "arn:aws:iam::12:role/x-and-some-more"}}, 1, r"\.RoleArn: expected arn"),
        ({**SAMPLE, "metric_definitions": {"x": "y" * 501}}, 1, r"MetricDefinitions\.7\.Regex: expected at most 500"),
        ({**SAMPLE, "max_retry_attempts": 31}, 1, r"MaximumRetryAttempts: expected at most 30, got 31"),
    ],
)  # fmt: skip
def test_settings_that_would_fail_hours_later_are_refused(
    settings: dict[str, Any], nodes: int, message: str, tmp_path: Path
) -> None:
    given = {key: value for key, value in REQUIRED.items() if key != "role" or "aws_config" not in settings}
    file = tmp_path / "run.json"
    table = {"-1": 16} if nodes == 1 else {"0": 10, "1": 6}
    file.write_text(json.dumps(toy.parameters(Path("train/wiki"), batch_size=table)))
    with pytest.raises(UserError, match=message):
        plan_launch("sagemaker", file, tmp_path / "run", settings={**given, **settings})
    assert not (tmp_path / "run.launch").exists()


def test_a_store_that_is_in_no_channel_is_named(tmp_path: Path) -> None:
    settings = {"channels": {"train": SHARED}, **NETWORK}
    with pytest.raises(UserError, match=r"data\.train\.0: work/wiki: .*--set data\.train\.0=train/wiki"):
        planned(tmp_path, settings, store="work/wiki")
    planned(tmp_path, settings, store="/opt/ml/input/data/train/wiki")


def test_a_plugin_file_is_shipped(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text("MARK = 1\n")
    file = tmp_path / "run.yaml"
    parameters = toy.parameters(Path("train/wiki"))
    file.write_text("# a run\n" + yaml.safe_dump(json.loads(json.dumps(parameters, default=str))))
    settings = {**REQUIRED, "channels": {"train": SHARED}, **NETWORK}
    options = LaunchOptions(global_options=["--plugin", str(plugin)])
    plan = plan_launch("sagemaker", file, tmp_path / "run", options, settings=settings)
    assert json.loads(plan.plan.files["parameters.json"]) == json.loads(json.dumps(parameters, default=str))
    assert plan.plan.files["mine.py"] == "MARK = 1\n"
    script = plan.plan.files["entry.sh"]
    assert "terakoya --plugin /opt/ml/input/data/job/mine.py train /opt/ml/input/data/job/parameters.json" in script
    assert "terakoya --plugin /opt/ml/input/data/job/mine.py export " in script
    options = LaunchOptions(global_options=["--plugin", str(tmp_path)])
    with pytest.raises(UserError, match="install it in the image"):
        plan_launch("sagemaker", file, tmp_path / "run", options, settings=settings)


def test_keys_that_may_change_are_passed_on(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("train/wiki"))))
    options = LaunchOptions(overrides=["seed=3"], allow_change=["seed"])
    settings = {**REQUIRED, "channels": {"train": SHARED}, **NETWORK}
    plan = plan_launch("sagemaker", file, tmp_path / "run", options, settings=settings)
    assert "--set seed=3 --allow-change seed" in plan.plan.files["entry.sh"]


# ------------------------------------------------------------------------------------------ what an instance runs


class Instance:
    """A simulated instance: its /opt/ml is a local folder, its file systems are links."""

    def __init__(
        self, root: Path, plan: PlannedLaunch, hosts: list[str], current: str, links: Mapping[str, Path]
    ) -> None:
        self.root, self.plan, self.hosts, self.current = root, plan, hosts, current
        (root / "input/data/job").mkdir(parents=True)
        (root / "model").mkdir()
        for name, folder in links.items():
            (root / "input/data" / name).symlink_to(folder)
        for name, text in plan.plan.files.items():
            (root / "input/data/job" / name).write_text(text.replace("/opt/ml", str(root)))

    def start(self, port: int, **variables: str) -> subprocess.Popen[str]:
        """Starts the request's entry point."""
        script = self.root / "input/data/job/entry.sh"
        script.write_text(script.read_text().replace("--master-port 29500", f"--master-port {port}"))
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1", **variables}
        return subprocess.Popen(
            ["bash", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def resource_config(self) -> None:
        """Writes resourceconfig.json, as SageMaker does."""
        (self.root / "input/config").mkdir(exist_ok=True)
        facts = {"hosts": self.hosts, "current_host": self.current, "network_interface_name": "lo"}
        (self.root / "input/config/resourceconfig.json").write_text(json.dumps(facts))


@pytest.mark.nightly
@pytest.mark.usefixtures("forks")
def test_two_instances_train_together_and_their_metrics_are_found(store: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "wiki").symlink_to(store)
    plan = planned(
        tmp_path, {"channels": {"train": SHARED}, **NETWORK, "processes": 1}, batch_size={"0": 10, "1": 6},
        data={"train": ["train/wiki"], "validation": ["train/wiki"], "sequence_length": 32},
        evaluation={"steps": 6, "batches": 2},
    )  # fmt: skip
    hosts, port = ["localhost", "127.0.0.1"], toy.free_port()
    instances = [
        Instance(tmp_path / host, plan, hosts, host, {"train": shared}) for host in hosts
    ]  # fmt: skip
    instances[0].resource_config()
    toolkit = {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": hosts[1], "SM_NETWORK_INTERFACE_NAME": "lo"}
    started = [instances[0].start(port), instances[1].start(port, **toolkit)]
    printed = [process.communicate(timeout=250)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n---\n".join(printed)
    assert "2 processes on 2 nodes" in printed[0]
    assert "node 0 of 2, 1 process(es)" in printed[0] and "node 1 of 2" in printed[1]
    run = shared / "runs/run"
    written = {metric: [] for metric in METRICS}  # type: dict[str, list[float]]
    for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for metric in METRICS:
            kind, _, name = metric.partition(":")
            if record["kind"] == {"train": "step", "validation": "validation"}[kind]:
                written[metric].append(record[name])
    assert len(written["train:loss"]) == 12 and len(written["validation:loss"]) >= 2
    for metric, regex in METRICS.items():
        assert [float(number) for number in re.findall(regex, printed[0])] == written[metric], metric
        assert not re.search(regex, printed[1]), metric  # each metric is read once
    assert (tmp_path / "localhost/model/model/config.json").is_file()
    assert not any((tmp_path / "127.0.0.1/model").iterdir())


@pytest.mark.nightly  # three starts of torchrun and Transformers
def test_an_instance_saves_on_a_stop_request_and_the_next_job_resumes(store: Path, tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        {"channels": {"train": "s3://stores/x"}, "checkpoint_s3_uri": "s3://models/c"},
        "train",
        max_steps=4000,
    )
    instance = Instance(tmp_path / "ml", plan, ["localhost"], "localhost", {"train": store})
    instance.resource_config()
    run = tmp_path / "ml/checkpoints/run"
    process = instance.start(toy.free_port())
    until = time.monotonic() + 250
    while not (run / "metrics.jsonl").exists() or not toy.records(run):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=250)[0]
    assert process.returncode == 0 and "stopped on request, checkpoint saved in" in printed, printed
    (stopped,) = toy.records(run, "stopped")
    assert 0 < stopped < 4000
    assert not any((tmp_path / "ml/model").iterdir())
    again = Instance(tmp_path / "other", plan, ["localhost"], "localhost", {"train": store})
    again.resource_config()
    (tmp_path / "ml/checkpoints").rename(tmp_path / "other/checkpoints")
    file = tmp_path / "other/input/data/job/parameters.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_steps": stopped + 5}))
    process = again.start(toy.free_port())
    printed = process.communicate(timeout=250)[0]
    assert process.returncode == 0, printed
    assert f"at step {stopped:,}" in printed
    steps = [int(number) for number in re.findall(METRICS["train:step"], printed)]
    assert steps[0] == stopped + 1 and steps[-1] == stopped + 5  # no step of the first job
    assert (tmp_path / "other/model/model/config.json").is_file()


def test_a_failure_is_written_to_sagemakers_failure_file(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"channels": {"train": SHARED}, **NETWORK})
    instance = Instance(tmp_path / "ml", plan, ["algo-1", "algo-2"], "algo-1", {})
    instance.resource_config()
    process = instance.start(toy.free_port())
    printed = process.communicate(timeout=250)[0]
    assert process.returncode == 2, printed
    failure = (tmp_path / "ml/output/failure").read_text()
    assert failure == "batch_size is for 1 instance, SageMaker started 2\n"


def test_equal_instances_take_the_same_rows(tmp_path: Path) -> None:
    settings = {"channels": {"train": SHARED}, **NETWORK, "instance_count": 2}
    plan = planned(tmp_path, settings, batch_size={"*": 8})
    assert plan.job.batch_size == {"0": 8, "1": 8}
    assert request(plan)["ResourceConfig"]["InstanceCount"] == 2
    assert re.search(r"-m terakoya train \S+ --out \S+ --nodes 2 --node-rank", (plan.folder / "entry.sh").read_text())
