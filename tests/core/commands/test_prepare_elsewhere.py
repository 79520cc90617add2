"""`terakoya prepare` under datatrove and as a printed Slurm script, as typed, beside one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

DOUBLE = Path(__file__).parents[2] / "helpers"
PLUGIN = """
from terakoya import hookimpl
from word_tokenizer import WordTokenizer

class FileTokenizer(WordTokenizer):
    pass

@hookimpl
def register_tokenizers():
    return {"words": FileTokenizer}
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a corpus of four blocks whose name needs quoting, a tokenizer that a plugin reads."""
    (tmp_path / "plugin_words.py").write_text(PLUGIN)
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "size.txt").write_text("1000")
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


def test_datatrove_as_typed(folder: Path, slurm: FakeSlurm) -> None:
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


def test_options_that_go_with_datatrove_only(folder: Path) -> None:
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


@pytest.mark.parametrize("clean", [False, True])
def test_the_printed_script_makes_the_store_of_one_run(folder: Path, slurm: FakeSlurm, clean: bool) -> None:
    more = ["--max-rejects", "2%"]
    if clean:
        (folder / "clean.json").write_text('[{"type": "exact_duplicates"}]')
        more += ["--clean", "clean.json"]
    before = set(contents(folder))
    script = prepare("a store", *more, "--slurm-array", 3).stdout
    assert not [file for file in set(contents(folder)) - before if "__pycache__" not in file], "something was written"
    for setting, changed in {"MEMORY=16G": "MEMORY=7G", "ACCOUNT=": "ACCOUNT=lab", "CPUS=4": "CPUS=1"}.items():
        assert f"\n{setting}" in script
        script = script.replace(f"\n{setting}", f"\n{changed}")
    (folder / "jobs.sh").write_text(script)
    subprocess.run(["bash", "-n", "jobs.sh"], check=True)
    prepare("one", "--processes", 1, *more)

    def run_script() -> str:
        return subprocess.run(
            ["bash", str(folder / "jobs.sh")], cwd="/", check=True, text=True, capture_output=True
        ).stdout

    encoding = "102" if clean else "101"
    assert f"submitted: job {encoding} encodes 3 shards" in run_script()
    jobs = slurm.jobs()
    assert jobs["101"]["mem"] == "7G" and jobs["101"]["account"] == "lab" and "partition" not in jobs["101"]
    assert "requeue" in jobs["101"] and jobs["101"]["array"] == ("1-1" if clean else "1-3")
    ended = slurm.work_off(run=lambda job, task: (job, task) != (encoding, 3))  # one job dies
    assert ended[encoding] == "failed" and "cancelled" in ended.values() and not (folder / "a store").exists()
    run_script()  # again: what was done is left alone
    ended = slurm.work_off()
    logs = [log.read_text() for log in sorted((folder / "a store.shards" / "logs").iterdir())]
    assert list(ended.values())[-1] == "completed", logs
    assert sum("nothing to do" in log for log in logs) == 2
    assert contents(folder / "a store") == contents(folder / "one")
    assert "is finished already" in run_script()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--slurm-array", 1], "expected at least 2 shards, got 1"),
        (["--slurm-array", 4, "--shard", "1/2"], "--shard cannot go with it"),
        (["--slurm-array", 4, "--force"], "--force cannot go with it"),
        (["--slurm-array", 4, "--engine", "datatrove"], "--engine cannot go with it"),
    ],
)
def test_what_contradicts_the_script_is_refused(folder: Path, more: list[object], message: str) -> None:
    assert message in prepare("out", *more, fails=True).stderr
