"""MLflow: one MLflow run for each run, continued when the run resumes, and one more each time that it goes back.

MLflow keeps every value of a step. After `spikes.action` `rollback` steps have other values, so the MLflow run ends
(status `KILLED`, tag `terakoya.undone_after_step`), and one called NAME-attempt-2 continues (tags `terakoya.attempt`
and `terakoya.first_attempt`, the id of the first MLflow run).

The server, its credentials and the other settings come from MLflow's environment variables, such as
`MLFLOW_TRACKING_URI`. The extra installs mlflow-skinny, which is enough for a server; a local data base, such as
`sqlite:///mlflow.db`, needs all of `mlflow`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from terakoya import hookimpl
from terakoya.components import Tracker, TrackerRun
from terakoya.errors import import_extra

FILE = "mlflow.json"
"""File in the run folder with the ids of the MLflow runs, by attempt."""
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
        _import_mlflow()

    def open(self, run_folder: Path, parameters: Mapping[str, Any]) -> TrackerRun:
        """Opens the MLflow run whose id is in `run_folder`, or a new one; writes the id of a new one there.

        Raises:
            UserError: MLflow is not installed.
        """
        client = _import_mlflow().MlflowClient(tracking_uri=self.tracking_uri)
        return _MlflowRun(client, partial(self._run_id, client, run_folder, parameters))

    def _run_id(self, client: Any, run_folder: Path, parameters: Mapping[str, Any], attempt: int) -> tuple[str, bool]:
        """Returns the id of the MLflow run of `attempt`, and whether it is new: the first call makes it."""
        file = run_folder / FILE
        ids = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        key = "run_id" if attempt == 1 else f"attempt-{attempt}"
        if key in ids:
            return str(ids[key]), False
        found = client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found is not None else client.create_experiment(self.experiment)
        name = self.name or run_folder.resolve().name
        run = client.create_run(experiment, run_name=name if attempt == 1 else f"{name}-attempt-{attempt}")
        run_id = str(run.info.run_id)
        file.write_text(json.dumps({**ids, key: run_id}) + "\n", encoding="utf-8")
        if attempt > 1:
            client.set_tag(run_id, "terakoya.attempt", str(attempt))
            client.set_tag(run_id, "terakoya.first_attempt", ids["run_id"])
        for path, value in _leaves(parameters):
            client.log_param(run_id, path, json.dumps(value, ensure_ascii=False)[:LONGEST_VALUE])
        client.log_text(run_id, json.dumps(parameters, indent=2, ensure_ascii=False), "parameters.json")
        return run_id, True


def _import_mlflow() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    return import_extra("mlflow", "mlflow", "tracker mlflow")


def _accepted_name(name: str) -> str:
    """Returns `name` as MLflow takes it, which refuses other characters and what is not the shortest form of a path."""
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    return "/".join(part if part.strip(".") else "_" for part in parts if part)


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns (key path, value) of every value in `value`; lists are values."""
    if isinstance(value, Mapping):
        return [leaf for key, each in value.items() for leaf in _leaves(each, f"{path}.{key}" if path else key)]
    return [(path, value)]


class _MlflowRun:
    def __init__(self, client: Any, run_id_of: Callable[[int], tuple[str, bool]]) -> None:
        self.client = client
        self.run_id_of = run_id_of
        self.run_id, _ = run_id_of(1)
        client.update_run(self.run_id, status="RUNNING")

    def begin(self, step: int, attempt: int) -> None:
        run_id, is_new = self.run_id_of(attempt)
        if run_id != self.run_id:
            if is_new:  # else the run resumes, long after it went back
                self.client.set_tag(self.run_id, "terakoya.undone_after_step", str(step))
            self.client.set_terminated(self.run_id, "KILLED")
            self.client.update_run(run_id, status="RUNNING")
            self.run_id = run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.client.log_metric(self.run_id, _accepted_name(name), value, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        self.client.log_text(self.run_id, text, f"{name}/step-{step:08d}.txt")

    def close(self) -> None:
        self.client.set_terminated(self.run_id)


@hookimpl
def register_trackers() -> dict[str, type[Tracker]]:
    return {"mlflow": Mlflow}
