"""A training job that SageMaker has, through boto3: made, asked after, stopped, read, fetched."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from terakoya.components import JobState
from terakoya.errors import UserError

ARN = re.compile(r"arn:aws[a-z-]*:sagemaker:(?P<region>[a-z0-9-]+):\d{12}:training-job/(?P<name>[A-Za-z0-9-]+)")
LOGS = "/aws/sagemaker/TrainingJobs"
"""The group of CloudWatch's logs that all training jobs write to; an instance's stream begins with the job's name."""
ENDS = frozenset({"Completed", "Failed", "Stopped"})


def create(request: Mapping[str, Any], files: Mapping[str, bytes], channel: str, *, region: str | None) -> str:
    """Puts `files` where the `channel` of `request` looks for them, creates the job, and returns its ARN.

    Raises:
        UserError: no boto3, nobody may ask, or SageMaker refuses.
    """
    source = next(each["DataSource"] for each in request["InputDataConfig"] if each["ChannelName"] == channel)
    bucket, prefix = _place(source["S3DataSource"]["S3Uri"])
    with _asking("submit"):
        storage = _client("s3", region)
        for name, content in files.items():
            storage.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=content)
        return str(_client("sagemaker", region).create_training_job(**request)["TrainingJobArn"])


class SageMakerJob:
    """The training job with this name, or ARN."""

    def __init__(self, name: str) -> None:
        arn = ARN.fullmatch(name)
        if arn is None and not re.fullmatch(r"[A-Za-z0-9](-*[A-Za-z0-9]){0,62}", name):
            raise UserError(f"launch sagemaker: expected a job's name, its ARN or a run's folder, got {name}")
        self.name = arn["name"] if arn else name
        self.region = arn["region"] if arn else None
        self._read: dict[str, str] = {}
        self._clients: dict[str, Any] = {}

    def state(self) -> JobState:
        """As `DescribeTrainingJob` has it, with the last of each number that SageMaker found in the log.

        Raises:
            UserError: no such job, or SageMaker does not answer.
        """
        facts = self._describe("status")
        word = facts["TrainingJobStatus"]
        over = word in ENDS
        told = []
        if not over or facts.get("SecondaryStatus") != word:
            told.append(facts.get("SecondaryStatus", ""))
        changes = facts.get("SecondaryStatusTransitions") or [{}]
        told += [changes[-1].get("StatusMessage", "") if not over else "", facts.get("FailureReason", "")]
        if over and "BillableTimeInSeconds" in facts:
            told.append(f"{facts['BillableTimeInSeconds']} s to be paid")
        values = {each["MetricName"]: float(each["Value"]) for each in facts.get("FinalMetricDataList", ())}
        return JobState(word, "; ".join(filter(None, told)), over, word == "Failed", values)

    def stop(self) -> str:
        """Asks SageMaker to stop it: SIGTERM, and SIGKILL two minutes later.

        Raises:
            UserError: no such job, one that is over, or SageMaker does not answer.
        """
        with _asking("stop"):
            self._client("sagemaker").stop_training_job(TrainingJobName=self.name)
        return f"job {self.name} is asked to stop: it saves and leaves within two minutes"

    def output(self) -> Iterator[str]:
        """What was added to the logs of its instances, behind the instance's name where there are several.

        Raises:
            UserError: CloudWatch does not answer.
        """
        with _asking("logs"):
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
                return  # the first job of an account has not begun
            for stream in streams:
                host = stream.removeprefix(f"{self.name}/").rpartition("-")[0] or stream
                for line in self._lines(logs, stream):
                    yield f"[{host}] {line}" if len(streams) > 1 else line

    def _lines(self, logs: Any, stream: str) -> Iterator[str]:
        """The events of `stream` behind those that were read before."""
        while True:
            after = {"nextToken": self._read[stream]} if stream in self._read else {}
            page = logs.get_log_events(logGroupName=LOGS, logStreamName=stream, startFromHead=True, **after)
            yield from (event["message"] for event in page["events"])
            if page["nextForwardToken"] == self._read.get(stream):
                return  # the same token again is the end, for now
            self._read[stream] = page["nextForwardToken"]

    def fetch(self, out: Path) -> str:
        """Unpacks what the job handed over, from S3.

        Raises:
            UserError: it has handed over nothing yet, `out` is there already, or S3 does not answer.
        """
        if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
            raise UserError(f"{out}: is there already; choose a new folder or remove it")
        facts = self._describe("fetch")
        place = facts.get("ModelArtifacts", {}).get("S3ModelArtifacts")
        if facts["TrainingJobStatus"] not in ENDS or not place:
            raise UserError(
                f"launch sagemaker fetch: job {self.name} is {facts['TrainingJobStatus']}: nothing is there yet"
            )
        bucket, key = _place(place)
        staging = out.with_name(f".{out.name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            with tempfile.TemporaryFile(dir=staging.parent) as packed:
                with _asking("fetch"):
                    self._client("s3").download_fileobj(bucket, key, packed)
                packed.seek(0)
                with tarfile.open(fileobj=packed, mode="r:*") as archive:
                    _unpack(archive, staging)
            if out.is_dir():
                out.rmdir()
            staging.rename(out)
        except (tarfile.TarError, EOFError) as error:
            raise UserError(f"launch sagemaker fetch: {place}: expected a packed model: {error}") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        files = [file for file in out.rglob("*") if file.is_file()]
        return f"{out}: {len(files)} files, {sum(file.stat().st_size for file in files):,} bytes, from {place}"

    def _client(self, service: str) -> Any:
        if service not in self._clients:
            self._clients[service] = _client(service, self.region)
        return self._clients[service]

    def _describe(self, verb: str) -> Mapping[str, Any]:
        with _asking(verb):
            facts: Mapping[str, Any] = self._client("sagemaker").describe_training_job(TrainingJobName=self.name)
            return facts


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Writes the files of `archive` below `folder`. Python knows filters for this from 3.11.4 on alone.

    Raises:
        tarfile.TarError: one that would lie elsewhere, or that is neither a file nor a folder.
    """
    for member in archive:
        inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
        if not inside or not (member.isfile() or member.isdir()):
            raise tarfile.TarError(f"{member.name} is no file below the folder it is unpacked into")
        filters = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        archive.extract(member, folder, **filters)  # type: ignore[arg-type]


def _place(uri: str) -> tuple[str, str]:
    """The bucket and the key of s3://BUCKET/KEY."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key.rstrip("/")


def _client(service: str, region: str | None) -> Any:
    """boto3's client; where it asks and as whom comes from where boto3 looks."""
    try:
        import boto3
    except ImportError:
        raise UserError('launch sagemaker: needs boto3: pip install "terakoya[sagemaker]"') from None
    return boto3.session.Session(region_name=region).client(service)


@contextmanager
def _asking(verb: str) -> Iterator[None]:
    """What boto3 raises inside, as a UserError that says what AWS said."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError
    except ImportError:
        raise UserError('launch sagemaker: needs boto3: pip install "terakoya[sagemaker]"') from None
    where = f"launch sagemaker {verb}"
    try:
        yield
    except NoRegionError:
        raise UserError(
            f"{where}: expected a region: set AWS_DEFAULT_REGION, or give the job's ARN or --region"
        ) from None
    except NoCredentialsError:
        raise UserError(f"{where}: nobody may ask: set AWS_PROFILE, or log in as boto3 expects it") from None
    except ClientError as error:
        raise UserError(f"{where}: {error.response['Error']['Code']}: {error.response['Error']['Message']}") from None
    except BotoCoreError as error:
        raise UserError(f"{where}: {error}") from None
