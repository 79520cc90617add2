"""The request for a training job, and its validation by botocore's model of SageMaker."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError
from terakoya_clusters.launchers.sagemaker.settings import CODE, DATA, ROOT, Channel

if TYPE_CHECKING:
    from terakoya_clusters.launchers.sagemaker.settings import SageMakerSettings

NUMBER = r"(-?[0-9][-+.0-9e]*)"
METRICS: Mapping[str, str] = {
    "train:step": rf'"kind": "step", "step": {NUMBER}',
    "train:loss": rf'"kind": "step".* "loss": {NUMBER}',
    "train:learning_rate": rf'"kind": "step".* "learning_rate": {NUMBER}',
    "train:grad_norm": rf'"kind": "step".* "grad_norm": {NUMBER}',
    "train:tokens": rf'"kind": "step".* "tokens": {NUMBER}',
    "train:tokens_per_second": rf'"kind": "step".* "tokens_per_second": {NUMBER}',
    "validation:loss": rf'"kind": "validation".* "loss": {NUMBER}',
}
"""The metrics that SageMaker reads in the log, to which node 0 prints the run's `metrics.jsonl`."""


def request(settings: SageMakerSettings, *, name: str, run_name: str, instances: int, code: str) -> dict[str, Any]:
    """Returns the arguments of `CreateTrainingJob`. `code` is the S3 prefix of the script."""
    channels = [channel.request() for channel in (*settings.channels, Channel(name=CODE, s3_uri=code))]
    metrics = {**METRICS, **dict(settings.metric_definitions)}
    result: dict[str, Any] = {
        "TrainingJobName": name,
        "RoleArn": settings.role,
        "AlgorithmSpecification": {
            "TrainingImage": settings.image_uri,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash", f"{DATA}/{CODE}/entry.sh"],
            "MetricDefinitions": [{"Name": metric, "Regex": regex} for metric, regex in metrics.items()],
        },
        "InputDataConfig": channels,
        "OutputDataConfig": {"S3OutputPath": settings.output_path},
        "ResourceConfig": {
            "InstanceType": settings.instance_type,
            "InstanceCount": instances,
            "VolumeSizeInGB": settings.volume_size,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": settings.max_run},
        "EnableManagedSpotTraining": settings.use_spot_instances,
    }
    if settings.use_spot_instances:
        result["StoppingCondition"]["MaxWaitTimeInSeconds"] = settings.max_wait or 2 * settings.max_run
    if settings.subnets:
        result["VpcConfig"] = {"SecurityGroupIds": list(settings.security_group_ids), "Subnets": list(settings.subnets)}
    if settings.checkpoint_s3_uri is not None:  # the same for every job of this run, so that the next job resumes
        uri = f"{settings.checkpoint_s3_uri.rstrip('/')}/{run_name}"
        result["CheckpointConfig"] = {"S3Uri": uri, "LocalPath": f"{ROOT}/checkpoints"}
    if settings.max_retry_attempts:
        result["RetryStrategy"] = {"MaximumRetryAttempts": settings.max_retry_attempts}
    if settings.environment:
        result["Environment"] = dict(settings.environment)
    if settings.hyperparameters:
        result["HyperParameters"] = dict(settings.hyperparameters)
    if settings.tags:
        result["Tags"] = [{"Key": key, "Value": value} for key, value in settings.tags]
    return result


def problems(request: Mapping[str, Any]) -> list[str]:
    """Validates `request` with botocore's model of SageMaker; returns a note if botocore is not installed.

    Raises:
        UserError: the model rejects the request; one line a problem, with the path in the request.
    """
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
        from botocore.validate import ParamValidator
    except ImportError:
        return ['the request was not checked: boto3 is not installed here; pip install "terakoya[sagemaker]"']
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"), "sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    report = ParamValidator().validate(request, shape)
    errors = [report.generate_report()] if report.has_errors() else list(_find_violations(request, shape, "request"))
    if errors:
        raise UserError("launch sagemaker: " + "\n".join(errors))
    return []


def _find_violations(value: Any, shape: Any, where: str) -> Iterator[str]:
    """Yields violations of the model that botocore does not check: enumerations, patterns, largest sizes."""
    if shape.type_name == "structure":
        for key, inner in value.items():
            yield from _find_violations(inner, shape.members[key], f"{where}.{key}")
        return
    rules = shape.metadata
    size = value if isinstance(value, int) else len(value)
    if "max" in rules and size > rules["max"]:
        yield f"{where}: expected at most {rules['max']}, got {size}"
    if shape.type_name == "list":
        for index, inner in enumerate(value):
            yield from _find_violations(inner, shape.member, f"{where}.{index}")
    elif shape.type_name == "map":
        for key, inner in value.items():
            yield from _find_violations(key, shape.key, f"{where}.{key}")
            yield from _find_violations(inner, shape.value, f"{where}.{key}")
    elif shape.type_name == "string":
        if shape.enum and value not in shape.enum:
            yield f"{where}: expected one of {', '.join(shape.enum)}, got {value}"
        pattern = rules.get("pattern", ".*")
        if r"\p{" not in pattern and not re.fullmatch(pattern, value, re.DOTALL):  # Python's re has no such classes
            yield f"{where}: expected {pattern}, got {value}"
