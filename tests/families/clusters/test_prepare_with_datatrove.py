"""`terakoya prepare --engine datatrove` on the command line: the stores equal those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from small_preparation import contents
from word_tokenizer import PLUGIN, make_folder

DOUBLE = Path(__file__).parents[2] / "helpers"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a corpus of four blocks whose name needs quoting, a tokenizer that a plugin reads."""
    (tmp_path / "plugin_words.py").write_text(PLUGIN)
    make_folder(tmp_path / "tokenizer")
    text = "手習い そろばん " * 400
    rows = [json.dumps({"body": f"number{n % 300} {text}"}, ensure_ascii=False) for n in range(320)]
    (tmp_path / "all text.jsonl").write_text("\n".join([*rows, "{"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DOUBLE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "slurm")
    for name, value in fake.environment.items():
        monkeypatch.setenv(name, value)
    return fake


def prepare(out: str, *more: object, fails: bool = False) -> subprocess.CompletedProcess[str]:
    code = "from terakoya.commands.main import main; main()"
    words = ["--plugin", "plugin_words.py", "prepare", "all text.jsonl", "--tokenizer", "tokenizer", "--field", "body"]
    words += ["--append-eos", "--out", out, *map(str, more)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == (2 if fails else 0), done.stderr
    assert not fails or "Traceback" not in done.stderr
    return done


@pytest.mark.nightly
def test_every_executor_gives_the_store_of_one_process(folder: Path, forks: None, slurm: FakeSlurm) -> None:
    pytest.importorskip("datatrove", reason="datatrove is not installed")
    one = prepare("one", "--processes", 1).stdout
    assert prepare("local", "--engine", "datatrove", "--processes", 2).stdout == one.replace("one", "local")
    (folder / "cluster.json").write_text('{"tasks": 2, "partition": "cpu", "sbatch_args": {"account": "lab"}}')
    engine = ["--engine", "datatrove", "--executor", "slurm", "--executor-settings", "cluster.json"]
    done = prepare("slurm/out", *engine, "--set", "time=1:00:00", "--set", "sbatch_args.mem=9G")
    assert "submitted: job 101 encodes, job 102 then joins; slurm/out is finished when there is" in done.stdout
    assert slurm.jobs()["101"]["account"] == "lab" and slurm.jobs()["101"]["mem"] == "9G"
    assert set(slurm.work_off().values()) == {"completed"}
    assert contents(folder / "one") == contents(folder / "local") == contents(folder / "slurm" / "out")
    again = prepare("slurm/out", *engine, "--set", "time=1:00:00")
    assert "nothing to do" in again.stderr and again.stdout == one.replace("one", "slurm/out")


def test_options_of_datatrove_need_its_engine(folder: Path, forks: None) -> None:
    assert "expected --engine datatrove" in prepare("out", "--set", "tasks=3", fails=True).stderr
    assert not (folder / "out").exists()


def test_without_datatrove_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hidden" / "datatrove").mkdir(parents=True)
    (folder / "hidden" / "datatrove" / "__init__.py").write_text(
        'raise ModuleNotFoundError("No module named datatrove")'
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "hidden"), os.environ["PYTHONPATH"]]))
    failed = prepare("out", "--engine", "datatrove", fails=True)
    assert 'pip install "terakoya[datatrove]"' in failed.stderr
