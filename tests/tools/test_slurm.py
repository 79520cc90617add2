"""Jobs of `launch slurm` on a real Slurm of two nodes on this machine, with preemption, time limits and losses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import submitted_runs
import toy
from submitted_runs import Job, find_process, records, running_cluster, wait_for, weights

from terakoya.components import JobState
from terakoya_launch.plan import plan_launch

CLUSTER = Path(__file__).parents[2] / "tools/slurm/cluster.sh"
MISSING = [name for name in ("slurmctld", "slurmd", "sbatch", "munged", "unshare") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: apt-get install slurm-wlm munge"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts and for Slurm's programs"),
    pytest.mark.timeout(900),
]
STEPS = 300
TABLE = {"0": 10, "1": 6}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs a cluster that the commands of this process reach; yields its folder."""
    folder = tmp_path_factory.mktemp("slurm")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with running_cluster(CLUSTER, folder, {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}, seconds=60):
        yield folder


def submit(
    store: Path, out: Path, settings: dict[str, Any], *, global_options: Sequence[str] = (), **changes: Any
) -> Job:
    values = {"batch_size": TABLE, "max_steps": STEPS, "checkpoint": {"save_steps": 1000}, **changes}
    settings = {"time": "10", "partition": "low", **settings}
    return submitted_runs.submit("slurm", toy.parameters(store, **values), out, settings, global_options)


@pytest.fixture(scope="module")
def undisturbed(cluster: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run: two processes, one on each node, ranks from srun."""
    job = submit(store, tmp_path_factory.mktemp("undisturbed") / "run", {})
    assert job.wait() == JobState("COMPLETED", "", done=True)
    assert "2 processes on 2 nodes" in job.printed()
    assert job.resumed_at() == []
    return job.run


def test_both_nodes_are_checked_in_a_job(
    cluster: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store, batch_size=TABLE)))
    planned = plan_launch("slurm", file, tmp_path / "run", settings={"time": "24:00:00", "partition": "low"})
    planned.check()
    said = capsys.readouterr().out
    assert said.count("seen") == 2 and "free" in said and "reached" in said
    (output,) = (planned.folder / "check").glob("*.out")
    assert {json.loads(line)["rank"] for line in output.read_text().splitlines()} == {0, 1}


def test_a_preempted_job_ends_with_the_undisturbed_weights(
    cluster: Path, store: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = submit(store, tmp_path / "run", {})
    job.wait_for_step(40)
    subprocess.run(
        ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 3", f"--output={tmp_path}/high"],
        check=True, capture_output=True,
    )  # fmt: skip
    state = job.wait()
    assert (state.status, state.detail) == ("COMPLETED", "requeued once"), job.printed()
    assert "Exited with exit code 75" in job.printed()
    assert [record["step"] for record in records(job.run, "stopped")] == job.resumed_at()
    assert 40 <= job.resumed_at()[0] < STEPS
    assert toy.losses(job.run) == toy.losses(undisturbed)
    assert weights(job.run, STEPS) == weights(undisturbed, STEPS)


def process_of(job: Job, rank: int) -> int:
    """Returns the process that trains as `rank`; 0 if there is none yet."""
    return find_process({"SLURM_JOB_ID": job.number, "SLURM_PROCID": str(rank)}, "terakoya", "train")


def parent(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid:")))


def slow(folder: Path, *, seconds: float) -> list[str]:
    """Returns options with a plugin that makes each step of a job's first start `seconds` longer."""
    file = folder / "slow.py"
    file.write_text(
        "import os, time\nfrom terakoya import hookimpl\n\n@hookimpl\ndef step_finished(run, report):\n"
        f"    time.sleep(0 if 'SLURM_RESTART_COUNT' in os.environ else {seconds})\n"
    )
    return ["--plugin", str(file)]


def test_a_job_preempted_before_its_first_step_is_requeued(
    cluster: Path, store: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = submit(store, tmp_path / "run", {})
    wait_for(lambda: process_of(job, 1) > 0, job.printed)
    subprocess.run(
        ["sbatch", "--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 3", f"--output={tmp_path}/high"],
        check=True, capture_output=True,
    )  # fmt: skip
    state = job.wait()
    assert (state.status, state.detail) == ("COMPLETED", "requeued once"), job.printed()
    assert weights(job.run, STEPS) == weights(undisturbed, STEPS)


def test_a_job_at_its_time_limit_saves_and_resumes(
    cluster: Path, store: Path, undisturbed: Path, tmp_path: Path
) -> None:
    settings = {"time": "2", "signal_seconds": 10}  # Slurm sends it up to 30 seconds earlier
    job = submit(store, tmp_path / "run", settings, global_options=slow(tmp_path, seconds=0.45))
    state = job.wait()
    assert state.status == "COMPLETED", job.printed()
    assert job.resumed_at() and job.resumed_at() == [record["step"] for record in records(job.run, "stopped")]
    assert toy.losses(job.run) == toy.losses(undisturbed)
    assert weights(job.run, STEPS) == weights(undisturbed, STEPS)


def test_a_job_that_lost_a_process_resumes_from_its_last_checkpoint(
    cluster: Path, store: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = submit(store, tmp_path / "run", {"max_restarts": 1}, checkpoint={"save_steps": 50})
    job.wait_for_step(60)
    os.kill(process_of(job, 1), signal.SIGKILL)
    state = job.wait()
    assert (state.status, state.detail) == ("COMPLETED", "requeued once"), job.printed()
    assert "requeued (1 of 1), resumes from the last checkpoint" in job.printed()
    assert job.resumed_at()[0] >= 50 and job.resumed_at()[0] % 50 == 0
    assert weights(job.run, STEPS) == weights(undisturbed, STEPS)


def test_a_job_that_lost_a_node_waits_for_it_and_resumes(
    cluster: Path, store: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = submit(store, tmp_path / "run", {}, checkpoint={"save_steps": 50})
    job.wait_for_step(60)
    lost = process_of(job, 1)
    daemon = int((cluster / "slurmd-n2.pid").read_text())
    for process in (daemon, parent(lost), lost):  # as in a power failure
        os.kill(process, signal.SIGKILL)
    wait_for(lambda: job.job.state().status == "PENDING", job.printed)
    controller = (cluster / "slurmctld.pid").read_text().strip()
    subprocess.run(["nsenter", f"--target={controller}", "--mount", "slurmd", "-N", "n2"], check=True)
    state = job.wait()
    assert (state.status, state.detail) == ("COMPLETED", "requeued once"), job.printed()
    assert job.resumed_at()[0] >= 50
    assert weights(job.run, STEPS) == weights(undisturbed, STEPS)


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Path, store: Path, tmp_path: Path) -> None:
    job = submit(store, tmp_path / "run", {})
    job.wait_for_step(40)
    subprocess.run(["scancel", job.number], check=True)
    assert job.wait().status == "CANCELLED"
    assert records(job.run, "stopped")
    time.sleep(3)
    assert job.job.state().status == "CANCELLED", job.printed()


def test_a_job_saves_on_a_stop_request_and_is_not_requeued(cluster: Path, store: Path, tmp_path: Path) -> None:
    job = submit(store, tmp_path / "run", {})
    job.wait_for_step(40)
    assert "sent a stop request" in job.job.stop()
    state = job.wait()
    assert state.detail.endswith("stopped on request, checkpoint saved") and not state.failed, state
    assert records(job.run, "stopped")
    time.sleep(3)
    assert job.job.state().done
    assert "stopped by" in "\n".join(job.job.output())


SENTENCES = [
    "先生は朝早く寺子屋の戸を開けた。",
    "子どもたちは筆を持って並んで座る。",
    "雨の日には昔の話を読んで聞かせた。",
]


def test_data_is_prepared_by_jobs_and_training_waits_for_them(cluster: Path, tmp_path: Path) -> None:
    pytest.importorskip("datatrove", reason="datatrove is not installed")
    texts = ["".join(SENTENCES[(index * k) % 3] for k in range(1, 4 + index % 5)) for index in range(120)]
    corpus = [tmp_path / f"corpus{number}.jsonl" for number in range(6)]  # one job reads at least one file
    for number, file in enumerate(corpus):
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts[number::6]]
        file.write_text("\n".join(lines))

    def terakoya(*arguments: str | Path) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "terakoya", *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    terakoya("tokenizer", "train", *corpus, "--type", "mecab_wordpiece", "--vocab-size", "200", "--out", "tokenizer")
    printed = terakoya(
        "prepare", *corpus, "--tokenizer", "tokenizer", "--out", "store",
        "--engine", "datatrove", "--executor", "slurm",
        "--set", "tasks=2", "--set", "partition=low", "--set", "time=10", "--set", "mem_per_cpu_gb=1",
    )  # fmt: skip
    join_job = printed.split(" then joins")[0].rpartition("job ")[2]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(Path("store"), max_steps=12)))
    output = terakoya(
        "launch", "slurm", file, "--out", "run", "--time", "10", "--partition", "low", "--after", join_job,
        "--submit", "--watch", "--every", "0.5",
    )  # fmt: skip
    assert "PENDING  waits: Dependency" in output and "COMPLETED" in output, output
    assert "finished" in output and "12/12 (100.0%)" in output, output
    terakoya("prepare", *corpus, "--tokenizer", "tokenizer", "--out", "plain")
    assert (tmp_path / "store/tokens.bin").read_bytes() == (tmp_path / "plain/tokens.bin").read_bytes()
