"""Settings of SageMaker jobs: channels, key-value pairs, and the keys of an older `config_sample.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from terakoya.components import Launcher
from terakoya.toolkit.json_settings import leaves

ROOT = "/opt/ml"
"""SageMaker's root folder in a container."""
DATA = f"{ROOT}/input/data"
"""The folder of the channels, one subfolder each."""
CODE = "job"
"""The channel with the script, the parameters and plugins."""
PLACEHOLDER = re.compile(r"<[a-z0-9_ ]+>")
"""A placeholder of a settings sample that the user has to fill in: <aws_account_id>."""
FREE_TEXT_KEYS = ("metric_definitions", "setup", "hyperparameters", "environment")
"""Settings whose values may contain such marks for other reasons."""


class Channel(BaseModel):
    """A folder on the instances: an S3 prefix, copied to each instance, or a directory of a shared file system."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """The channel's name: the folder under /opt/ml/input/data."""
    s3_uri: Annotated[str, Field(pattern=r"^s3://[^/]+")] | None = None
    """An S3 prefix: s3://bucket/stores/wiki."""
    file_system_id: Annotated[str, Field(pattern=r"^fs-")] | None = None
    """The id of a file system, instead of `s3_uri`: fs-0123456789abcdef0."""
    directory_path: Annotated[str, Field(pattern=r"^/")] | None = None
    """The folder on the file system. With FSx for Lustre the mount name comes first: /abcdefgh/stores."""
    file_system_type: Literal["FSxLustre", "EFS"] = "FSxLustre"
    """The kind of file system."""
    file_system_access_mode: Literal["ro", "rw"] = "rw"
    """Whether the file system is mounted read-only or writable."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        shared = (self.file_system_id is not None) + (self.directory_path is not None)
        if (self.s3_uri is not None) == bool(shared) or shared == 1:
            raise ValueError(f"{self.name}: expected s3_uri, or file_system_id with directory_path")
        return self

    def request(self) -> dict[str, Any]:
        """Returns the channel as `CreateTrainingJob` takes it."""
        if self.s3_uri is not None:
            source = {"S3DataType": "S3Prefix", "S3Uri": self.s3_uri, "S3DataDistributionType": "FullyReplicated"}
            return {"ChannelName": self.name, "DataSource": {"S3DataSource": source}, "InputMode": "File"}
        source = {
            "FileSystemId": str(self.file_system_id),
            "FileSystemAccessMode": self.file_system_access_mode,
            "FileSystemType": self.file_system_type,
            "DirectoryPath": str(self.directory_path),
        }
        return {"ChannelName": self.name, "DataSource": {"FileSystemDataSource": source}}


def _channel_list(value: Any) -> Any:
    """Converts channels by name to a list; a plain string is an S3 prefix."""
    if not isinstance(value, Mapping):
        return value
    return [
        {"name": name, **({"s3_uri": entry} if isinstance(entry, str) else entry if isinstance(entry, Mapping) else {})}
        for name, entry in value.items()
    ]


def _pairs(value: Any) -> Any:
    """Converts an object to (key, value) pairs of strings; numbers and booleans are written as JSON."""
    if not isinstance(value, Mapping):
        return value
    return [
        (key, text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)) for key, text in value.items()
    ]


Channels = Annotated[tuple[Channel, ...], BeforeValidator(_channel_list)]
"""Channels; in JSON an object by name: {"train": "s3://bucket/stores"}."""
Pairs = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)]
"""Key-value pairs; in JSON an object of strings."""

CONFIG_SAMPLE_KEYS: Mapping[str, Mapping[str, str]] = {
    "aws_config": {"role": "role"},
    "fsx_config": {
        "subnets": "subnets",
        "security_group_ids": "security_group_ids",
        "file_system_id": "",
        "train_directory_path": "train",
        "validation_directory_path": "validation",
    },
}
"""Keys of `config_sample.json` -> our settings; its directories become the channels of these names."""


def convert_config_sample(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `settings` with the parts of a `config_sample.json` converted to our keys, unchanged if there are none.

    Raises:
        ValueError: a key in those parts is unknown, or is also given as one of our keys.
    """
    result = {key: value for key, value in settings.items() if key not in CONFIG_SAMPLE_KEYS}
    converted: dict[str, Any] = {}
    for part, names in CONFIG_SAMPLE_KEYS.items():
        values = settings.get(part, {})
        if not isinstance(values, Mapping):
            raise ValueError(f"{part}: expected an object")
        unknown = sorted(values.keys() - names.keys())
        if unknown:
            raise ValueError(f"{part}.{unknown[0]}: unknown key; known: {', '.join(sorted(names))}")
        for key, name in names.items():
            if key in values and name in ("train", "validation"):
                channel = {"directory_path": values[key], "file_system_id": values.get("file_system_id")}
                converted.setdefault("channels", {})[name] = channel
            elif key in values and name:
                converted[name] = values[key]
    channels = {**converted.pop("channels", {}), **result.get("channels", {})} if "channels" in converted else None
    for key in converted:
        if key in result:
            raise ValueError(f"{key}: given twice, also as a key of config_sample.json; keep one")
    return {**result, **converted, **({} if channels is None else {"channels": channels})}


def placeholders(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yields the placeholders that are not filled in: `role: <aws_account_id>`."""
    for path, value in leaves({key: each for key, each in settings.items() if key not in FREE_TEXT_KEYS}):
        match = PLACEHOLDER.search(value) if isinstance(value, str) else None
        if match:
            yield f"{path}: {match[0]}"


S3 = Annotated[str, Field(pattern=r"^s3://[^/]+")]


class SageMakerSettings(Launcher):
    """The settings of the launcher `sagemaker`, with their validation."""

    detached: ClassVar[bool] = True
    fetches: ClassVar[bool] = True
    places_run: ClassVar[bool] = True
    test_settings: ClassVar[Mapping[str, Any]] = {
        "role": "arn:aws:iam::123456789012:role/trainer",
        "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/terakoya:1",
        "output_path": "s3://bucket/out",
        "checkpoint_s3_uri": "s3://bucket/checkpoints",
    }

    role: str
    """The role that the job assumes: arn:aws:iam::123456789012:role/..."""
    image_uri: str
    """An image in ECR with terakoya and Python on its PATH."""
    output_path: S3
    """The S3 prefix for the finished model, packed, under the job's name."""
    instance_type: str = "ml.p4d.24xlarge"
    """The type of the instances."""
    instance_count: PositiveInt | None = None
    """Number of instances, which must equal the number of entries of `batch_size`; null is that number."""
    processes: PositiveInt | None = None
    """Processes on each instance; null is one for each GPU. Unit: processes."""
    volume_size: PositiveInt = 100
    """Disk of each instance, to which S3 channels are copied. Unit: GiB."""
    max_run: PositiveInt = 24 * 60 * 60
    """The time limit; at the limit the job saves and stops. Unit: seconds."""
    use_spot_instances: bool = False
    """Cheaper instances, which AWS may reclaim: the job then saves, waits for new ones and resumes."""
    max_wait: PositiveInt | None = None
    """With spot instances: the time limit including waiting; null is twice `max_run`. Unit: seconds."""
    max_retry_attempts: NonNegativeInt = 0
    """How often SageMaker restarts the job after an internal error."""
    channels: Channels = ()
    """The folders under /opt/ml/input/data by name: {"train": "s3://bucket/stores"}, or the file_system_id and
    directory_path of a file system. Paths in the parameters start with a channel's name: train/wiki."""
    run_folder: str | None = None
    """The run's folder on the instances, starting with a channel's name; null is a folder in the first channel that is
    a writable file system, else the folder that `checkpoint_s3_uri` saves."""
    checkpoint_s3_uri: S3 | None = None
    """The S3 prefix to which SageMaker copies the run of a job of one instance while it runs."""
    code_location: S3 | None = None
    """The S3 prefix for the script and the parameters; null is `output_path`."""
    subnets: tuple[str, ...] = ()
    """The ids of the subnets of the instances."""
    security_group_ids: tuple[str, ...] = ()
    """The ids of the security groups of the instances."""
    environment: Pairs = ()
    """Environment variables of the processes; no secrets, to which the role should give access instead."""
    hyperparameters: Pairs = ()
    """KEY.PATH -> value, over the parameters like --set, and shown in SageMaker's console."""
    metric_definitions: Pairs = ()
    """Name -> regular expression, for further metrics."""
    tags: Pairs = ()
    """Name -> value, for the tags of the job."""
    setup: tuple[str, ...] = ()
    """Lines of bash to run first on each instance."""
    export: bool = True
    """Whether to export the finished model as a Transformers folder."""
    region: str | None = None
    """The AWS region, such as us-east-1, if boto3 does not find it."""

    @model_validator(mode="before")
    @classmethod
    def _convert_config_sample(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        settings = convert_config_sample(given)
        missing = ", ".join(placeholders(settings))
        if missing:
            raise ValueError(f"not filled in: {missing}")
        return settings

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if bool(self.subnets) != bool(self.security_group_ids):
            raise ValueError("subnets, security_group_ids: give both or neither")
        if any(channel.file_system_id for channel in self.channels) and not self.subnets:
            raise ValueError("subnets: a file system is reached through subnets and security_group_ids; give both")
        names = [channel.name for channel in self.channels]
        if len(set(names)) < len(names) or CODE in names:
            raise ValueError(f'channels: expected each name once, and none "{CODE}", got {", ".join(names)}')
        if self.max_wait is not None and (not self.use_spot_instances or self.max_wait < self.max_run):
            raise ValueError("max_wait: needs use_spot_instances, and must be at least max_run")
        return self
