"""Launcher for Amazon SageMaker: a training job's request, and the script that its instances run.

Who may ask comes from where boto3 looks (variables, a profile, a role), never from settings, and is written nowhere.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from terakoya import hookimpl
from terakoya.components import Job, Launcher, LaunchPlan, SubmittedJob
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.json_settings import refuse_secrets
from terakoya.launch.jobs import Note
from terakoya.toolkit.hub_cache import is_hub_name
from terakoya.toolkit.launchers.scripts import words
from terakoya_plugins.launchers.sagemaker import job as _sagemaker_job
from terakoya_plugins.launchers.sagemaker import request as _sagemaker_request
from terakoya_plugins.launchers.sagemaker import script as _sagemaker_script
from terakoya_plugins.launchers.sagemaker.settings import CODE, DATA, ROOT, Channels, Pairs, from_older, placeholders

S3 = Annotated[str, Field(pattern=r"^s3://[^/]+")]


class SageMaker(Launcher):
    """Settings of a training job, by the names of SageMaker's Python SDK; a `config_sample.json` with `aws_config` and
    `fsx_config` is read as it is, `--settings FILE`, beside the others."""

    jobs_go_on: ClassVar[bool] = True
    trial: ClassVar[Mapping[str, Any]] = {
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

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        """The request, `request.json`, and what goes into S3: the script, the parameters, plugins that are files.

        Raises:
            UserError: paths that no channel has, instances that do not fit `batch_size`, no place that keeps the run, a
                request that botocore's model of SageMaker refuses.
        """
        nodes = len(job.batch_size)
        if self.instance_count not in (None, nodes):
            raise UserError(
                f"launch sagemaker: instance_count is {self.instance_count}, but batch_size has an entry for each of "
                f"{nodes} instance{'s' if nodes > 1 else ''}: --set batch_size, or leave instance_count out"
            )
        run = self._run(job, nodes)
        before, parameters, sets = _parts(job)
        self._check_paths(parameters, sets)
        files = {"parameters.json": parameters.read_text(encoding="utf-8")}
        before = [_shipped(word, files) for word in before]
        sets += [f"{key}={value}" for key, value in self.hyperparameters]
        train = [*before, "train", f"{DATA}/{CODE}/parameters.json", "--out", run]
        command = words(*train, *(word for each in sets for word in ("--set", each)))
        name = f"{job.name[:47].rstrip('-')}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        code = f"{(self.code_location or self.output_path).rstrip('/')}/{name}/{CODE}"
        files["entry.sh"] = _sagemaker_script.script(
            name=job.name, instances=nodes, run=run, command=command, before=before, export=self.export,
            setup=self.setup, processes=self.processes,
        )  # fmt: skip
        request = _sagemaker_request.request(self, name=name, run_name=job.name, instances=nodes, code=code)
        notes = [
            f"rows a step on each instance: {', '.join(map(str, job.batch_size.values()))}; the run is {run} there",
            *_sagemaker_request.problems(request),
        ]
        uploads = [words("aws", "s3", "cp", str(folder / file), f"{code}/{file}") for file in files]
        files["request.json"] = json.dumps(request, indent=2, ensure_ascii=False) + "\n"
        create = words("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{folder}/request.json")
        return LaunchPlan(files, [*uploads, create + (f" --region {self.region}" if self.region else "")], notes)

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        """Puts the plan's files into S3, creates the job through boto3 and leaves a note of its ARN; 0.

        Raises:
            UserError: no boto3, nobody may ask, or SageMaker refuses.
        """
        request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        files = {name: (folder / name).read_bytes() for name in plan.files if name != "request.json"}
        arn = _sagemaker_job.create(request, files, CODE, region=self.region)
        Note("sagemaker", arn, str(job.run)).leave(folder)
        return 0

    @classmethod
    def submitted(cls, name: str) -> SubmittedJob:
        """The training job of this name, in the region of the environment, or with this ARN."""
        return _sagemaker_job.SageMakerJob(name)

    def _run(self, job: Job, instances: int) -> str:
        """The run's folder on the instances.

        Raises:
            UserError: there is no place that keeps it, or not for so many instances.
        """
        shared = [channel.name for channel in self.channels if channel.keeps]
        if self.run_folder is not None:
            if self.run_folder.split("/")[0] not in shared:
                raise UserError(
                    f"launch sagemaker: run_folder: {self.run_folder}: expected to begin with a channel that is a file "
                    f"system and can be written to; there are: {', '.join(shared) or 'none'}"
                )
            return f"{DATA}/{self.run_folder.rstrip('/')}"
        if shared:
            return f"{DATA}/{shared[0]}/runs/{job.name}"
        if self.checkpoint_s3_uri is None:
            raise UserError(
                "launch sagemaker: the run would be lost with its instance: give checkpoint_s3_uri, or a channel with "
                "file_system_id and directory_path"
            )
        if instances > 1:
            raise UserError(
                f"launch sagemaker: {instances} instances write one run together: give a channel with file_system_id "
                "and directory_path (FSx for Lustre, EFS); checkpoint_s3_uri keeps the run of one instance"
            )
        return f"{ROOT}/checkpoints/run"

    def _check_paths(self, parameters: Path, sets: list[str]) -> None:
        """UserError for a store or a start that no channel brings."""
        loaded = Parameters.load(parameters, [*sets, *(f"{key}={value}" for key, value in self.hyperparameters)])
        data = loaded.data
        stores = {f"data.validation.{index}": store for index, store in enumerate(data.validation)}
        mixtures = {"data.train": data.train}
        mixtures |= {f"data.stages.{number}.train": stage.train for number, stage in enumerate(data.stages)}
        for key, mixture in mixtures.items():  # where a weight was given there is an object, else perhaps a text
            for index, each in enumerate(mixture):
                stores[f"{key}.{index}" + (".store" if each.weight != 1 else "")] = each.store
        if loaded.start_from is not None:
            folder = loaded.start_from.folder
            named = {"start_from": folder} if isinstance(folder, Path) else folder
            stores |= {key: each for key, each in named.items() if each.exists() or not is_hub_name(str(each))}
        names = [channel.name for channel in self.channels]
        for key, store in stores.items():
            inside = re.sub(f"^{DATA}/", "", str(store))
            if inside.split("/")[0] not in names:
                first = names[0] if names else "train"
                raise UserError(
                    f"launch sagemaker: {key}: {store}: expected a path that begins with a channel's name "
                    f"({', '.join(names) or 'there are no channels'}), as instances see it: --set {key}={first}/"
                    f"{Path(store).name}"
                )


def _parts(job: Job) -> tuple[list[str], Path, list[str]]:
    """The options before `train`, the parameters' file, and what is set over them."""
    waiting = list(job.arguments)
    at = next(index for index in range(0, len(waiting), 2) if not waiting[index].startswith("--"))
    assert waiting[at] == "train", waiting
    rest = waiting[at + 2 :]
    return waiting[:at], Path(waiting[at + 1]), [rest[i + 1] for i in range(0, len(rest), 2) if rest[i] == "--set"]


def _shipped(word: str, files: dict[str, str]) -> str:
    """`word`, or where it is found there if it is a plugin's file, which then goes along in `files`.

    Raises:
        UserError: a plugin that is a folder.
    """
    file = Path(word)
    if file.is_dir():
        raise UserError(f"launch sagemaker: --plugin {word}: is a folder; install it in the image, as a package")
    if not file.is_file():
        return word
    files[file.name] = file.read_text(encoding="utf-8")
    return f"{DATA}/{CODE}/{file.name}"


@hookimpl
def register_launchers() -> dict[str, type[Launcher]]:
    """Offers `sagemaker`."""
    return {"sagemaker": SageMaker}
