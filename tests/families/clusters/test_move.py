"""`terakoya move`: a run stops, is carried and goes on elsewhere; whatever fails in between, nothing of it is lost."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import toy
from checkpoint_folders import write_checkpoint
from stand_in_programs import Programs
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.errors import UserError
from terakoya.places import as_written
from terakoya.runs import metrics
from terakoya.runs.checkpoints import find_problems, list_checkpoints
from terakoya.runs.files import read_lock
from terakoya_clusters.move import carry, move
from terakoya_launch.jobs import find_job
from terakoya_launch.options import LaunchOptions
from terakoya_places import run_objects
from terakoya_places.object_folder import ObjectFolder

SLURM = {"time": "01:00:00"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has stopped at step 4."""
    folder = tmp_path / "run"
    write_checkpoint(folder, 4)
    (folder / "parameters.json").write_text(json.dumps(toy.parameters(Path("store"))))
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "step", "step": 4, "loss": 2.0, "time": 1.0}) + "\n")
    (folder / "run.lock").write_text("pid 1 on nowhere")
    return folder


@contextmanager
def held(run: Path, holder: str) -> Iterator[None]:
    """While the block runs, a process that calls itself `holder` trains in `run`."""
    with (run / "run.lock").open("w") as stream:
        stream.write(holder)
        stream.flush()
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def steps(run: Path) -> list[int]:
    return [step for step, _ in list_checkpoints(run / "checkpoints")]


@pytest.mark.nightly
@pytest.mark.usefixtures("forks")
def test_a_run_goes_on_elsewhere_as_if_nothing_had_happened(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a process of this machine to a host, and into another folder."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = toy.parameters(store, max_steps=80, checkpoint={"save_steps": 1000}, evaluation=None)
    started = toy.start(settings, tmp_path / "run", environment={"TERAKOYA_HOST": "old"})
    deadline = time.monotonic() + 60
    while not (tmp_path / "run/metrics.jsonl").exists() or not toy.records(tmp_path / "run"):
        assert started[0].running() and time.monotonic() < deadline
        time.sleep(0.01)
    ssh = tmp_path / "ssh.sh"
    ssh.write_text('shift; exec bash -c "$*"\n')
    said: list[str] = []
    host = {"hosts": "localhost", "ssh": f"bash {ssh}", "port": toy.free_port()}
    planned = move(tmp_path / "run", "hosts", host, out=tmp_path / "there", say=said.append, options=LaunchOptions())
    toy.finish(started, code=75)
    stopped_at = list(toy.records(tmp_path / "run", "stopped"))
    assert len(stopped_at) == 1 and steps(tmp_path / "there") == stopped_at
    assert "sent a stop request to process" in said[0] and "stays as it is" in said[1]
    assert planned.submit() == 0
    toy.train(settings, tmp_path / "alone")
    assert toy.losses(tmp_path / "there") == toy.losses(tmp_path / "alone")
    ends = [toy.saved(tmp_path / name / "checkpoints/step-00000080") for name in ("there", "alone")]
    assert all(bool((ends[0][name] == ends[1][name]).all()) for name in ends[1])
    written = metrics.read(tmp_path / "there")
    assert [start["hosts"] for start in written.of_kind("start")] == [["old"], ["localhost"]]
    assert len(metrics.curves(written).points["loss"]) == 80  # one curve


def test_a_submitted_job_is_stopped_and_another_goes_on(run: Path, programs: Programs, tmp_path: Path) -> None:
    count = tmp_path / "count"
    facts = "JobId=12 JobState={} Requeue=1 ExitCode={}:0 NodeList=n1 StdOut=/o Power="
    programs.set(
        sbatch="echo $((12 + $(grep -c ^sbatch {calls}) - 1))".replace("{calls}", str(programs.calls_file)),
        scancel=f"touch {count}",
        scontrol=f"[ -e {count} ] && echo '{facts.format('FAILED', 75)}' || echo '{facts.format('RUNNING', 0)}'",
    )
    words = ["launch", "slurm", str(run / "parameters.json"), "--out", str(run), "--time", "01:00:00", "--submit"]
    assert CliRunner().invoke(build_app(), words).exit_code == 0
    done = CliRunner().invoke(build_app(), ["move", str(run), "slurm:gpu", "--time", "02:00:00"])
    assert done.exit_code == 0, done.output + repr(done.exception)
    assert "scontrol update JobId=12 Requeue=0" in programs.calls()
    assert "sent a stop request to job 12" in done.stdout and "job 12: FAILED" in done.stdout
    assert find_job("slurm", str(run))[1].job == "13" and "submitted as job 13" in done.stdout
    script = (tmp_path / "run.launch/job.sbatch").read_text()
    assert "#SBATCH --partition=gpu" in script and f"--out {run}" in script


def test_a_run_is_not_submitted_twice_to_the_place_where_its_job_goes_on(
    run: Path, programs: Programs, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.write_text("PENDING")
    programs.set(
        sbatch="echo $((12 + $(grep -c ^sbatch {calls}) - 1))".replace("{calls}", str(programs.calls_file)),
        scontrol=f"echo JobId=12 JobState=$(cat {state}) Requeue=1 ExitCode=0:0 NodeList=n1 StdOut=/o Power=",
    )
    there, say = tmp_path / "there", CliRunner()
    words = ["move", str(run), "slurm:gpu", "--time", "02:00:00", "--out", str(there)]
    assert say.invoke(build_app(), words).exit_code == 0 and steps(there) == [4]
    again = say.invoke(build_app(), words)
    assert isinstance(again.exception, UserError)
    assert "job 12 was submitted for it before, and is there still (PENDING)" in str(again.exception)
    assert sum(call.startswith("sbatch") for call in programs.calls()) == 1
    with pytest.raises(UserError, match="give --lost if it is gone"), held(run, "pid 5 on nowhere"):
        move(run, "slurm", {"partition": "gpu", **SLURM}, out=there, say=lambda _: None)  # before anything is stopped
    assert say.invoke(build_app(), [*words, "--lost"]).exit_code == 0
    state.write_text("COMPLETED")
    assert say.invoke(build_app(), words).exit_code == 0
    assert sum(call.startswith("sbatch") for call in programs.calls()) == 3


def test_nothing_is_stopped_before_the_plan_is_sound(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with held(run, f"pid {os.getpid()} on {os.uname().nodename}"):
        with pytest.raises(UserError, match="time: "):
            move(run, "slurm", {"time": "soon"}, say=said.append)
        with pytest.raises(UserError, match=r"keeps the global batch of 16"):
            move(run, "hosts", {"hosts": "a01,a02"}, say=said.append)
    assert said == [] and not (tmp_path / "run.launch").exists()


def test_a_run_on_another_machine_is_stopped_there_unless_it_is_lost(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with held(run, "pid 77 on a01"):
        with pytest.raises(
            UserError, match=r"trains in pid 77 on a01, .* `ssh a01 kill 77` makes it save and end; .*--lost"
        ):
            move(run, "slurm", SLURM, say=said.append)
        planned = move(run, "slurm", SLURM, lost=True, say=said.append)
    assert planned.job.run == run and said == []


def test_where_the_run_stands_is_said_when_a_step_fails(run: Path, programs: Programs, tmp_path: Path) -> None:
    programs.set(sbatch="echo 'invalid account' >&2; exit 1")
    there = tmp_path / "there"
    words = ["move", str(run), "slurm", "--time", "01:00:00", "--out", str(there)]
    failed = CliRunner().invoke(build_app(), words)
    assert "invalid account" in str(failed.exception)
    assert f"the run is stopped, and whole in {there}; the same command goes on from there" in failed.stdout
    assert steps(there) == steps(run) == [4] and not (there / "run.lock").exists()
    programs.set(sbatch="echo 12")
    done = CliRunner().invoke(build_app(), words)
    assert done.exit_code == 0 and f"{there}: has step 4 already" in done.stdout, done.output
    assert find_job("slurm", str(there))[1].job == "12"


def test_a_copy_that_is_cut_short_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def copy_half(source: Path, target: Path) -> None:
        (target / "metrics.jsonl").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("terakoya_clusters.move.copy_folder", copy_half)
    with pytest.raises((UserError, OSError), match="No space left on device"):
        move(run, "slurm", SLURM, out=tmp_path / "there", say=said.append, options=LaunchOptions())
    assert not (tmp_path / "there").exists() and f"whole in {run}" in said[-1] and steps(run) == [4]


def test_a_run_is_carried_to_an_address_and_back(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    kept = ("model-best", "permanent/step-00000004")
    for name in kept:
        shutil.copytree(run / "checkpoints/step-00000004", run / name)
    address = Path(f"file://{tmp_path}/bucket/run")
    planned = move(run, "slurm", SLURM, out=address, say=said.append)
    there = ObjectFolder(as_written(address))
    assert list(run_objects.checkpoint_steps(run_objects.find_committed(there.sizes()))) == [4]
    assert "metrics.jsonl" in there.sizes() and planned.job.kept_in == there.address
    assert (planned.folder / "parameters.json").is_file()
    assert f"train {planned.folder}/parameters.json --out {there.address}" in planned.plan.files["job.sbatch"]
    back = tmp_path / "back"
    move(address, "slurm", SLURM, out=back, say=said.append, lost=True)
    assert steps(back) == [4] and not find_problems(back / "checkpoints/step-00000004")
    assert (back / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
    assert all((back / name / "manifest.json").is_file() and not find_problems(back / name) for name in kept)
    next((tmp_path / "bucket/run/model-best/state").iterdir()).write_text("x")
    move(address, "slurm", SLURM, out=tmp_path / "again", say=said.append, lost=True)
    assert "model-best is left out, as it is not whole: " in said[-2] and "has all of the run" in said[-1]
    assert (tmp_path / "again" / kept[1]).is_dir() and not (tmp_path / "again" / kept[0]).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "expected a run and a launcher"),
        (["RUN", "local:4"], "local: takes no value after a colon"),
        (["RUN", "slurm", "gpu"], "expected settings of slurm after it, got gpu"),
        (["nothing", "local"], "nothing"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], message: str, run: Path) -> None:
    done = CliRunner().invoke(build_app(), ["move", *(str(run) if word == "RUN" else word for word in words)])
    assert message in str(done.exception) and not read_lock(run).held


def test_another_run_is_not_overwritten(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, 2)
    with pytest.raises(UserError, match="already exists and is not empty"):
        carry(run, other, lambda text: None)
    assert steps(other) == [2]


def test_a_place_of_another_run_is_refused_before_anything_is_stopped(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_checkpoint(other, 8)
    (other / "metrics.jsonl").write_text(json.dumps({"kind": "start", "step": 0, "time": 9.0}) + "\n")
    shutil.copytree(other, tmp_path / "bucket")
    said: list[str] = []
    with held(run, "pid 77 on a01"):
        for out in (other, Path(f"file://{tmp_path}/bucket")):
            with pytest.raises(UserError, match="got another run"):
                move(run, "slurm", SLURM, out=out, say=said.append)
    assert said == []


def test_a_run_that_has_gone_on_at_its_address_is_left_alone(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    address, there = Path(f"file://{tmp_path}/bucket/run"), tmp_path / "bucket/run"
    carry(run, address, said.append)
    write_checkpoint(there, 8)
    with (there / "metrics.jsonl").open("a") as log:
        log.write("{}\n")
    carry(run, address, said.append)
    assert said[-1] == f"{as_written(address)}: has step 8 already"
    assert (there / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text() + "{}\n"
    assert steps(there) == [4, 8]


def test_a_folder_that_the_scheduler_refuses_stops_nothing(run: Path, tmp_path: Path) -> None:
    with held(run, "pid 77 on a01"), pytest.raises(UserError, match="sbatch accepts no folder with spaces"):
        move(run, "slurm", SLURM, out=tmp_path / "my runs/run", say=print)
    assert not (tmp_path / "my runs").exists()
