"""MLflow: one MLflow run for each run, continued when the run resumes.

The server, its credentials and the other settings come from MLflow's environment variables, such as
`MLFLOW_TRACKING_URI`. The extra installs mlflow-skinny, which is enough for a server; a local data base, such as
`sqlite:///mlflow.db`, needs all of `mlflow`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terakoya import hookimpl
from terakoya.components import Tracker, TrackerRun
from terakoya.errors import UserError

FILE = "mlflow.json"
"""File in the run folder with the id of the MLflow run."""
LONGEST_VALUE = 500
"""MLflow refuses longer values of parameters."""


class Mlflow(Tracker):
    """Metrics as MLflow metrics, parameters by their key paths and as the artefact parameters.json."""

    experiment: str = "terakoya"
    """The MLflow experiment; it is made if there is none."""
    name: str | None = None
    """The name of the MLflow run; null is that of the run folder."""
    tracking_uri: str | None = None
    """The server or folder; null is that of `MLFLOW_TRACKING_URI`. An address with a password belongs there."""

    def check(self) -> None:
        """Raises UserError if MLflow is not installed."""
        _import_mlflow()

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """Opens the MLflow run whose id is in `run_folder`, or a new one; writes the id of a new one there.

        Raises:
            UserError: MLflow is not installed.
        """
        client = _import_mlflow().MlflowClient(tracking_uri=self.tracking_uri)
        file = run_folder / FILE
        if file.is_file():
            return _MlflowRun(client, str(json.loads(file.read_text(encoding="utf-8"))["run_id"]))
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self.experiment)
        run = client.create_run(experiment, run_name=self.name or run_folder.resolve().name)
        run_id = str(run.info.run_id)
        file.write_text(json.dumps({"run_id": run_id}) + "\n", encoding="utf-8")
        for key, value in _leaves(parameters):
            client.log_param(run_id, key, json.dumps(value, ensure_ascii=False)[:LONGEST_VALUE])
        client.log_text(run_id, json.dumps(parameters, indent=2, ensure_ascii=False), "parameters.json")
        return _MlflowRun(client, run_id)


def _import_mlflow() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    try:
        import mlflow
    except ImportError:
        raise UserError('tracker mlflow: is not installed; pip install "terakoya[mlflow]"') from None
    return mlflow


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns (key path, value) of every value in `value`; lists are values."""
    if isinstance(value, Mapping):
        return [leaf for key, each in value.items() for leaf in _leaves(each, f"{path}.{key}" if path else key)]
    return [(path, value)]


class _MlflowRun:
    def __init__(self, client: Any, run_id: str) -> None:
        self.client = client
        self.run_id = run_id
        client.update_run(run_id, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run_id, name, value, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.run_id, text, f"{name}/step-{step:08d}.txt")

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


@hookimpl
def register_trackers() -> dict[str, type[Tracker]]:
    """Registers `mlflow`."""
    return {"mlflow": Mlflow}
