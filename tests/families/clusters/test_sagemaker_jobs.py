"""SageMaker jobs against moto's server and, for calls that moto does not support, against botocore's model."""

from __future__ import annotations

import io
import json
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import toy
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.errors import UserError
from terakoya_clusters.launchers.sagemaker import job as sagemaker_job
from terakoya_clusters.launchers.sagemaker.job import LOGS, SageMakerJob
from terakoya_launch.jobs import fetch, find_job, poll_states
from terakoya_launch.plan import PlannedLaunch, plan_launch

boto3 = pytest.importorskip("boto3")


def planned(folder: Path, **settings: Any) -> PlannedLaunch:
    file = folder / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("train/wiki"))))
    return plan_launch("sagemaker", file, folder / "run", settings={
        "role": "arn:aws:iam::123456789012:role/trainer",
        "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/terakoya:1",
        "output_path": "s3://models/out",
        "channels": {"train": {"file_system_id": "fs-0123456789abcdef0", "directory_path": "/abcdefgh/stores"}},
        "subnets": ["subnet-1a"],
        "security_group_ids": ["sg-1"],
        **settings,
    })  # fmt: skip


def test_a_job_is_created_as_planned(aws: str, tmp_path: Path) -> None:
    plan = planned(tmp_path, tags={"project": "terakoya"})
    assert plan.submit() == 0
    request = json.loads((plan.folder / "request.json").read_text())
    name = request["TrainingJobName"]
    created = boto3.client("sagemaker").describe_training_job(TrainingJobName=name)
    for echo in (created, request):  # moto answers with its own metrics
        echo["AlgorithmSpecification"].pop("MetricDefinitions")
    for key in request.keys() - {"Tags"}:  # list_tags has them
        assert created[key] == request[key], key
    tags = boto3.client("sagemaker").list_tags(ResourceArn=created["TrainingJobArn"])["Tags"]
    assert tags == [{"Key": "project", "Value": "terakoya"}]
    prefix = f"out/{name}/job"
    storage = boto3.client("s3")
    keys = {entry["Key"] for entry in storage.list_objects_v2(Bucket="models", Prefix=prefix)["Contents"]}
    assert keys == {f"{prefix}/entry.sh", f"{prefix}/parameters.json"}
    script = storage.get_object(Bucket="models", Key=f"{prefix}/entry.sh")["Body"].read().decode()
    assert script == plan.plan.files["entry.sh"]
    job, record = find_job("sagemaker", str(tmp_path / "run"))
    assert record.job == f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{name}"
    assert [state.status for state in poll_states(job, every=0)] == ["Completed"]  # moto's jobs end at once
    for file in plan.folder.iterdir():
        assert aws not in file.read_text() and "somebody" not in file.read_text()


def test_the_verbs_of_the_command_line(aws: str, tmp_path: Path) -> None:
    plan = planned(tmp_path)
    plan.submit()
    name = json.loads((plan.folder / "request.json").read_text())["TrainingJobName"]
    run = CliRunner()
    result = run.invoke(build_app(), ["launch", "sagemaker", "status", name])
    assert result.exit_code == 0 and f"job {name}: Completed" in result.output
    with pytest.raises(UserError, match=r"launch sagemaker status: ValidationException: .*no-such-job"):
        run.invoke(build_app(), ["launch", "sagemaker", "status", "no-such-job"], catch_exceptions=False)
    with pytest.raises(UserError, match="fetch: expected --out FOLDER"):
        run.invoke(build_app(), ["launch", "sagemaker", "fetch", name], catch_exceptions=False)
    with pytest.raises(UserError, match="status: expected a job or a run's folder, got none"):
        run.invoke(build_app(), ["launch", "sagemaker", "status"], catch_exceptions=False)
    with pytest.raises(UserError, match="was submitted with: terakoya launch sagemaker"):
        run.invoke(build_app(), ["launch", "slurm", "status", str(tmp_path / "run")], catch_exceptions=False)


def test_logs_continue_where_the_last_call_ended(aws: str) -> None:
    logs = boto3.client("logs")
    job = SageMakerJob("run-1")
    assert list(job.output()) == []  # the group does not exist yet
    logs.create_log_group(logGroupName=LOGS)
    assert list(job.output()) == []

    def write(stream: str, *lines: str) -> None:
        now = int(datetime.now(UTC).timestamp() * 1000)
        events = [{"timestamp": now + index, "message": line} for index, line in enumerate(lines)]
        logs.put_log_events(logGroupName=LOGS, logStreamName=stream, logEvents=events)

    logs.create_log_stream(logGroupName=LOGS, logStreamName="run-1/algo-1-1700000000")
    logs.create_log_stream(logGroupName=LOGS, logStreamName="run-10/algo-1-1700000000")
    write("run-10/algo-1-1700000000", "another job's")
    write("run-1/algo-1-1700000000", "first", "second")
    assert list(job.output()) == ["first", "second"]
    write("run-1/algo-1-1700000000", "third")
    assert list(job.output()) == ["third"]
    logs.create_log_stream(logGroupName=LOGS, logStreamName="run-1/algo-2-1700000000")
    write("run-1/algo-2-1700000000", "of another instance")
    assert list(job.output()) == ["[algo-2] of another instance"]


def packed(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def test_a_model_is_fetched_and_unpacked(aws: str, tmp_path: Path) -> None:
    plan = planned(tmp_path)
    plan.submit()
    job, _ = find_job("sagemaker", str(tmp_path / "run"))
    name = json.loads((plan.folder / "request.json").read_text())["TrainingJobName"]
    uri = boto3.client("sagemaker").describe_training_job(TrainingJobName=name)["ModelArtifacts"]["S3ModelArtifacts"]
    key = uri.removeprefix("s3://models/")
    with pytest.raises(UserError, match="launch sagemaker fetch: 404"):
        fetch(job, tmp_path / "model")
    storage = boto3.client("s3")
    storage.put_object(Bucket="models", Key=key, Body=packed({"model/config.json": b"{}", "model/weights": b"1234"}))
    assert fetch(job, tmp_path / "model") == f"{tmp_path}/model: 2 files, 6 bytes, from {uri}"
    assert (tmp_path / "model/model/config.json").read_text() == "{}"
    with pytest.raises(UserError, match="already exists"):
        fetch(job, tmp_path / "model")
    bomb = packed({"model/weights": bytes(20_000_000)})
    for content in (packed({"../escaped": b"x"}), b"not an archive", bomb):
        storage.put_object(Bucket="models", Key=key, Body=content)
        with pytest.raises(UserError, match="expected a packed model"):
            fetch(job, tmp_path / "other")
    assert not (tmp_path / "other").exists() and not (tmp_path / "escaped").exists()
    assert not list(tmp_path.glob(".*"))


# --------------------------------------------------------------------------------- calls that moto does not support


class Stubbed:
    """Clients with prepared answers; botocore's model of the service validates every request and answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from botocore.stub import Stubber

        self.client = boto3.client(
            "sagemaker", region_name="eu-west-1", aws_access_key_id="x", aws_secret_access_key="x"
        )
        self.stub = Stubber(self.client)
        self.stub.activate()
        self.regions: list[str | None] = []
        monkeypatch.setattr(sagemaker_job, "_client", self._client_for)

    def _client_for(self, service: str, region: str | None) -> Any:
        assert service == "sagemaker"
        self.regions.append(region)
        return self.client

    def describes(self, **facts: Any) -> None:
        """Sets the next answer to DescribeTrainingJob."""
        arn = "arn:aws:sagemaker:eu-west-1:123456789012:training-job/run-1"
        defaults = {
            "TrainingJobName": "run-1", "TrainingJobArn": arn, "ModelArtifacts": {"S3ModelArtifacts": "s3://m/x.tar.gz"},
            "AlgorithmSpecification": {"TrainingInputMode": "File"}, "CreationTime": datetime.now(UTC),
            "ResourceConfig": {"VolumeSizeInGB": 1}, "StoppingCondition": {},
        }  # fmt: skip
        self.stub.add_response("describe_training_job", {**defaults, **facts}, {"TrainingJobName": "run-1"})


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> Stubbed:
    return Stubbed(monkeypatch)


def test_a_job_is_followed_to_its_end(stubbed: Stubbed) -> None:
    now = datetime.now(UTC)
    changes = [
        {"Status": "Starting", "StartTime": now, "StatusMessage": "Preparing the instances"},
        {"Status": "Downloading", "StartTime": now, "StatusMessage": "Downloading input data"},
    ]
    stubbed.describes(TrainingJobStatus="InProgress", SecondaryStatus="Downloading", SecondaryStatusTransitions=changes)
    stubbed.stub.add_client_error("describe_training_job", "ThrottlingException", "Rate exceeded")
    stubbed.describes(
        TrainingJobStatus="Failed", SecondaryStatus="Failed", FailureReason="node 0 exited with 1; its log says why",
        BillableTimeInSeconds=360, FinalMetricDataList=[{"MetricName": "train:loss", "Value": 2.5, "Timestamp": now}],
    )  # fmt: skip
    job = SageMakerJob("arn:aws:sagemaker:eu-west-1:123456789012:training-job/run-1")
    first, second, last = poll_states(job, every=0)
    assert (first.status, first.detail) == ("InProgress", "Downloading; Downloading input data")
    assert second.status == "no answer" and "Rate exceeded" in second.detail and not second.done
    assert (last.status, last.done, last.failed) == ("Failed", True, True)
    assert last.detail == "node 0 exited with 1; its log says why; 360 s billed"
    assert last.values == {"train:loss": 2.5}
    assert set(stubbed.regions) == {"eu-west-1"}


def test_a_stop_request(stubbed: Stubbed) -> None:
    stubbed.stub.add_response("stop_training_job", {}, {"TrainingJobName": "run-1"})
    assert SageMakerJob("run-1").stop() == "sent a stop request to job run-1: it saves and exits within two minutes"
    stubbed.stub.assert_no_pending_responses()
    reason = "The request was rejected because the training job is in status Stopped"
    stubbed.stub.add_client_error("stop_training_job", "ValidationException", reason)
    with pytest.raises(UserError, match="launch sagemaker stop: ValidationException: The request was rejected"):
        SageMakerJob("run-1").stop()


def test_a_job_without_a_model_yet(stubbed: Stubbed, tmp_path: Path) -> None:
    stubbed.describes(TrainingJobStatus="InProgress", SecondaryStatus="Training")
    with pytest.raises(UserError, match="job run-1 is InProgress: it has no model yet"):
        fetch(SageMakerJob("run-1"), tmp_path / "model")


def test_missing_region_and_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    nowhere = str(tmp_path / "nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", nowhere)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", nowhere)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match="expected a region: set AWS_DEFAULT_REGION"):
        SageMakerJob("run-1").state()
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with pytest.raises(UserError, match="no AWS credentials: set AWS_PROFILE"):
        SageMakerJob("run-1").state()
    with pytest.raises(UserError, match="expected a job's name, its ARN or a run's folder, got a/b"):
        SageMakerJob("a/b")
