"""Parts of SageMaker's settings: channels, pairs, and the older `config_sample.json` in their words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from terakoya.json_settings import leaves

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
