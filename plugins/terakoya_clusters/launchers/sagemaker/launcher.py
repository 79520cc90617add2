"""Launcher for Amazon SageMaker: the request of a training job, and the script that its instances run.

Credentials come from boto3's sources (variables, a profile, a role), never from settings, and are written nowhere.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from terakoya.components import Job, LaunchPlan, SubmittedJob
from terakoya.config.parameters import Parameters
from terakoya.errors import UserError
from terakoya.places import is_local
from terakoya.toolkit.hub_cache import is_hub_name
from terakoya.toolkit.json_settings import read_settings
from terakoya_clusters.launchers.sagemaker import job as sagemaker_job
from terakoya_clusters.launchers.sagemaker import request as sagemaker_request
from terakoya_clusters.launchers.sagemaker import script as sagemaker_script
from terakoya_clusters.launchers.sagemaker.settings import CODE, DATA, ROOT, SageMakerSettings
from terakoya_launch.scripts import divide_arguments, quote
from terakoya_launch.submitted import SubmittedJobRecord


class SageMaker(SageMakerSettings):
    """Settings of a training job, with the names of SageMaker's Python SDK. `--settings FILE` also reads an older
    `config_sample.json` with `aws_config` and `fsx_config`."""

    def nodes(self) -> int | None:
        return self.instance_count

    def plan(self, job: Job, folder: Path) -> LaunchPlan:
        nodes = len(job.batch_size)
        if self.instance_count not in (None, nodes):
            raise UserError(
                f"launch sagemaker: instance_count is {self.instance_count}, but batch_size has an entry for each of "
                f"{nodes} instance{'s' if nodes > 1 else ''}: --set batch_size, or leave instance_count out"
            )
        run = self._run(job, nodes)
        before, parameters, _ = divide_arguments(job)
        sets, allowed = (_values(job, option) for option in ("--set", "--allow-change"))
        self._check_paths(parameters, sets, nodes)
        files = {"parameters.json": json.dumps(read_settings(parameters), indent=2, ensure_ascii=False) + "\n"}
        global_options = [_ship_plugin(word, files) for word in before]
        sets += [f"{key}={value}" for key, value in self.hyperparameters]
        train = [*global_options, "train", f"{DATA}/{CODE}/parameters.json", "--out", job.kept_in or run]
        train += [] if job.kept_in is None else ["--work-folder", run]
        given = ["--nodes", str(nodes)] if "--nodes" in job.arguments else []
        changes = [word for value in sets for word in ("--set", value)]
        changes += [word for key in allowed for word in ("--allow-change", key)]
        command = quote(*train, *changes, *given)
        name = f"{job.name[:47].rstrip('-')}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
        code = f"{(self.code_location or self.output_path).rstrip('/')}/{name}/{CODE}"
        files["entry.sh"] = sagemaker_script.script(self, job, run=run, command=command, global_options=global_options)
        request = sagemaker_request.request(self, name=name, run_name=job.name, instances=nodes, code=code)
        notes = [
            f"rows a step on each instance: {', '.join(map(str, job.batch_size.values()))}; run folder: {run}"
            + (f", mirrored to {job.kept_in}" if job.kept_in is not None else ""),
            *sagemaker_request.problems(request),
        ]
        uploads = [quote("aws", "s3", "cp", str(folder / file), f"{code}/{file}") for file in files]
        files["request.json"] = json.dumps(request, indent=2, ensure_ascii=False) + "\n"
        create = quote("aws", "sagemaker", "create-training-job", "--cli-input-json", f"file://{folder}/request.json")
        return LaunchPlan(files, [*uploads, create + (f" --region {self.region}" if self.region else "")], notes)

    def submit(self, job: Job, plan: LaunchPlan, folder: Path) -> int:
        request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
        files = {name: (folder / name).read_bytes() for name in plan.files if name != "request.json"}
        arn = sagemaker_job.create(request, files, CODE, region=self.region)
        SubmittedJobRecord("sagemaker", arn, job.out).write(folder)
        return 0

    @classmethod
    def find_job(cls, name: str, folder: Path | None = None) -> SubmittedJob:
        """Returns the training job with this name, in the region of the environment, or with this ARN."""
        return sagemaker_job.SageMakerJob(name)

    def _run(self, job: Job, instances: int) -> str:
        # all instances can write to these, and the files outlive the job
        shared = [each.name for each in self.channels if each.file_system_id and each.file_system_access_mode == "rw"]
        if self.run_folder is not None:
            if self.run_folder.split("/")[0] not in shared:
                raise UserError(
                    f"launch sagemaker: run_folder: {self.run_folder}: expected to start with a channel that is a "
                    f"writable file system; available: {', '.join(shared) or 'none'}"
                )
            return f"{DATA}/{self.run_folder.rstrip('/')}"
        if shared:
            return f"{DATA}/{shared[0]}/runs/{job.name}"
        if instances > 1:
            raise UserError(
                f"launch sagemaker: {instances} instances write one run together: give a channel with file_system_id "
                "and directory_path (FSx for Lustre, EFS); checkpoint_s3_uri and addresses keep the run of one instance"
            )
        if job.kept_in is not None and self.checkpoint_s3_uri is not None:
            raise UserError(
                f"launch sagemaker: checkpoint_s3_uri: the run is mirrored to {job.kept_in} already; leave out "
                "checkpoint_s3_uri"
            )
        if job.kept_in is not None:
            return f"{ROOT}/run"
        if self.checkpoint_s3_uri is None:
            raise UserError(
                "launch sagemaker: the run would be lost with its instance: give an address in --out, "
                "checkpoint_s3_uri, or a channel with file_system_id and directory_path"
            )
        return f"{ROOT}/checkpoints/run"

    def _check_paths(self, parameters: Path, sets: list[str], nodes: int) -> None:
        """Raises UserError for a store or a `start_from` folder that is in no channel."""
        overrides = [*sets, *(f"{key}={value}" for key, value in self.hyperparameters)]
        loaded = Parameters.load(parameters, overrides, nodes=nodes)
        data = loaded.data
        stores = {f"data.validation.{number}": store for number, store in enumerate(data.validation)}
        mixtures = {"data.train": data.train}
        mixtures |= {f"data.stages.{number}.train": stage.train for number, stage in enumerate(data.stages)}
        mixtures |= {
            f"phases.{number}.data.train": phase.data.train
            for number, phase in enumerate(loaded.of_phases if loaded.phases else ())
        }
        for key, mixture in mixtures.items():  # an entry with a weight is an object, others may be a string
            for index, entry in enumerate(mixture):
                stores[f"{key}.{index}" + (".store" if entry.weight != 1 else "")] = entry.store
        stores = {key: store for key, store in stores.items() if is_local(store)}
        if loaded.start_from is not None:
            folder = loaded.start_from.folder
            folders = {"start_from": folder} if isinstance(folder, Path) else folder
            stores |= {key: path for key, path in folders.items() if path.exists() or not is_hub_name(str(path))}
        names = [channel.name for channel in self.channels]
        for key, store in stores.items():
            path = re.sub(f"^{DATA}/", "", str(store))
            if path.split("/")[0] not in names:
                first = names[0] if names else "train"
                raise UserError(
                    f"launch sagemaker: {key}: {store}: expected a path that starts with a channel's name "
                    f"({', '.join(names) or 'there are no channels'}), as instances see it: --set {key}={first}/"
                    f"{Path(store).name}"
                )


def _values(job: Job, option: str) -> list[str]:
    pairs = zip(job.arguments[::2], job.arguments[1::2], strict=True)
    return [value for name, value in pairs if name == option]


def _ship_plugin(word: str, files: dict[str, str]) -> str:
    """Returns `word` or, if it is a plugin's file, its path on the instances; adds the file to `files`."""
    file = Path(word)
    if file.is_dir():
        raise UserError(
            f"launch sagemaker: --plugin {word}: expected a file, got a folder; install it in the image, as a package"
        )
    if not file.is_file():
        return word
    files[file.name] = file.read_text(encoding="utf-8")
    return f"{DATA}/{CODE}/{file.name}"
