"""Slurm's batch script and what is asked of Slurm, without one: its programs are stood in for."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import toy
from typer.testing import CliRunner

from terakoya.commands.main import app
from terakoya.components import JobState
from terakoya.errors import UserError
from terakoya.launch.jobs import find_job
from terakoya.launch.plan import PlannedLaunch, plan_launch
from terakoya_plugins.launchers.slurm.job import SlurmJob


def planned(folder: Path, settings: dict[str, Any], **changes: Any) -> PlannedLaunch:
    file = folder / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("store"), **changes)))
    return plan_launch("slurm", file, folder / "run", settings={"time": "60", **settings})


class Programs:
    """Stand-ins for Slurm's programs, first on the PATH: shell scripts; what they are asked is written down."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked_file = folder / "programs", folder / "asked"
        self.folder.mkdir()
        self.environment = {"PATH": f"{self.folder}:{os.environ['PATH']}"}

    def set(self, **texts: str) -> None:
        for name, text in texts.items():
            program = self.folder / name
            program.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.asked_file}\n{text}\n')
            program.chmod(0o755)

    def asked(self) -> list[str]:
        return self.asked_file.read_text().splitlines() if self.asked_file.exists() else []


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    made = Programs(tmp_path)
    monkeypatch.setenv("PATH", made.environment["PATH"])
    return made


# --------------------------------------------------------------------------------------------------- the script


def test_a_batch_script_says_what_was_asked_for(tmp_path: Path) -> None:
    settings = {
        "time": "3-00:00:00", "processes": 4, "gpus": 4, "account": "lab", "partition": "gpu", "qos": "long",
        "gres": "gpu:a100:4", "memory": "64G", "after": "120,121", "interface": "ib0", "offline": True,
        "sbatch": ["--constraint=a100"], "setup": ["module load cuda"], "inside": "numactl --localalloc",
    }  # fmt: skip
    plan = planned(tmp_path, settings, batch_size={"0": 10, "1": 6})
    script = plan.plan.files["job.sbatch"]
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert {
        "--job-name=run", "--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--time=3-00:00:00", "--account=lab",
        "--partition=gpu", "--qos=long", "--gres=gpu:a100:4", "--mem=64G", "--dependency=afterok:120:121",
        "--kill-on-invalid-dep=yes", "--signal=B:USR1@300", "--requeue", "--open-mode=append", "--constraint=a100",
    } <= set(directives)  # fmt: skip
    assert "module load cuda\n" in script
    assert "export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0\n" in script
    assert "export WANDB_MODE=offline\n" in script
    assert "srun --wait=600 numactl --localalloc python -m terakoya train " in script
    assert plan.plan.commands == [f"sbatch {plan.folder}/job.sbatch"]


def test_a_container_is_apptainers_or_pyxis(tmp_path: Path) -> None:
    image = {"container": "terakoya image.sif", "mounts": ["/data/stores"], "gpus": 1}
    script = planned(tmp_path, image).plan.files["job.sbatch"]
    here = Path.cwd()
    assert (
        f"srun --wait=600 apptainer exec --nv --bind {here} --bind {tmp_path} --bind /data/stores --pwd {here} "
        "'terakoya image.sif' python -m terakoya train "
    ) in script
    script = planned(tmp_path, {**image, "container_runtime": "pyxis"}).plan.files["job.sbatch"]
    assert (
        "srun --wait=600 '--container-image=terakoya image.sif' "
        f"--container-mounts={here}:{here},{tmp_path}:{tmp_path},"
        f"/data/stores:/data/stores --container-workdir={here} python -m terakoya train "
    ) in script


def controller(state: str = "RUNNING", preempted: str = "None") -> str:
    """What `scontrol` answers inside a job."""
    job = f"JobId=7 JobName=run JobState={state} Reason=None PreemptTime={preempted} Power="
    return f'case "$2" in hostnames) echo n1; echo n2 ;; job) echo "{job}" ;; esac'


def run_script(plan: PlannedLaunch, programs: Programs, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**programs.environment, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **variables}
    return subprocess.run(
        ["bash", plan.folder / "job.sbatch"], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("code", "queued"), [(0, 0), (75, 1), (2, 0), (130, 0), (143, 0), (1, 1)])
def test_which_ends_queue_a_job_again(code: int, queued: int, programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {})
    programs.set(srun=f"exit {code}", scontrol=controller())
    assert run_script(plan, programs).returncode == code
    assert programs.asked().count("scontrol requeue 7") == queued


def test_crashes_are_counted_and_other_restarts_are_not(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {"max_restarts": 2})
    programs.set(scontrol=controller())
    for code in (75, 1, 75, 137, 75, 1):
        programs.set(srun=f"exit {code}")
        assert run_script(plan, programs, SLURM_RESTART_COUNT="9").returncode == code
    assert programs.asked().count("scontrol requeue 7") == 5  # the third crash was one too many


def test_a_word_from_slurm_before_there_is_anything_to_save_queues_again(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {"max_restarts": 1})
    mine = tmp_path / "srun.pid"
    programs.set(
        srun=f"trap 'kill $!; exit 143' TERM; echo $$ > {mine}; kill -USR1 $PPID; sleep 20 & wait",
        scancel=f"kill -TERM $(cat {mine})",
        scontrol=controller(),
    )
    done = run_script(plan, programs)
    assert done.returncode == 143 and "queued again (1 of 1)" in done.stderr
    assert programs.asked()[-3:] == [
        "scancel --signal=TERM 7", "scontrol show job --oneliner 7", "scontrol requeue 7"
    ]  # fmt: skip
    assert run_script(plan, programs).returncode == 143  # time is too short to begin: it does not do so for ever
    assert programs.asked()[-1] == "scontrol show job --oneliner 7"
    programs.set(srun="exit 143", scontrol=controller(preempted="2026-11-22T01:56:00"))
    assert run_script(plan, programs).returncode == 143
    assert programs.asked()[-1] == "scontrol requeue 7"


@pytest.mark.parametrize("code", [75, 143, 1])
def test_a_cancelled_job_is_left_alone(code: int, programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {})
    programs.set(srun=f"exit {code}", scontrol=controller(state="COMPLETING"))
    assert run_script(plan, programs).returncode == code
    assert "scontrol requeue 7" not in programs.asked()


def test_the_first_node_is_called_and_cores_are_handed_on(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {"cpus_per_process": 8})
    programs.set(srun=f"env > {tmp_path}/seen", scontrol=controller())
    run_script(plan, programs, SLURM_CPUS_PER_TASK="8")
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert seen["MASTER_ADDR"] == "n1" and seen["MASTER_PORT"] == "20007"
    assert seen["OMP_NUM_THREADS"] == seen["SRUN_CPUS_PER_TASK"] == "8"
    assert seen["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"time": "a day"}, r"launch slurm: time: .*expected a time as sbatch has it"),
        ({"acount": "lab"}, 'acount: unknown key; did you mean "account"'),
        ({"after": "the last"}, r"after: .*expected numbers of jobs, such as 120 or 120,121"),
        ({"mounts": ["/data"]}, "mounts: are for a container"),
        ({"container": "a.sif", "inside": "numactl"}, "give one of the two"),
    ],
)
def test_settings_that_are_none(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said):
        planned(tmp_path, settings)


# ------------------------------------------------------------------------------------------------ a submitted job


FACTS = (
    "JobId=12 JobName=run UserId=root(0) Priority=1 JobState={state} Reason={reason} Dependency=(null) Requeue=1 "
    "Restarts={restarts} BatchFlag=1 ExitCode={code}:0 NodeList={nodes} Command=/a/job.sbatch StdOut={out} Power="
)


def scontrol(
    *, state: str, reason: str = "None", restarts: int = 0, code: int = 0, nodes: str = "n[1-2]", out: Path | str = "/o"
) -> str:
    text = FACTS.format(state=state, reason=reason, restarts=restarts, code=code, nodes=nodes, out=out)
    return f"echo '{text}'"


@pytest.mark.parametrize(
    ("said", "state"),
    [
        (scontrol(state="PENDING", reason="Priority", nodes="(null)"), JobState("PENDING", "waits: Priority")),
        (scontrol(state="RUNNING", restarts=2), JobState("RUNNING", "on n[1-2]; queued again 2 times")),
        (scontrol(state="COMPLETING", code=75), JobState("COMPLETING", "on n[1-2]")),
        (scontrol(state="COMPLETED", restarts=1), JobState("COMPLETED", "queued again once", done=True)),
        (scontrol(state="FAILED", code=2), JobState("FAILED", "on n[1-2]; exit code 2", done=True, failed=True)),
        (scontrol(state="FAILED", code=75), JobState("FAILED", "on n[1-2]; asked to stop, and saved", done=True)),
        (scontrol(state="CANCELLED", nodes=""), JobState("CANCELLED", "", done=True, failed=True)),
        (scontrol(state="NODE_FAIL"), JobState("NODE_FAIL", "on n[1-2]", done=True, failed=True)),
    ],
)
def test_what_slurm_says_of_a_job(said: str, state: JobState, programs: Programs) -> None:
    programs.set(scontrol=said)
    assert SlurmJob("12").state() == state


def test_a_job_that_slurm_has_forgotten(programs: Programs) -> None:
    programs.set(scontrol="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", sacct="exit 1")
    assert SlurmJob("12").state() == JobState(
        "unknown", "Slurm has no such job, or has forgotten it since it ended", done=True
    )
    programs.set(sacct="echo 'COMPLETED|0:0'")
    assert SlurmJob("12").state() == JobState("COMPLETED", "exit code 0", done=True)
    programs.set(sacct="echo 'CANCELLED by 0|0:15'")
    assert SlurmJob("12").state().failed
    with pytest.raises(UserError, match="job 12 is over"):
        SlurmJob("12").stop()
    programs.set(scontrol="echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match="launch slurm: scontrol: Unable to contact"):
        SlurmJob("12").state()


def test_stopping_keeps_slurm_from_queueing_it_again(programs: Programs) -> None:
    programs.set(scontrol=scontrol(state="RUNNING"), scancel="")
    assert "is not queued again" in SlurmJob("12").stop()
    assert programs.asked()[-2:] == ["scontrol update JobId=12 Requeue=0", "scancel --signal=TERM 12"]
    programs.set(scontrol=scontrol(state="PENDING"))
    assert "cancelled" in SlurmJob("12").stop()
    assert programs.asked()[-1] == "scancel 12"


def test_output_is_read_on_where_it_was_left(programs: Programs, tmp_path: Path) -> None:
    out = tmp_path / "12.out"
    programs.set(scontrol=scontrol(state="RUNNING", out=out))
    job = SlurmJob("12")
    assert list(job.output()) == []
    out.write_text("step 1\nste")
    assert list(job.output()) == ["step 1"]
    out.write_text("step 1\nstep 2\n")
    assert list(job.output()) == ["step 2"]


def test_submit_and_watch_follow_a_job_to_its_end(programs: Programs, tmp_path: Path) -> None:
    count = tmp_path / "count"
    programs.set(
        sbatch="echo '12;cluster'",
        scontrol=f"echo x >> {count}; case $(wc -l < {count}) in 1|2) {scontrol(state='RUNNING')} ;; "
        f"*) {scontrol(state='FAILED', code=1)} ;; esac",
    )
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("store"))))
    words = ["launch", "slurm", str(file), "--out", str(tmp_path / "run"), "--time", "60"]
    with pytest.raises(UserError, match="--watch needs --submit"):
        CliRunner().invoke(app, [*words, "--watch"], catch_exceptions=False)
    done = CliRunner().invoke(app, [*words, "--submit", "--watch", "--every", "0.2"])
    assert done.exit_code == 1, done.output
    assert (
        f"submitted as job 12; manage it with:\n  terakoya launch slurm status|logs|stop {tmp_path}/run" in done.output
    )
    shown = re.findall(r"^job 12: (.*)$", done.output, re.M)
    assert shown == ["RUNNING  on n[1-2]", "FAILED  on n[1-2]; exit code 1"]
    assert find_job("slurm", str(tmp_path / "run"))[1].job == "12"
    done = CliRunner().invoke(app, ["launch", "slurm", "status", str(tmp_path / "run.launch")])
    assert done.exit_code == 1 and "job 12: FAILED" in done.output


def test_verbs_that_have_nothing_to_ask(programs: Programs, tmp_path: Path) -> None:
    run = CliRunner()
    with pytest.raises(UserError, match="launch local: its runs belong to the terminal"):
        run.invoke(app, ["launch", "local", "stop", "12"], catch_exceptions=False)
    with pytest.raises(UserError, match="expected a job's number or a run's folder, got twelve"):
        run.invoke(app, ["launch", "slurm", "status", "twelve"], catch_exceptions=False)
    planned(tmp_path, {})
    with pytest.raises(UserError, match=r"nothing was submitted from .*run\.launch"):
        run.invoke(app, ["launch", "slurm", "status", str(tmp_path / "run")], catch_exceptions=False)
    with pytest.raises(UserError, match="fetch: the run's folder is on a file system you see"):
        run.invoke(app, ["launch", "slurm", "fetch", "12", "--out", "x"], catch_exceptions=False)
