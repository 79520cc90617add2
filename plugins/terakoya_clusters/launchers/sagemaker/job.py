"""Training jobs on SageMaker, through boto3: creates one, reads its state and logs, stops it, fetches its model."""

from __future__ import annotations

import re
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terakoya.components import JobState
from terakoya.errors import UserError, import_extra

ARN = re.compile(r"arn:aws[a-z-]*:sagemaker:(?P<region>[a-z0-9-]+):\d{12}:training-job/(?P<name>[A-Za-z0-9-]+)")
LOGS = "/aws/sagemaker/TrainingJobs"
"""The CloudWatch log group of all training jobs; the name of an instance's stream starts with the job's name."""
LARGEST_RATIO = 100
"""Largest size of an unpacked model in sizes of its archive; weights hardly shrink, a bomb of gzip by up to 1,032."""
END_STATES = frozenset({"Completed", "Failed", "Stopped"})


def create(request: Mapping[str, Any], files: Mapping[str, bytes], channel: str, *, region: str | None) -> str:
    """Uploads `files` to the S3 prefix of `channel` in `request`, creates the job, and returns its ARN.

    Raises:
        UserError: boto3 or credentials are missing, or SageMaker rejects the request.
    """
    source = next(entry["DataSource"] for entry in request["InputDataConfig"] if entry["ChannelName"] == channel)
    bucket, prefix = _split_uri(source["S3DataSource"]["S3Uri"])
    with _aws_errors("submit"):
        storage = _client("s3", region)
        for name, content in files.items():
            storage.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=content)
        return str(_client("sagemaker", region).create_training_job(**request)["TrainingJobArn"])


class SageMakerJob:
    """The training job with this name or ARN. See `SubmittedJob` for the methods' errors."""

    def __init__(self, name: str) -> None:
        arn = ARN.fullmatch(name)
        if arn is None and not re.fullmatch(r"[A-Za-z0-9](-*[A-Za-z0-9]){0,62}", name):
            raise UserError(f"launch sagemaker: expected a job's name, its ARN or a run's folder, got {name}")
        self.name = arn["name"] if arn else name
        self.region = arn["region"] if arn else None
        self._read: dict[str, str] = {}
        self._clients: dict[str, Any] = {}

    def state(self) -> JobState:
        """Returns the state from `DescribeTrainingJob`, with the last value of each metric found in the log."""
        facts = self._describe("status")
        status = facts["TrainingJobStatus"]
        done = status in END_STATES
        details = []
        if not done or facts.get("SecondaryStatus") != status:
            details.append(facts.get("SecondaryStatus", ""))
        changes = facts.get("SecondaryStatusTransitions") or [{}]
        details += [changes[-1].get("StatusMessage", "") if not done else "", facts.get("FailureReason", "")]
        if done and "BillableTimeInSeconds" in facts:
            details.append(f"{facts['BillableTimeInSeconds']} s billed")
        values = {metric["MetricName"]: float(metric["Value"]) for metric in facts.get("FinalMetricDataList", ())}
        return JobState(status, "; ".join(filter(None, details)), done, status == "Failed", values)

    def stop(self) -> str:
        """Requests a stop from SageMaker, which sends SIGTERM, and SIGKILL two minutes later."""
        with _aws_errors("stop"):
            self._client("sagemaker").stop_training_job(TrainingJobName=self.name)
        return f"sent a stop request to job {self.name}: it saves and exits within two minutes"

    def output(self) -> Iterator[str]:
        """Yields the lines added to the logs since the last call, after the instance's name if there are several."""
        with _aws_errors("logs"):
            logs = self._client("logs")
            try:
                streams = [
                    stream["logStreamName"]
                    for page in logs.get_paginator("describe_log_streams").paginate(
                        logGroupName=LOGS, logStreamNamePrefix=f"{self.name}/"
                    )
                    for stream in page["logStreams"]
                ]
            except logs.exceptions.ResourceNotFoundException:
                return  # the first job of an account has not started
            for stream in streams:
                host = stream.removeprefix(f"{self.name}/").rpartition("-")[0] or stream
                for line in self._lines(logs, stream):
                    yield f"[{host}] {line}" if len(streams) > 1 else line

    def _lines(self, logs: Any, stream: str) -> Iterator[str]:
        """Yields the events of `stream` that were not read before."""
        while True:
            position = {"nextToken": self._read[stream]} if stream in self._read else {}
            page = logs.get_log_events(logGroupName=LOGS, logStreamName=stream, startFromHead=True, **position)
            yield from (event["message"] for event in page["events"])
            if page["nextForwardToken"] == self._read.get(stream):
                return  # the same token again: no more events yet
            self._read[stream] = page["nextForwardToken"]

    def fetch(self, out: Path) -> str:
        """Downloads the job's model from S3 and unpacks it into the empty folder `out`."""
        facts = self._describe("fetch")
        uri = facts.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        if facts["TrainingJobStatus"] not in END_STATES or not uri:
            raise UserError(
                f"launch sagemaker fetch: job {self.name} is {facts['TrainingJobStatus']}: it has no model yet"
            )
        bucket, key = _split_uri(uri)
        try:
            with tempfile.TemporaryFile(dir=out.parent) as packed:
                with _aws_errors("fetch"):
                    self._client("s3").download_fileobj(bucket, key, packed)
                limit = max(LARGEST_RATIO * packed.tell(), 1 << 20)
                packed.seek(0)
                with tarfile.open(fileobj=packed, mode="r:*") as archive:
                    _unpack(archive, out, limit)
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"launch sagemaker fetch: {uri}: expected a packed model: {error}") from None
        files = [file for file in out.rglob("*") if file.is_file()]
        return f"{len(files)} files, {sum(file.stat().st_size for file in files):,} bytes, from {uri}"

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = _client(service, self.region)
        return self._clients[service]

    def _describe(self, verb: str) -> Mapping[str, Any]:
        with _aws_errors(verb):
            facts: Mapping[str, Any] = self._client("sagemaker").describe_training_job(TrainingJobName=self.name)
            return facts


def _unpack(archive: tarfile.TarFile, folder: Path, limit: int) -> None:
    """Extracts the files of `archive` into `folder`. Python has extraction filters only since 3.11.4.

    Raises:
        tarfile.TarError: a member is outside `folder`, or is neither a file nor a folder; or the files have more than
            `limit` bytes together.
    """
    for member in archive:
        limit -= member.size
        if limit < 0:
            raise tarfile.TarError(f"its files are more than {LARGEST_RATIO} times as large as the archive")
        inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is not a file inside the target folder")
        filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extract(member, folder, **filters)  # type: ignore[arg-type]


def _split_uri(uri: str) -> tuple[str, str]:
    """Returns the bucket and the key of s3://BUCKET/KEY."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key.rstrip("/")


def _client(service: str, region: str | None) -> Any:
    """Returns boto3's client; endpoint and credentials come from boto3's own sources. Called in `_aws_errors`."""
    import boto3

    return boto3.session.Session(region_name=region).client(service)


@contextmanager
def _aws_errors(verb: str) -> Iterator[None]:
    """Converts errors of boto3 to a UserError with AWS's message."""
    import_extra("boto3", "sagemaker", "launch sagemaker")
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

    where = f"launch sagemaker {verb}"
    try:
        yield
    except NoRegionError:
        raise UserError(
            f"{where}: expected a region: set AWS_DEFAULT_REGION, or give the job's ARN or --region"
        ) from None
    except NoCredentialsError:
        raise UserError(f"{where}: no AWS credentials: set AWS_PROFILE, or log in as boto3 expects") from None
    except ClientError as error:
        raise UserError(f"{where}: {error.response['Error']['Code']}: {error.response['Error']['Message']}") from None
    except BotoCoreError as error:
        raise UserError(f"{where}: {error}") from None
