"""The jobs of `launch grid_engine` and `launch pbs`, with stand-ins for the schedulers' programs.

test_grid_engine.py has a real Grid Engine. There is none of PBS: its programs' answers are written here as its
reference guide describes them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import toy
from selection import at_night
from stand_in_programs import Programs

from terakoya.components import JobState
from terakoya.errors import UserError
from terakoya_clusters.launchers.grid_engine import GridEngineJob
from terakoya_clusters.launchers.pbs import PbsJob
from terakoya_launch.jobs import find_job
from terakoya_launch.plan import PlannedLaunch, plan_launch

TWO = {"0": 10, "1": 6}
HOSTS = {"grid_engine": {"pe": "hosts"}, "pbs": {}}


def planned(folder: Path, launcher: str, settings: dict[str, Any] | None = None, **changes: Any) -> PlannedLaunch:
    file = folder / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("store"), **changes)))
    return plan_launch(launcher, file, folder / "run", settings={"time": "01:00:00", **(settings or {})})


def directives(script: str, sign: str) -> list[str]:
    return [line.removeprefix(sign) for line in script.splitlines() if line.startswith(sign)]


# --------------------------------------------------------------------------------------------------- the scripts


def test_a_grid_engine_script_has_all_settings(tmp_path: Path) -> None:
    settings = {
        "pe": "mpi", "slots": 8, "resources": ["rt_F={nodes}", "h_vmem=60G"], "queue": "gpu", "project": "lab",
        "after": "120,121", "qsub": ["-m e"], "setup": ["module load cuda"], "inside": "numactl -l", "offline": True,
    }  # fmt: skip
    plan = planned(tmp_path, "grid_engine", settings, batch_size=TWO)
    assert {
        "-N run", "-l h_rt=01:00:00", "-pe mpi 16", "-l rt_F=2", "-l h_vmem=60G", "-q gpu", "-P lab", "-notify", "-r y",
        "-m e",
    } <= set(directives(plan.plan.files["job.sge"], "#$ "))  # fmt: skip
    node = plan.plan.files["node.sh"]
    assert "module load cuda\n" in node and "export WANDB_MODE=offline\n" in node
    assert "\nnumactl -l python -m terakoya_launch.torchrun_agent --nnodes 2 --nproc-per-node 1 " in node
    assert plan.plan.commands == [f"qsub -hold_jid 120,121 {plan.folder}/job.sge"]


def test_a_pbs_script_has_all_settings(tmp_path: Path) -> None:
    settings = {
        "cpus": 64, "gpus": 4, "memory": "400gb", "queue": "regular", "project": "lab", "after": "120,121",
        "qsub": ["-W group_list=gr"], "processes": 4,
    }  # fmt: skip
    plan = planned(tmp_path, "pbs", settings, batch_size=TWO)
    assert {
        "-N run", "-l walltime=01:00:00", "-l select=2:ncpus=64:ngpus=4:mem=400gb", "-l place=scatter", "-q regular",
        "-P lab", "-r y", "-W group_list=gr",
    } <= set(directives(plan.plan.files["job.pbs"], "#PBS "))  # fmt: skip
    assert "--nproc-per-node 4 " in plan.plan.files["node.sh"]
    assert plan.plan.commands == [f"qsub -W depend=afterok:120:121 {plan.folder}/job.pbs"]


def test_hosts_may_be_named(tmp_path: Path) -> None:
    table = {"a01": 10, "a02": 6}
    script = planned(tmp_path, "pbs", {"gpus": 4}, batch_size=table).plan.files["job.pbs"]
    assert "-l select=1:ngpus=4:host=a01+1:ngpus=4:host=a02" in directives(script, "#PBS ")
    script = planned(tmp_path, "grid_engine", {"pe": "hosts"}, batch_size=table).plan.files["job.sge"]
    assert "-l hostname=a01|a02" in directives(script, "#$ ")


@pytest.mark.parametrize(
    ("launcher", "settings", "message"),
    [
        ("pbs", {"time": "a day"}, r"launch pbs: time: .*expected hours, minutes and seconds, such as 24:00:00"),
        ("pbs", {"time": "00:05:00"}, "signal_seconds: expected less than the time limit 00:05:00, got 300 s"),
        ("pbs", {"after": "the last"}, "after: .*expected job numbers"),
        ("grid_engine", {}, r"batch_size is for 2 hosts: give pe, .*or a resource with {nodes}"),
        ("grid_engine", {"slots": 4}, "slots: needs pe"),
    ],
)
def test_wrong_settings_are_refused(launcher: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        planned(tmp_path, launcher, settings, batch_size=TWO)


def test_folders_that_schedulers_misread_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "my runs"
    folder.mkdir()
    with pytest.raises(UserError, match="accepts no folder with spaces"):
        planned(folder, "pbs")


# ------------------------------------------------------------------------------------------------- a job that runs


def run_job(
    plan: PlannedLaunch, programs: Programs, node: str, *, number: str = "7", first: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a job's script as the scheduler would, on the hosts a01 and a02; `node` takes the place of node.sh. `first`
    is the number of the job that this one continues."""
    (plan.folder / "node.sh").write_text(f'rank=$1 job=$2\nshift 2\necho "node $rank of $*"\n{node}\n')
    hosts = plan.folder / "hosts"
    hosts.write_text("a01 1 work.q@a01 UNDEFINED\na02 1 work.q@a02 UNDEFINED\na02 1 work.q@a02 UNDEFINED\n")
    start = 'shift; [ "$1" != -nostdin ] || shift 2; "$@"'
    programs.set(qrsh=start, pbs_tmrsh='shift; "$@"')
    environment = {**os.environ, **programs.environment, "PE_HOSTFILE": str(hosts), "JOB_ID": number}
    environment |= {"PBS_NODEFILE": str(hosts), "PBS_JOBID": f"{number}.server", "TERAKOYA_FIRST_JOB": first}
    (script,) = plan.folder.glob("job.*")
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60)


def output(plan: PlannedLaunch) -> str:
    return (plan.folder / "7.out").read_text()


@pytest.mark.parametrize("launcher", HOSTS)
def test_every_host_gets_its_number_and_all_hosts(launcher: str, programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, launcher, HOSTS[launcher], batch_size=TWO)
    done = run_job(plan, programs, "exit 0")
    assert done.returncode == 0, output(plan)
    assert sorted(output(plan).splitlines()) == ["node 0 of a01 a02", "node 1 of a01 a02"]
    remote = {"grid_engine": "qrsh -inherit -nostdin", "pbs": "pbs_tmrsh"}[launcher]
    assert programs.calls() == [f"{remote} a02 bash {plan.folder}/node.sh 1 7 a01 a02"]
    assert (plan.folder / "7.code").read_text() == "0\n"


AGAIN = {"grid_engine": "qsub -terse -v TERAKOYA_FIRST_JOB=7", "pbs": "qsub -v TERAKOYA_FIRST_JOB=7"}


@pytest.mark.parametrize(
    ("launcher", "code", "again"),
    at_night(
        [(name, code, code == 1) for name in HOSTS for code in (0, 75, 2, 3, 143, 1)],
        always=[("grid_engine", 2, False), ("pbs", 75, False), *((name, 1, True) for name in HOSTS)],
    ),
)
def test_after_which_exit_codes_another_job_continues(
    launcher: str, code: int, again: bool, programs: Programs, tmp_path: Path
) -> None:
    plan = planned(tmp_path, launcher, HOSTS[launcher], batch_size=TWO)
    programs.set(qsub="echo 8.server")
    assert run_job(plan, programs, f"exit {code}").returncode == code
    assert (f"{AGAIN[launcher]} {plan.folder}/{plan.launcher.script}" in programs.calls()) == again
    assert (plan.folder / "7.next").exists() == again
    assert not again or ((plan.folder / "7.next").read_text() == "8\n" and "continues in job 8" in output(plan))


def test_the_loss_of_another_host_counts_less_than_its_cause(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid_engine", {**HOSTS["grid_engine"], "max_restarts": 0}, batch_size=TWO)
    assert run_job(plan, programs, "[ $rank = 1 ] && exit 137; exit 76").returncode == 137
    assert run_job(plan, programs, "[ $rank = 0 ] && exit 137; exit 76").returncode == 137
    assert run_job(plan, programs, "exit 76").returncode == 76


@pytest.mark.parametrize("failing", [0, 1])
def test_a_mistake_on_one_host_ends_the_job_for_good(failing: int, programs: Programs, tmp_path: Path) -> None:
    """The other host has crashed as it lost that one."""
    plan = planned(tmp_path, "grid_engine", HOSTS["grid_engine"], batch_size=TWO)
    programs.set(qsub="echo 8")
    assert run_job(plan, programs, f"[ $rank = {failing} ] && exit 2; exit 137").returncode == 2
    assert not (plan.folder / "7.next").exists()


def test_crashes_are_counted(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid_engine", {**HOSTS["grid_engine"], "max_restarts": 1}, batch_size=TWO)
    programs.set(qsub="echo 8")
    assert run_job(plan, programs, "exit 137").returncode == 137
    assert "exit code 137; 1 of 1 restarts: the next job resumes from the last checkpoint" in output(plan)
    programs.set(qsub="echo 9")
    assert run_job(plan, programs, "exit 137", number="8", first="7").returncode == 137
    assert not (plan.folder / "8.next").exists()


ASKED = """
[ $rank != 0 ] || {signal}
until [ -e {folder}/$job.stop ]; do sleep 0.05; done
{then}
exit {code}"""


def asked(plan: PlannedLaunch, signal: str, *, code: int = 75, saves: bool = True) -> str:
    """A node.sh that ends with `code` when it is asked to stop, after the script got `signal`."""
    then = f"mkdir -p {plan.job.run}/checkpoints/step-00000004" if saves else ":"
    return ASKED.format(signal=f"kill -{signal} $PPID", folder=plan.folder, then=then, code=code)


def test_a_job_near_its_time_limit_saves_and_starts_again(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid_engine", HOSTS["grid_engine"], batch_size=TWO)
    programs.set(qsub="echo 8")
    assert run_job(plan, programs, asked(plan, "USR1")).returncode == 75
    assert (plan.folder / "7.next").read_text() == "8\n" and not (plan.folder / "7.crashes").exists()


def test_a_time_limit_before_anything_was_trained_counts_as_a_crash(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid_engine", {**HOSTS["grid_engine"], "max_restarts": 0}, batch_size=TWO)
    assert run_job(plan, programs, asked(plan, "USR1", saves=False)).returncode == 143
    assert run_job(plan, programs, asked(plan, "USR1", saves=False, code=143)).returncode == 143


@pytest.mark.parametrize("signal", ["TERM", "USR2"])
def test_a_deleted_job_saves_and_does_not_start_again(signal: str, programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid_engine", HOSTS["grid_engine"], batch_size=TWO)
    programs.set(qsub="echo 8")
    assert run_job(plan, programs, asked(plan, signal)).returncode == 75
    assert not (plan.folder / "7.next").exists() and (plan.folder / "7.stop").read_text() == "deleted\n"


def test_the_time_limit_comes_from_the_settings(programs: Programs, tmp_path: Path) -> None:
    settings = {**HOSTS["grid_engine"], "time": "00:00:02", "signal_seconds": 1}
    plan = planned(tmp_path, "grid_engine", settings, batch_size=TWO)
    programs.set(qsub="echo 8")
    assert run_job(plan, programs, asked(plan, "0")).returncode == 75
    assert (plan.folder / "7.next").exists()


def test_a_host_that_may_not_submit_jobs_says_so(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid_engine", HOSTS["grid_engine"], batch_size=TWO)
    programs.set(qsub="echo denied: host a01 is no submit host >&2; exit 1")
    assert run_job(plan, programs, "exit 1").returncode == 1
    assert "host a01 is no submit host" in output(plan) and not (plan.folder / "7.next").exists()
    assert run_job(plan, programs, asked(plan, "USR1")).returncode == 1  # at the time limit
    assert "no job continues the run" in output(plan) and (plan.folder / "7.code").read_text() == "1\n"


def test_too_few_hosts_are_an_error(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, "grid_engine", HOSTS["grid_engine"], batch_size={**TWO, "2": 4})
    assert run_job(plan, programs, "exit 0").returncode == 2
    assert "batch_size has rows for 3 hosts, and the scheduler gave 2: a01 a02" in output(plan)


# ----------------------------------------------------------------------------------------------- a submitted job


LISTED = """<job_info><queue_info><job_list state="running"><JB_job_number>{number}</JB_job_number>
<state>{state}</state><queue_name>{queue}</queue_name></job_list></queue_info></job_info>"""


def qstat(state: str, *, number: int = 12, queue: str = "") -> str:
    return f"echo '{LISTED.format(number=number, state=state, queue=queue)}'"


def test_the_state_of_a_grid_engine_job(programs: Programs, tmp_path: Path) -> None:
    job = GridEngineJob("12", tmp_path)
    programs.set(qstat=qstat("qw"))
    assert job.state() == JobState("qw")
    programs.set(qstat=qstat("r", queue="work.q@a01"))
    assert job.state() == JobState("r", "on work.q@a01")
    programs.set(qstat=qstat("Eqw"))
    assert job.state() == JobState("Eqw", "cannot start: qstat -j 12 says why")
    programs.set(qstat=qstat("r", number=13))
    for code, state in (
        ("0", JobState("ended", "", done=True)),
        ("75", JobState("ended", "stopped on request, checkpoint saved", done=True)),
        ("2", JobState("ended", "exit code 2", done=True, failed=True)),
    ):
        (tmp_path / "12.code").write_text(f"{code}\n")
        assert job.state() == state
    (tmp_path / "12.next").write_text("13\n")
    assert job.state() == JobState("r") and job.number == "13"


def test_a_grid_engine_job_that_was_killed(programs: Programs, tmp_path: Path) -> None:
    programs.set(qstat="echo '<job_info/>'", qacct="echo 'error: job id 12 not found' >&2; exit 1")
    assert GridEngineJob("12", tmp_path).state().status == "unknown"
    programs.set(qacct="echo 'exit_status  99'; echo ======; echo 'failed       100 : assumedly after job'; "
                 "echo 'exit_status  137                  (Killed)'")  # fmt: skip
    assert GridEngineJob("12", None).state() == JobState("ended", "exit code 137", done=True, failed=True)


FACTS = """Job Id: {number}.server
    Job_Name = run
    job_state = {state}
    exec_host = {hosts}
    comment = Not Running: Insufficient amount of resource: ngpus (R: 8 A:
\t 4)
{more}"""


def answer(state: str, *, number: int = 12, hosts: str = "a01/0*8+a02/0*8", more: str = "") -> str:
    return f"cat << 'END'\n{FACTS.format(state=state, number=number, hosts=hosts, more=more)}\nEND"


def test_the_state_of_a_pbs_job(programs: Programs, tmp_path: Path) -> None:
    job = PbsJob("12", tmp_path)
    programs.set(qstat=answer("R"))
    assert job.state() == JobState("R", "on a01,a02")
    programs.set(qstat=answer("Q", hosts=""))
    waits = "Not Running: Insufficient amount of resource: ngpus (R: 8 A: 4)"
    assert job.state() == JobState("Q", waits)
    programs.set(qstat=answer("F", more="    Exit_status = 271"))
    assert job.state() == JobState("ended", "exit code 271", done=True, failed=True)
    (tmp_path / "12.next").write_text("13\n")
    programs.set(qstat=answer("R", number=13))
    assert job.state() == JobState("R", "on a01,a02") and programs.calls()[-1] == "qstat -x -f 13"
    (tmp_path / "13.code").write_text("0\n")
    programs.set(qstat="echo 'qstat: Unknown Job Id 13.server' >&2; exit 153")
    assert job.state() == JobState("ended", "", done=True)


@pytest.mark.parametrize("launcher", HOSTS)
def test_stop_leaves_a_request_or_deletes_a_waiting_job(launcher: str, programs: Programs, tmp_path: Path) -> None:
    runs, waits = (qstat("r"), qstat("qw")) if launcher == "grid_engine" else (answer("R"), answer("Q"))
    plan = planned(tmp_path, launcher, HOSTS[launcher], batch_size=TWO)
    programs.set(qsub="echo 12" if launcher == "grid_engine" else "echo 12.server", qdel="", qstat=runs)
    assert plan.submit() == 0
    job, record = find_job(launcher, str(tmp_path / "run"))
    assert record.job == "12" and "left a stop request" in job.stop()
    assert (plan.folder / "12.stop").read_text() == "user\n"
    (plan.folder / "12.out").write_text("step 1\nst")
    assert list(job.output()) == ["step 1"]
    programs.set(qstat=waits)
    assert "deleted" in job.stop() and programs.calls()[-1] == "qdel 12"
    by_number, _ = find_job(launcher, "12")
    programs.set(qstat=runs)
    with pytest.raises(UserError, match="give the run's folder"):
        by_number.stop()


def test_a_scheduler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="launch pbs: qstat is not installed; run this command where jobs are submitt"):
        PbsJob("12", tmp_path).state()
    with pytest.raises(UserError, match="expected a job's number or a run's folder, got work/run"):
        GridEngineJob("work/run", None)
