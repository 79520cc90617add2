"""SageMaker's settings: channels, pairs, and the older `config_sample.json` in their words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from terakoya.components import Launcher
from terakoya.toolkit.json_settings import leaves, refuse_secrets

ROOT = "/opt/ml"
"""Where SageMaker puts everything in a container."""
DATA = f"{ROOT}/input/data"
"""Where its channels are, a folder each."""
CODE = "job"
"""The channel that brings the script, the parameters and plugins."""
PLACEHOLDER = re.compile(r"<[a-z0-9_ ]+>")
"""What a sample of settings leaves to be filled in: <aws_account_id>."""
PATTERNS = ("metric_definitions", "setup", "hyperparameters", "environment")
"""Settings whose texts may hold such marks for reasons of their own."""


class Channel(BaseModel):
    """What instances see as a folder: a prefix of S3, copied to each, or a directory of a file system they share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    s3_uri: Annotated[str, Field(pattern=r"^s3://[^/]+")] | None = None
    """A prefix: s3://bucket/stores/wiki."""
    file_system_id: Annotated[str, Field(pattern=r"^fs-")] | None = None
    directory_path: Annotated[str, Field(pattern=r"^/")] | None = None
    """With FSx for Lustre the mount name comes first: /abcdefgh/stores."""
    file_system_type: Literal["FSxLustre", "EFS"] = "FSxLustre"
    file_system_access_mode: Literal["ro", "rw"] = "rw"

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        shared = (self.file_system_id is not None) + (self.directory_path is not None)
        if (self.s3_uri is not None) == bool(shared) or shared == 1:
            raise ValueError(f"{self.name}: expected s3_uri, or file_system_id with directory_path")
        return self

    @property
    def keeps(self) -> bool:
        """Whether all instances write there together, and what they write stays."""
        return self.file_system_id is not None and self.file_system_access_mode == "rw"

    def request(self) -> dict[str, Any]:
        """As `CreateTrainingJob` has it."""
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


def _named(value: Any) -> Any:
    """Channels by name as a list of them; a plain text is a prefix of S3."""
    if not isinstance(value, Mapping):
        return value
    return [
        {"name": name, **({"s3_uri": each} if isinstance(each, str) else each if isinstance(each, Mapping) else {})}
        for name, each in value.items()
    ]


def _pairs(value: Any) -> Any:
    """An object as (key, value) pairs; numbers and truth values as JSON writes them."""
    if not isinstance(value, Mapping):
        return value
    return [(key, each if isinstance(each, str) else _as_json(each)) for key, each in value.items()]


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


Channels = Annotated[tuple[Channel, ...], BeforeValidator(_named)]
"""Channels; JSON gives them by name: {"train": "s3://bucket/stores"}."""
Pairs = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_pairs)]
"""What JSON gives as an object of texts."""

OLDER: Mapping[str, Mapping[str, str]] = {
    "aws_config": {"role": "role"},
    "fsx_config": {
        "subnets": "subnets",
        "security_group_ids": "security_group_ids",
        "file_system_id": "",
        "train_directory_path": "train",
        "validation_directory_path": "validation",
    },
}
"""Keys of `config_sample.json` -> ours; its directories become the channels of these names."""


def from_older(given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` with the parts of a `config_sample.json` in our words; as it is where there are none.

    Raises:
        ValueError: a key in those parts that has no place, or that is given in our words as well.
    """
    result = {key: value for key, value in given.items() if key not in OLDER}
    older: dict[str, Any] = {}
    for part, places in OLDER.items():
        values = given.get(part, {})
        if not isinstance(values, Mapping):
            raise ValueError(f"{part}: expected an object")
        unknown = sorted(values.keys() - places.keys())
        if unknown:
            raise ValueError(f"{part}.{unknown[0]}: unknown key; known: {', '.join(sorted(places))}")
        for key, place in places.items():
            if key in values and place in ("train", "validation"):
                channel = {"directory_path": values[key], "file_system_id": values.get("file_system_id")}
                older.setdefault("channels", {})[place] = channel
            elif key in values and place:
                older[place] = values[key]
    channels = {**older.pop("channels", {}), **result.get("channels", {})} if "channels" in older else None
    for key in older:
        if key in result:
            raise ValueError(f"{key}: is given twice, in config_sample.json's words too; keep one")
    return {**result, **older, **({} if channels is None else {"channels": channels})}


def placeholders(given: Mapping[str, Any]) -> Iterator[str]:
    """What is still to be filled in: `role: <aws_account_id>`."""
    for path, value in leaves({key: each for key, each in given.items() if key not in PATTERNS}):
        found = PLACEHOLDER.search(value) if isinstance(value, str) else None
        if found:
            yield f"{path}: {found[0]}"


S3 = Annotated[str, Field(pattern=r"^s3://[^/]+")]


class SageMakerSettings(Launcher):
    """The settings of the launcher `sagemaker`, and their checks."""

    detached: ClassVar[bool] = True
    test_settings: ClassVar[Mapping[str, Any]] = {
        "role": "arn:aws:iam::123456789012:role/trainer",
        "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/terakoya:1",
        "output_path": "s3://bucket/out",
        "checkpoint_s3_uri": "s3://bucket/checkpoints",
    }

    role: str
    """The role that the job takes on: arn:aws:iam::123456789012:role/..."""
    image_uri: str
    """An image in ECR that has terakoya and Python's programs on its PATH."""
    output_path: S3
    """Where the finished model goes, packed, below the job's name."""
    instance_type: str = "ml.p4d.24xlarge"
    instance_count: PositiveInt | None = None
    """As many as `batch_size` has entries; to be given where that should be checked."""
    processes: PositiveInt | None = None
    """Processes on each instance; one a GPU where not given."""
    volume_size: PositiveInt = 100
    """GiB of each instance's disk, which S3 channels are copied to."""
    max_run: PositiveInt = 24 * 60 * 60
    """Seconds it may take; then it saves and stops."""
    use_spot_instances: bool = False
    """Cheaper ones, which may be taken away: the job saves, waits for others and goes on."""
    max_wait: PositiveInt | None = None
    """With spot instances: seconds it may take with all its waiting; twice `max_run` where not given."""
    max_retry_attempts: NonNegativeInt = 0
    """How often SageMaker starts it again after an error of its own."""
    channels: Channels = ()
    """What the instances see below /opt/ml/input/data, by name: {"train": "s3://bucket/stores"}, or file_system_id and
    directory_path of a file system. Paths of the parameters begin with a channel's name: train/wiki."""
    run_folder: str | None = None
    """The run's folder there, beginning with a channel's name; a shared file system's first channel, else what
    `checkpoint_s3_uri` keeps, where not given."""
    checkpoint_s3_uri: S3 | None = None
    """Where SageMaker keeps the run of a job of one instance while it goes on."""
    code_location: S3 | None = None
    """Where script and parameters go; `output_path` where not given."""
    subnets: tuple[str, ...] = ()
    security_group_ids: tuple[str, ...] = ()
    environment: Pairs = ()
    """Variables of the processes, by name; no secrets, which the role should give access to."""
    hyperparameters: Pairs = ()
    """KEY.PATH -> value, over the parameters as --set is, and seen in SageMaker's console."""
    metric_definitions: Pairs = ()
    """Name -> regular expression, for more numbers than those that come along."""
    tags: Pairs = ()
    setup: tuple[str, ...] = ()
    """Lines of bash that run first on each instance."""
    export: bool = True
    """Hand the finished model over as a Transformers folder."""
    region: str | None = None
    """Where boto3 would not find it: us-east-1."""

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        mapped = from_older(given)
        missing = ", ".join(placeholders(mapped))
        if missing:
            raise ValueError(f"still to be filled in: {missing}")
        refuse_secrets(mapped, "launch sagemaker")
        return mapped

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if bool(self.subnets) != bool(self.security_group_ids):
            raise ValueError("subnets, security_group_ids: give both or none")
        if any(channel.file_system_id for channel in self.channels) and not self.subnets:
            raise ValueError("subnets: a file system is reached through subnets and security_group_ids; give both")
        names = [channel.name for channel in self.channels]
        if len(set(names)) < len(names) or CODE in names:
            raise ValueError(f'channels: expected each name once, and none "{CODE}", got {", ".join(names)}')
        if self.max_wait is not None and (not self.use_spot_instances or self.max_wait < self.max_run):
            raise ValueError("max_wait: is for use_spot_instances, and at least max_run")
        return self
