"""tools/gpu/pack.sh: what the archive holds, and that the hour runs from there."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import toy

ROOT = Path(__file__).resolve().parents[2]
PIP = """\
#!/bin/sh
[ "$1 $2" = "-m pip" ] || exec {python} "$@"
[ $3 = wheel ] && touch "$7/terakoya-0-py3-none-any.whl"
[ $3 = download ] || exit 0
for each in "$@"; do [ "$last" = --dest ] && folder=$each; last=$each; done
for each in "$@"; do case $each in *==*) touch "$folder/${{each%%=*}}.whl";; esac; done
"""
"""A stand-in for a python whose pip needs no network."""


def pack(folder: Path, *arguments: str, python: Path) -> Path:
    """The folder of the archive that pack.sh makes, unpacked."""
    archive = folder / "pack.tar.gz"
    command = ["bash", str(ROOT / "tools" / "gpu" / "pack.sh"), str(archive), *arguments]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "PYTHON": str(python)}, cwd=folder)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder / "pack"


def run_stage(packed: Path, out: Path, part: str, stage: str, *, site: Path | None = None) -> dict[str, str]:
    """The last measurement of a stage that runs from the pack."""
    options = ["--part", part, "--only", stage, "--tiny", "--out", str(out)]
    command = [sys.executable, str(packed / "tools" / "gpu" / "hour.py"), *options]
    out.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "TERAKOYA_PLUGINS"}  # of other tests
    environment |= {"PYTHONPATH": str(site)} if site else {}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=out, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.index(f"{stage}: ended, ") < done.stdout.index("| BERT-base | ")  # the goals are at its end
    found: dict[str, str] = json.loads((out / "hour.jsonl").read_text().splitlines()[-1])
    return found


@pytest.mark.nightly
def test_the_pack_holds_wheels_tools_presets_and_a_store_and_runs_from_there(tmp_path: Path, forks: None) -> None:
    store = toy.make_store(tmp_path / "toy", documents=20, seed=1)
    python = tmp_path / "python"
    python.write_text(PIP.format(python=sys.executable))
    python.chmod(0o755)
    packed = pack(tmp_path, "3.12", str(store), python=python)
    wheels = {each.name.split("-")[0].removesuffix(".whl") for each in (packed / "wheels").iterdir()}
    assert {"terakoya", "pydantic", "orjson", "pluggy", "lion", "psutil"} <= wheels
    assert (packed / "parameters" / "bert_base.json").exists() and not (packed / "tools" / "bench" / "figures").exists()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    found = run_stage(packed, tmp_path / "results", "A", "waits")
    assert (found["commit"], found["documents"]) == (commit.stdout.strip(), "store")


@pytest.mark.nightly
def test_its_wheels_are_enough_beside_torch_and_transformers(tmp_path: Path) -> None:
    packed = pack(tmp_path, f"{sys.version_info.major}.{sys.version_info.minor}", python=Path(sys.executable))
    site, wheels = tmp_path / "site", [str(each) for each in (packed / "wheels").iterdir()]
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site), *wheels]
    subprocess.run([sys.executable, *install], check=True)
    found = run_stage(packed, tmp_path / "results", "C", "bert_base beside Trainer", site=site)
    assert found["documents"] == "random ids" and "ours_over_this" in found
