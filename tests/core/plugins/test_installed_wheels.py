"""Plugins that pip has installed from a wheel: used by a run, gone when it goes on, two that register one name."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="hatchling builds the wheels"),
]
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
dependencies = ["terakoya"]

[project.entry-points.terakoya]
{module} = "{module}"

[tool.hatch.build.targets.wheel]
include = ["{module}"]
"""
SCHEDULE = """
from terakoya import hookimpl
from terakoya.components import Schedule


class Tide(Schedule):
    def factor(self, progress):
        return 0.5


@hookimpl
def register_schedules():
    return {"tide": Tide}
"""


def pip(*words: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, words), "--quiet", "--no-deps", "--no-index"]
    subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two wheels, each with a package that registers the schedule "tide"."""
    folder = tmp_path_factory.mktemp("wheels")
    for name, version in (("acme-tide", "1.2"), ("other-tide", "3")):
        module = name.replace("-", "_")
        (folder / name / module).mkdir(parents=True)
        (folder / name / "pyproject.toml").write_text(PROJECT.format(name=name, version=version, module=module))
        (folder / name / module / "__init__.py").write_text(SCHEDULE)
    sources = (folder / "acme-tide", folder / "other-tide")
    pip("wheel", "--no-build-isolation", "--wheel-dir", folder / "built", *sources)
    return sorted((folder / "built").glob("*.whl"))


def terakoya(site: Path | None, *words: object, code: int = 0) -> str:
    """What a new process prints that finds what is installed in `site`. Fails if its exit code is not `code`."""
    environment = {**os.environ, "PYTHONPATH": str(site or ""), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "terakoya", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def test_a_run_uses_it_and_says_when_it_is_gone_or_there_twice(wheels: list[Path], store: Path, tmp_path: Path) -> None:
    assert [each.name.partition("-py")[0] for each in wheels] == ["acme_tide-1.2", "other_tide-3"]
    one, both = tmp_path / "one", tmp_path / "both"
    pip("install", "--target", one, wheels[0])
    pip("install", "--target", both, *wheels)
    file, out = tmp_path / "run.json", tmp_path / "run"
    train = ("train", file, "--out", out)
    settings = toy.parameters(store, schedule={"type": "tide"}, checkpoint={"save_steps": 2})
    file.write_text(json.dumps({**settings, "max_steps": 2}))
    terakoya(one, *train)
    assert [each["learning_rate"] for each in toy.records(out).values()] == [0.0025, 0.0025]
    manifest = json.loads((out / "checkpoints/step-00000002/manifest.json").read_bytes())
    recorded = next(each for each in manifest["plugins"] if each["name"] == "acme_tide")
    assert (recorded["distribution"], recorded["version"]) == ("acme-tide", "1.2")

    file.write_text(json.dumps({**settings, "max_steps": 4}))
    said = terakoya(None, *train, code=2)
    assert "schedule tide: not installed" in said
    assert "plugin acme_tide (acme-tide 1.2: schedules/tide) is missing; install it: pip install acme-tide==1.2" in said
    said = terakoya(both, *train, code=2)
    assert 'schedule "tide" is registered twice: by acme_tide (acme-tide) and by other_tide (other-tide)' in said
    assert "--without other_tide" in said and max(toy.records(out)) == 2
    terakoya(both, "--without", "other_tide", *train)
    assert max(toy.records(out)) == 4
