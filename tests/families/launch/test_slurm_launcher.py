"""Slurm's batch script and the calls of Slurm's programs, tested with stand-ins for them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import toy
from documented_commands import ROOT
from stand_in_programs import Programs
from typer.testing import CliRunner

from terakoya.commands.main import build_app
from terakoya.components import JobState
from terakoya.config.presets import find_parameters
from terakoya.errors import UserError
from terakoya_launch.jobs import find_job
from terakoya_launch.launchers.slurm.job import SlurmJob
from terakoya_launch.options import LaunchOptions
from terakoya_launch.plan import PlannedLaunch, plan_launch


def planned(folder: Path, settings: dict[str, Any], **changes: Any) -> PlannedLaunch:
    file = folder / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("store"), **changes)))
    return plan_launch("slurm", file, folder / "run", settings={"time": "60", **settings})


@pytest.mark.parametrize(
    ("settings", "asks"),
    [({}, False), ({"gpus": 8}, True), ({"gres": "gpu:4"}, True), ({"sbatch": ["--gpus-per-task=1"]}, True)],
)
def test_a_job_without_gpus_says_so(settings: dict[str, Any], asks: bool, tmp_path: Path) -> None:
    said = any(
        "asks for no GPU; where nodes have some: --gpus N" in each for each in planned(tmp_path, settings).plan.notes
    )
    assert said is not asks


@pytest.mark.parametrize(("settings", "told"), [({"gpus": 8}, True), ({"gpus": 8, "cpus_per_process": 12}, False)])
def test_a_job_of_one_core_for_each_gpu_is_told(settings: dict[str, Any], told: bool, tmp_path: Path) -> None:
    assert any("one core unless told otherwise" in each for each in planned(tmp_path, settings).plan.notes) is told


# --------------------------------------------------------------------------------------------------- the script


def test_a_batch_script_has_all_settings(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("after", ["120", "120,121"])
def test_jobs_to_wait_for_are_given_as_an_option(after: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(toy.parameters(Path("store"))))
    words = ["launch", "slurm", str(tmp_path / "run.json"), "--out", str(tmp_path / "run"), "--time", "60"]
    done = CliRunner().invoke(build_app(), [*words, "--after", after])
    assert done.exit_code == 0, repr(done.exception)
    assert f"--dependency=afterok:{after.replace(',', ':')}\n" in (tmp_path / "run.launch/job.sbatch").read_text()


def test_the_job_speaks_the_language_that_its_user_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERAKOYA_LANG", "ja")
    assert "\nexport TERAKOYA_LANG=ja\n" in planned(tmp_path, {}).plan.files["job.sbatch"]
    monkeypatch.delenv("TERAKOYA_LANG")
    assert "TERAKOYA_LANG" not in planned(tmp_path, {}).plan.files["job.sbatch"]


def test_a_container_runs_under_apptainer_or_pyxis(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("runtime", ["apptainer", "pyxis"])
def test_a_container_has_what_the_job_reads_wherever_that_is(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: tmp_path / name for name in ("parameters", "plugins", "runs", "plans", "disk", "links")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.chdir(folders["runs"])
    (folders["links"] / "stores").symlink_to(folders["disk"])
    plugin, file = folders["plugins"] / "mine.py", folders["parameters"] / "run.json"
    plugin.write_text("")
    settings = {"time": "60", "container": "image.sif", "container_runtime": runtime}

    def mounted(parameters: Path) -> set[str]:
        words = ["--plugin", str(plugin), "--plugin", "a_module", "--without", "ema"]
        options = LaunchOptions(folder=folders["plans"] / "run", global_options=words)
        plan = plan_launch("slurm", parameters, folders["runs"] / "run", options, settings=settings)
        [line] = [line for line in plan.plan.files["job.sbatch"].splitlines() if line.startswith("srun ")]
        words = shlex.split(line)
        if runtime == "apptainer":
            return {value for option, value in itertools.pairwise(words) if option == "--bind"}
        [mounts] = [word.partition("=")[2] for word in words if word.startswith("--container-mounts=")]
        return {mount.partition(":")[0] for mount in mounts.split(",")}

    file.write_text(json.dumps(toy.parameters(folders["links"] / "stores" / "one")))
    needed = [
        *(folders[name] for name in ("parameters", "plugins", "runs")), folders["plans"] / "run",
        folders["links"] / "stores/one", folders["disk"] / "one",
    ]  # fmt: skip
    assert mounted(file) == set(map(str, needed))
    assert str(find_parameters(Path("bert_base")).absolute().parent) in mounted(Path("bert_base"))


@pytest.mark.parametrize("time", ["5", "05:00", "0:05:00", "0-0:05"])
def test_a_job_that_would_save_before_it_has_started_is_refused(time: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"signal_seconds: expected less than the time limit {time}, got 300 s"):
        planned(tmp_path, {"time": time})
    planned(tmp_path, {"time": time, "signal_seconds": 299})
    planned(tmp_path, {"time": "0"})  # Slurm's word for no limit


def controller(state: str = "RUNNING", preempted: str = "None") -> str:
    """A stand-in for `scontrol` inside a job."""
    job = f"JobId=7 JobName=run JobState={state} Reason=None PreemptTime={preempted} Power="
    return f'case "$2" in hostnames) echo n1; echo n2 ;; job) echo "{job}" ;; esac'


def run_script(plan: PlannedLaunch, programs: Programs, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**programs.environment, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **variables}
    return subprocess.run(
        ["bash", plan.folder / "job.sbatch"], env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("code", "requeued"), [(0, 0), (75, 1), (2, 0), (130, 0), (143, 0), (1, 1)])
def test_which_exit_codes_requeue_a_job(code: int, requeued: int, programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {})
    programs.set(srun=f"exit {code}", scontrol=controller())
    assert run_script(plan, programs).returncode == code
    assert programs.calls().count("scontrol requeue 7") == requeued


def test_a_mistake_in_one_process_ends_the_job_for_good(programs: Programs, tmp_path: Path) -> None:
    """srun returns the highest code, which is that of the processes that lost the one with the mistake."""
    plan = planned(tmp_path, {})
    programs.set(srun='echo 2 > "$TERAKOYA_LASTING_CODE_FILE"; exit 76', scontrol=controller())
    assert run_script(plan, programs).returncode == 2
    assert "scontrol requeue 7" not in programs.calls()
    programs.set(srun="exit 76")  # the mistake of an earlier start is forgotten
    assert run_script(plan, programs).returncode == 76
    assert programs.calls()[-1] == "scontrol requeue 7"


def test_only_crashes_are_counted(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {"max_restarts": 2})
    programs.set(scontrol=controller())
    for code in (75, 1, 75, 137, 75, 1):
        programs.set(srun=f"exit {code}")
        assert run_script(plan, programs, SLURM_RESTART_COUNT="9").returncode == code
    assert programs.calls().count("scontrol requeue 7") == 5  # the third crash exceeds max_restarts


def test_a_time_limit_before_there_is_anything_to_save_counts_as_a_crash(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {"max_restarts": 1})
    mine = tmp_path / "srun.pid"
    programs.set(
        srun=f"trap 'kill $!; exit 143' TERM; echo $$ > {mine}; kill -USR1 $PPID; sleep 20 & wait",
        scancel=f"kill -TERM $(cat {mine})",
        scontrol=controller(),
    )
    done = run_script(plan, programs)
    assert done.returncode == 143 and "requeued (1 of 1)" in done.stderr
    assert programs.calls()[-3:] == [
        "scancel --signal=TERM 7", "scontrol show job --oneliner 7", "scontrol requeue 7"
    ]  # fmt: skip
    assert run_script(plan, programs).returncode == 143  # a start slower than its time limit does not requeue for ever
    assert programs.calls()[-1] == "scontrol show job --oneliner 7"
    programs.set(srun="exit 143", scontrol=controller(preempted="2026-11-22T01:56:00"))
    assert run_script(plan, programs).returncode == 143
    assert programs.calls()[-1] == "scontrol requeue 7"


def test_a_start_that_its_time_limit_ended_before_the_first_step_counts_as_a_crash(
    programs: Programs, tmp_path: Path
) -> None:
    plan = planned(tmp_path, {"max_restarts": 0})
    mine, checkpoints = tmp_path / "srun.pid", tmp_path / "run/checkpoints"
    waits = f"trap 'kill $!; exit 75' TERM; echo $$ > {mine}; kill -USR1 $PPID; sleep 20 & wait"
    programs.set(srun=waits, scancel=f"kill -TERM $(cat {mine})", scontrol=controller())
    (checkpoints / "step-00000004").mkdir(parents=True)
    assert run_script(plan, programs).returncode == 143
    assert "scontrol requeue 7" not in programs.calls()
    programs.set(srun=f"mkdir {checkpoints}/step-00000005; {waits}")
    assert run_script(plan, programs).returncode == 75
    assert programs.calls()[-1] == "scontrol requeue 7"


@pytest.mark.parametrize("code", [75, 143, 1])
def test_a_cancelled_job_is_left_alone(code: int, programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {})
    programs.set(srun=f"exit {code}", scontrol=controller(state="COMPLETING"))
    assert run_script(plan, programs).returncode == code
    assert "scontrol requeue 7" not in programs.calls()


def test_the_first_node_is_the_master_and_cores_are_passed_on(programs: Programs, tmp_path: Path) -> None:
    plan = planned(tmp_path, {"cpus_per_process": 8})
    programs.set(srun=f"env > {tmp_path}/seen", scontrol=controller())
    run_script(plan, programs, SLURM_CPUS_PER_TASK="8")
    seen = dict(line.split("=", 1) for line in (tmp_path / "seen").read_text().splitlines() if "=" in line)
    assert seen["MASTER_ADDR"] == "n1" and seen["MASTER_PORT"] == "20007"
    assert seen["OMP_NUM_THREADS"] == seen["SRUN_CPUS_PER_TASK"] == "8"
    assert seen["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": "a day"}, r"launch slurm: time: .*expected a time in the format of sbatch"),
        ({"acount": "lab"}, 'acount: unknown key; did you mean "account"'),
        ({"after": "the last"}, r"after: .*expected job numbers, such as 120 or 120,121"),
        ({"mounts": ["/data"]}, "mounts: needs container"),
        ({"container": "a.sif", "inside": "numactl"}, "give one of the two"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
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
    ("answer", "state"),
    [
        (scontrol(state="PENDING", reason="Priority", nodes="(null)"), JobState("PENDING", "waits: Priority")),
        (scontrol(state="RUNNING", restarts=2), JobState("RUNNING", "on n[1-2]; requeued 2 times")),
        (scontrol(state="COMPLETING", code=75), JobState("COMPLETING", "on n[1-2]")),
        (scontrol(state="COMPLETED", restarts=1), JobState("COMPLETED", "requeued once", done=True)),
        (scontrol(state="FAILED", code=2), JobState("FAILED", "on n[1-2]; exit code 2", done=True, failed=True)),
        (
            scontrol(state="FAILED", code=75),
            JobState("FAILED", "on n[1-2]; stopped on request, checkpoint saved", done=True),
        ),
        (scontrol(state="CANCELLED", nodes=""), JobState("CANCELLED", "", done=True, failed=True)),
        (scontrol(state="NODE_FAIL"), JobState("NODE_FAIL", "on n[1-2]", done=True, failed=True)),
    ],
)
def test_the_state_of_a_job(answer: str, state: JobState, programs: Programs) -> None:
    programs.set(scontrol=answer)
    assert SlurmJob("12").state() == state


def test_a_job_that_slurm_has_forgotten(programs: Programs) -> None:
    programs.set(scontrol="echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", sacct="exit 1")
    assert SlurmJob("12").state() == JobState(
        "unknown", "Slurm has no such job, or has forgotten it since its end", done=True
    )
    programs.set(sacct="echo 'COMPLETED|0:0'")
    assert SlurmJob("12").state() == JobState("COMPLETED", "exit code 0", done=True)
    programs.set(sacct="echo 'CANCELLED by 0|0:15'")
    assert SlurmJob("12").state().failed
    programs.set(sacct="echo 'FAILED|75:0'")
    assert SlurmJob("12").state() == JobState("FAILED", "stopped on request, checkpoint saved", done=True)
    with pytest.raises(UserError, match="job 12 has ended"):
        SlurmJob("12").stop()
    programs.set(scontrol="echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(UserError, match="launch slurm: scontrol: Unable to contact"):
        SlurmJob("12").state()


def test_stop_keeps_slurm_from_requeueing_the_job(programs: Programs) -> None:
    programs.set(scontrol=scontrol(state="RUNNING"), scancel="")
    assert "is not requeued" in SlurmJob("12").stop()
    assert programs.calls()[-2:] == ["scontrol update JobId=12 Requeue=0", "scancel --signal=TERM 12"]
    programs.set(scontrol=scontrol(state="PENDING"))
    assert "cancelled" in SlurmJob("12").stop()
    assert programs.calls()[-1] == "scancel 12"


def test_output_continues_where_the_last_call_ended(programs: Programs, tmp_path: Path) -> None:
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
        CliRunner().invoke(build_app(), [*words, "--watch"], catch_exceptions=False)
    done = CliRunner().invoke(build_app(), [*words, "--submit", "--watch", "--every", "0.2"])
    assert done.exit_code == 1, done.output
    assert (
        f"submitted as job 12; manage it with:\n  terakoya launch slurm status|logs|stop {tmp_path}/run" in done.output
    )
    shown = re.findall(r"^job 12: (.*)$", done.output, re.M)
    assert shown == ["RUNNING  on n[1-2]", "FAILED  on n[1-2]; exit code 1"]
    assert find_job("slurm", str(tmp_path / "run"))[1].job == "12"
    done = CliRunner().invoke(build_app(), ["launch", "slurm", "status", str(tmp_path / "run.launch")])
    assert done.exit_code == 1 and "job 12: FAILED" in done.output


def test_the_lines_of_the_tutorial_that_need_a_cluster(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "tutorials" / "slurm.md").read_text(encoding="utf-8")
    lines = re.findall(r"^terakoya launch slurm .*$", text.partition("## 3. Submit it")[2], re.M)
    assert [line.split()[3] for line in lines] == ["bert.json", "status", "logs", "stop"]
    Path("bert.json").write_text(json.dumps(toy.parameters(Path("store"), batch_size={"0": 4, "1": 4})))
    out = tmp_path / "job.out"
    out.write_text("step 1\n")
    state = scontrol(state="RUNNING", out=out)
    programs.set(sbatch="echo 12", scancel="", scontrol=state)
    done = []
    for line in lines:
        words = [word for word in shlex.split(line)[1:] if word != "--watch"]
        done.append(CliRunner().invoke(build_app(), words))
        assert done[-1].exit_code == 0, f"{line}\n{done[-1].output}\n{done[-1].exception!r}"
    assert any(call.startswith("sbatch ") for call in programs.calls()) and "submitted as job 12" in done[0].stdout
    assert f"next: terakoya launch slurm status {tmp_path}/work/slurm-run --watch\n" in done[0].stderr
    assert "job 12: RUNNING" in done[1].stdout and "step 1" in done[2].stdout and "is not requeued" in done[3].stdout
    assert done[3].stderr == "next: terakoya launch slurm status work/slurm-run\n"


def test_verbs_without_a_job_are_refused(programs: Programs, tmp_path: Path) -> None:
    run = CliRunner()
    with pytest.raises(UserError, match="launch local: its runs belong to the terminal"):
        run.invoke(build_app(), ["launch", "local", "stop", "12"], catch_exceptions=False)
    with pytest.raises(UserError, match="expected a job's number or a run's folder, got twelve"):
        run.invoke(build_app(), ["launch", "slurm", "status", "twelve"], catch_exceptions=False)
    planned(tmp_path, {})
    with pytest.raises(UserError, match=r"nothing was submitted from .*run\.launch"):
        run.invoke(build_app(), ["launch", "slurm", "status", str(tmp_path / "run")], catch_exceptions=False)
    with pytest.raises(UserError, match="fetch: the run's folder is on a shared file system"):
        run.invoke(build_app(), ["launch", "slurm", "fetch", "12", "--out", "x"], catch_exceptions=False)
