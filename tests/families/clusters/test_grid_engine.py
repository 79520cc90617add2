"""Jobs of `launch grid_engine` on a real Grid Engine of two hosts on this machine: time limits, stops, losses."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import submitted_runs
import toy
from submitted_runs import Job, find_process, records, running_cluster, weights

from terakoya.components import JobState
from terakoya_launch.plan import plan_launch

CLUSTER = Path(__file__).parents[3] / "tools/grid_engine/cluster.sh"
MISSING = [name for name in ("sge_qmaster", "sge_execd", "qsub", "ip", "unshare") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: see {CLUSTER.name}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for hosts and for Grid Engine's programs"),
    pytest.mark.timeout(1800),
]
STEPS = 60
TABLE = {"0": 10, "1": 6}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs a cluster that the commands of this process reach; yields its folder."""
    folder = tmp_path_factory.mktemp("grid_engine")
    variables = {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    with running_cluster(CLUSTER, folder, variables, seconds=120):
        yield folder


@pytest.fixture(scope="module")
def undisturbed(cluster: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run: two processes, one on each host."""
    job = submit(store, tmp_path_factory.mktemp("undisturbed") / "run", {})
    assert job.wait() == JobState("ended", "", done=True), job.printed()
    assert "2 processes on 2 nodes (1 on a0" in job.printed()
    assert job.resumed_at() == []
    return job.run


def submit(store: Path, out: Path, settings: dict[str, Any], *, delay: float = 0.0, **changes: Any) -> Job:
    """Submits a run; each step of the first start of it takes `delay` seconds longer."""
    values = {"batch_size": TABLE, "max_steps": STEPS, "checkpoint": {"save_steps": 1000}, **changes}
    slow = out.parent / f"{out.name}_slow.py"
    slow.write_text(
        "import pathlib, time\nfrom terakoya import hookimpl\n\n@hookimpl\ndef step_finished(run, report):\n"
        f"    time.sleep(0 if any(pathlib.Path({str(out)!r}).glob('checkpoints/step-*')) else {delay})\n"
    )
    settings = {"time": "01:00:00", "pe": "hosts", **settings}
    return submitted_runs.submit("grid_engine", toy.parameters(store, **values), out, settings, ["--plugin", str(slow)])


def test_both_hosts_are_checked_in_a_job(
    cluster: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store, batch_size=TABLE)))
    plan_launch("grid_engine", file, tmp_path / "run", settings={"time": "24:00:00", "pe": "hosts"}).check()
    said = capsys.readouterr().out
    assert said.count("seen") == 2 and "free" in said and "reached" in said and not (tmp_path / "run").exists()


def test_a_job_at_its_time_limit_saves_and_resumes(
    cluster: Path, store: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = submit(store, tmp_path / "run", {"time": "00:04:00", "signal_seconds": 150}, delay=2.0)
    assert job.wait() == JobState("ended", "", done=True), job.printed()
    assert job.resumed_at() and job.resumed_at() == [record["step"] for record in records(job.run, "stopped")]
    assert toy.losses(job.run) == toy.losses(undisturbed)
    assert weights(job.run, STEPS) == weights(undisturbed, STEPS)


def test_a_job_that_lost_a_process_resumes_from_its_last_checkpoint(
    cluster: Path, store: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = submit(store, tmp_path / "run", {"max_restarts": 1}, delay=0.1, checkpoint={"save_steps": 20})
    job.wait_for_step(22)
    os.kill(find_process({"TERAKOYA_HOST": "a01", "LOCAL_RANK": "0"}, str(job.run)), signal.SIGKILL)
    assert job.wait() == JobState("ended", "", done=True), job.printed()
    assert "exit code 137; 1 of 1 restarts: the next job resumes from the last checkpoint" in job.printed()
    assert job.resumed_at()[0] >= 20 and job.resumed_at()[0] % 20 == 0
    assert weights(job.run, STEPS) == weights(undisturbed, STEPS)


def test_a_job_saves_on_a_stop_request_and_ends(cluster: Path, store: Path, tmp_path: Path) -> None:
    job = submit(store, tmp_path / "run", {}, delay=0.2)
    job.wait_for_step(5)
    assert "left a stop request" in job.job.stop()
    assert job.wait() == JobState("ended", "stopped on request, checkpoint saved", done=True), job.printed()
    assert records(job.run, "stopped")
    assert "stopped by" in "\n".join(job.job.output())


def test_a_deleted_job_saves_before_it_is_killed(cluster: Path, store: Path, tmp_path: Path) -> None:
    job = submit(store, tmp_path / "run", {}, delay=0.2)
    job.wait_for_step(5)
    subprocess.run(["qdel", job.number], check=True, capture_output=True)
    state = job.wait()
    assert state.done and records(job.run, "stopped"), job.printed()


def test_a_job_whose_plan_is_wrong_ends_for_good(cluster: Path, store: Path, tmp_path: Path) -> None:
    job = submit(tmp_path / "no_store", tmp_path / "run", {})
    assert job.wait() == JobState("ended", "exit code 2", done=True, failed=True), job.printed()
