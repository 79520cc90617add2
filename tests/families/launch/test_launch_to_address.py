"""`terakoya launch --out s3://...`: the plan passes it on, the job is found by it, a lost host is replaced."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import toy
from stand_in_programs import Programs
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.errors import UserError
from terakoya.places import as_written
from terakoya_launch.jobs import find_job, find_plan_folder
from terakoya_launch.options import LaunchOptions
from terakoya_launch.plan import PlannedLaunch, plan_launch
from terakoya_places import run_objects
from terakoya_places.object_folder import ObjectFolder

ADDRESS = "s3://bucket/fleet/run"
SETTINGS: dict[str, dict[str, Any]] = {
    "local": {},
    "hosts": {"hosts": "a01"},
    "slurm": {"time": "01:00:00"},
}
if find_spec("terakoya_clusters"):
    SETTINGS |= {"pbs": {"time": "01:00:00"}, "grid_engine": {"time": "01:00:00"}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, in which work folders are by default."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def planned(
    place: Path, launcher: str, out: str = ADDRESS, *, settings: dict[str, Any] | None = None, **given: Any
) -> PlannedLaunch:
    file = place / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("store"))))
    return plan_launch(launcher, file, Path(out), LaunchOptions(**given), settings=settings or SETTINGS[launcher])


@pytest.mark.parametrize("launcher", SETTINGS)
def test_the_address_and_the_work_folder_are_passed_on(launcher: str, tmp_path: Path, cache: Path) -> None:
    plan = planned(tmp_path, launcher)
    here = cache / "terakoya/runs"
    assert plan.job.name == "run" and plan.job.run.parent == here and plan.job.out == ADDRESS
    assert plan.folder == plan.job.run.with_name(f"{plan.job.run.name}.launch")
    scripts = "".join(plan.plan.files.values())
    parameters = plan.folder / "parameters.json" if launcher == "hosts" else tmp_path / "run.json"  # sent over ssh
    assert f"train {parameters} --out {ADDRESS} --work-folder {plan.job.run}" in scripts
    plan = planned(tmp_path, launcher, work_folder=Path("/scratch/run"), folder=tmp_path / "plan")
    scripts = "".join(plan.plan.files.values())
    assert f"--out {ADDRESS} --work-folder /scratch/run" in scripts and plan.folder == tmp_path / "plan"
    if launcher != "local":
        assert any(f"/scratch/run (kept in {ADDRESS})" in note for note in plan.plan.notes)
    assert planned(tmp_path, launcher, "s3://other/fleet/run").folder.parent == here  # of the same name, elsewhere
    assert len(list(here.glob("run-*.launch"))) == 2
    with pytest.raises(UserError, match=r"--work-folder /scratch: expected an address .* in --out, got"):
        planned(tmp_path, launcher, str(tmp_path / "run"), work_folder=Path("/scratch"))


def test_the_submitted_job_is_found_by_the_address(programs: Programs, tmp_path: Path) -> None:
    address = f"file://{tmp_path}/bucket/run"
    facts = "JobId=12 JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n1 StdOut=/o Power="
    programs.set(sbatch="echo 12", scontrol=f"echo '{facts}'")
    with pytest.raises(UserError, match=r"nothing was submitted from .*cache/terakoya/runs/run-"):
        find_job("slurm", address)
    assert planned(tmp_path, "slurm", address).submit() == 0
    assert find_job("slurm", address)[1].job == "12"
    there = ObjectFolder(address)
    there.write("parameters.json", json.dumps(toy.parameters(Path("store"))).encode())
    there.write("metrics.jsonl", (json.dumps({"kind": "step", "step": 7, "loss": 2.5, "time": 1.0}) + "\n").encode())
    done = CliRunner().invoke(build_app(), ["launch", "slurm", "status", address])
    assert done.exit_code == 0, done.output
    assert "job 12: RUNNING  on n1" in done.stdout and "7/12" in done.stdout


@pytest.mark.parametrize("launcher", [name for name in SETTINGS if name not in ("local", "hosts")])
def test_a_fetched_checkpoint_was_not_trained(launcher: str, tmp_path: Path) -> None:
    """A start that its time limit ended before the first step counts as a crash, on a bare machine, too."""
    plan = planned(tmp_path, launcher)
    line = next(each for text in plan.plan.files.values() for each in text.splitlines() if each.startswith("newest()"))

    def newest() -> str:
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"{line}\nnewest"], capture_output=True, text=True, check=True
        ).stdout.strip()

    assert newest() == ""
    (plan.job.run / "checkpoints/step-00000004").mkdir(parents=True)
    assert newest() == "step-00000004"
    (plan.job.run / "place.json").write_text(json.dumps({"address": ADDRESS, "fetched": "step-00000004"}))
    assert newest() == ""
    (plan.job.run / "checkpoints/step-00000006").mkdir()
    assert newest() == "step-00000006"


def test_a_container_sees_the_work_folder(tmp_path: Path) -> None:
    settings = {"time": "01:00:00", "container": "image.sif"}
    script = planned(tmp_path, "slurm", settings=settings, work_folder=Path("/scratch/runs/a")).plan.files["job.sbatch"]
    assert "mkdir -p /scratch/runs\n" in script and "--bind /scratch/runs " in script


ALONE = """\
# runs a command as a host would that sees nothing of {hidden}
host=$1; shift
exec unshare --mount bash -c 'mount -t tmpfs none {hidden}; cd /; eval "$0"' "$*"
"""


@pytest.mark.nightly
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount that hides this machine's files")
def test_a_host_that_sees_no_file_of_this_machine(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a spot machine needs comes over ssh and from the address."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    hidden, there = tmp_path / "here", tmp_path / "there"
    hidden.mkdir()
    monkeypatch.chdir(hidden)
    monkeypatch.setenv("XDG_CACHE_HOME", str(hidden))
    ssh = tmp_path / "ssh.sh"
    ssh.write_text(ALONE.format(hidden=hidden))
    file = hidden / "run.json"
    file.write_text(json.dumps(toy.parameters(store, max_steps=4, evaluation=None)))
    settings = {"hosts": "localhost", "ssh": f"bash {ssh}"}
    out = Path(f"file://{tmp_path}/bucket/run")
    plan = plan_launch("hosts", file, out, LaunchOptions(work_folder=there), settings=settings)
    assert plan.plan.notes[1].startswith(f"localhost gets the files of {plan.folder} over ssh")
    assert plan.submit() == 0
    steps = run_objects.checkpoint_steps(run_objects.find_committed(ObjectFolder(as_written(out)).sizes()))
    assert list(steps)[-1] == 4
    with pytest.raises(UserError, match=r"has no .*/none: all hosts must mount"):
        options = LaunchOptions(overrides=[f'data.train=["{hidden}/none"]'])
        plan_launch("hosts", file, out, options, settings=settings).submit()


@pytest.mark.nightly
@pytest.mark.usefixtures("forks")
def test_a_lost_host_is_replaced_by_a_bare_one(store: Path, tmp_path: Path) -> None:
    """`launch hosts` with a stand-in for ssh: everything on the host is killed, its disk is gone, another goes on."""
    settings = toy.parameters(store, max_steps=32, checkpoint={"save_steps": 4})
    file = tmp_path / "run.json"
    file.write_text(json.dumps(settings))
    ssh = tmp_path / "ssh.sh"
    ssh.write_text('shift; exec bash -c "$*"\n')
    address = f"file://{tmp_path}/bucket/run"
    there = ObjectFolder(address)

    def launch(host: str) -> subprocess.Popen[str]:
        words = ["launch", "hosts", file, "--out", address, "--work-folder", tmp_path / host, "--hosts", host]
        return subprocess.Popen(
            [sys.executable, "-m", "terakoya", *map(str, words), "--ssh", f"bash {ssh}", "--submit"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def whole_steps() -> list[int]:
        return list(run_objects.checkpoint_steps(run_objects.find_committed(there.sizes())))

    first = launch("127.0.0.1")
    deadline = time.monotonic() + 120
    while not whole_steps():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    training = int((tmp_path / "127.0.0.1/run.lock").read_text().split()[1])
    os.kill(training, signal.SIGKILL)
    for each in [*psutil.Process(first.pid).children(recursive=True), psutil.Process(first.pid)]:
        each.send_signal(signal.SIGKILL)
    first.communicate()
    psutil.wait_procs([psutil.Process(training)] if psutil.pid_exists(training) else [], timeout=30)
    steps = whole_steps()
    assert steps[-1] < 32
    shutil.rmtree(tmp_path / "127.0.0.1")

    second = launch("localhost")
    said = second.communicate(timeout=300)[0]
    assert second.returncode == 0, said
    assert f"fetched step-{steps[-1]:08d}, from which the run continues" in " ".join(said.split())
    assert find_plan_folder(Path(address)).is_dir()
    toy.train(settings, tmp_path / "alone")
    ends = [toy.saved(folder / "checkpoints/step-00000032") for folder in (tmp_path / "bucket/run", tmp_path / "alone")]
    assert ends[0].keys() == ends[1].keys() and all(bool((ends[0][name] == ends[1][name]).all()) for name in ends[1])
