"""`parallel.nccl`: the variables are set in the processes before they connect. NCCL itself needs GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import toy

from terakoya.config.nccl import Nccl
from terakoya.errors import UserError
from terakoya.launch.here import read_parameters

SHOW = """\
import json, os
from terakoya import hookimpl

@hookimpl
def step_finished(run, report):
    names = ("NCCL_DEBUG", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
    with open(f"{folder}/{{run.rank}}.json", "w") as stream:
        json.dump([os.environ.get(name) for name in names], stream)
"""


def parameters(store: Path, **nccl: Any) -> dict[str, Any]:
    raw = toy.parameters(store, max_steps=1, evaluation=None)
    return {**raw, "parallel": {**raw.get("parallel", {}), "nccl": nccl}}


@pytest.mark.slow
def test_every_process_has_the_variables_and_its_environment_comes_first(store: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "show.py"
    plugin.write_text(SHOW.format(folder=tmp_path))
    settings, out = parameters(store, debug="INFO", flight_recorder=2000), tmp_path / "run"
    own = [{}, {"NCCL_DEBUG": "WARN"}]
    toy.finish(toy.start(settings, out, nodes=(2,), plugins=[plugin], environment_of_rank=own))
    for rank, debug in enumerate(("INFO", "WARN")):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        assert seen == [debug, "2000", f"{out}/flight_recorder/rank_", "1"]
    assert (out / "flight_recorder").is_dir()


def test_nothing_is_set_that_is_not_asked_for(tmp_path: Path) -> None:
    assert Nccl().variables(tmp_path) == {}
    assert Nccl(heartbeat_seconds=1200).variables(tmp_path) == {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1200"}
    assert Nccl(flight_recorder=1).variables(Path("run"))["TORCH_FR_DUMP_TEMP_FILE"].startswith(str(Path.cwd()))


def test_an_unknown_level_is_refused(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(parameters(store, debug="LOUD")))
    with pytest.raises(UserError, match=r"parallel\.nccl\.debug"):
        read_parameters(file)
