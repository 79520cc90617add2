"""`launch sagemaker`: a run that lies at an address, and the command that is shown after a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.components import JobState
from terakoya.errors import UserError
from terakoya_launch.commands import jobs
from terakoya_launch.options import LaunchOptions
from terakoya_launch.plan import PlannedLaunch, plan_launch

ADDRESS = "s3://bucket/fleet/run"


def planned(place: Path, settings: dict[str, Any], **given: Any) -> PlannedLaunch:
    file = place / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("store"))))
    return plan_launch("sagemaker", file, Path(ADDRESS), LaunchOptions(**given), settings=settings)


def test_a_job_that_has_ended_is_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    jobs._show_next("sagemaker", "77", JobState("Completed", done=True), None)
    assert capsys.readouterr().err.strip() == "next: terakoya launch sagemaker fetch 77 --out run"


def test_sagemaker_mirrors_to_the_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pytest.importorskip("botocore", reason="its model of SageMaker validates the requests")
    given: dict[str, Any] = {
        "role": "arn:aws:iam::123456789012:role/trainer",
        "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/terakoya:1",
        "output_path": "s3://models/out",
    }
    overrides = ['data.train=["s3://bucket/store"]']
    plan = planned(tmp_path, given, overrides=overrides)
    script = plan.plan.files["entry.sh"]
    assert f"--out {ADDRESS} --work-folder /opt/ml/run" in script and "export /opt/ml/run" in script
    assert f"run folder: /opt/ml/run, mirrored to {ADDRESS}" in plan.plan.notes[0]
    assert "CheckpointConfig" not in json.loads(plan.plan.files["request.json"])
    with pytest.raises(UserError, match="checkpoint_s3_uri: the run is mirrored"):
        planned(tmp_path, {**given, "checkpoint_s3_uri": "s3://bucket/c"}, overrides=overrides)
    with pytest.raises(UserError, match="--work-folder: its settings say where the run trains"):
        planned(tmp_path, given, work_folder=Path("/scratch"), overrides=overrides)
