"""`terakoya launch`: the printed plan is what runs, and it trains like any other start."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import toy

from terakoya.errors import TemporaryFailure, UserError
from terakoya_forks.fork import fork
from terakoya_launch.options import LaunchOptions
from terakoya_launch.plan import PlannedLaunch, make_job, plan_launch
from terakoya_launch.scripts import FINAL_EXIT_CODES

CRASH = """\
import os, pathlib
from terakoya import hookimpl

mark = pathlib.Path({mark!r})

@hookimpl
def step_finished(run, report):
    if run.step == 8 and run.rank == run.world_size - 1 and not mark.exists():
        mark.touch()
        os._exit(9)
"""
LATE = """
import time
if mark.exists() and os.environ.get("RANK") == "0":
    time.sleep(3)
"""


def planned(launcher: str, store: Path, out: Path, settings: dict[str, object], **changes: object) -> PlannedLaunch:
    file = out.parent / f"{out.name}.json"
    file.write_text(json.dumps(toy.parameters(store, **changes)))
    return plan_launch(launcher, file, out, settings=settings)


def command_line(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "terakoya", *map(str, arguments)], capture_output=True, text=True, env=environment
    )


@pytest.mark.usefixtures("forks")
def test_a_plan_is_printed_written_and_starts_nothing(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store)))
    changes = ["--set", "max_steps=3", "--allow-change", "seed"]
    done = command_line("launch", "local", file, "--out", tmp_path / "run", "--processes", "2", *changes)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "run.launch/run.sh").read_text()
    assert script in done.stdout
    assert f"train {file} --out {tmp_path}/run --set max_steps=3 --allow-change seed --processes 2" in script
    assert f"bash {tmp_path}/run.launch/run.sh" in done.stdout
    assert not (tmp_path / "run").exists()


def test_without_processes_each_gpu_gets_one(store: Path, tmp_path: Path) -> None:
    script = (planned("local", store, tmp_path / "run", {}).folder / "run.sh").read_text()
    assert "--processes" not in script and "OMP_NUM_THREADS" not in script and "run: trains on this machine" in script


@pytest.mark.usefixtures("forks")
def test_a_crashed_local_run_restarts_by_itself(store: Path, tmp_path: Path) -> None:
    crash = tmp_path / "crash.py"
    crash.write_text(CRASH.format(mark=str(tmp_path / "crashed")))
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store)))
    done = command_line(
        "--plugin", crash, "launch", "local", file, "--out", tmp_path / "run", "--max-restarts", "1", "--submit"
    )
    assert done.returncode == 0, done.stderr
    assert "exit code 9; restart 1 of 1" in done.stderr
    assert list(toy.records(tmp_path / "run", "resume")) == [5]
    toy.train(toy.parameters(store), tmp_path / "undisturbed")
    assert toy.losses(tmp_path / "run") == toy.losses(tmp_path / "undisturbed")


@pytest.mark.usefixtures("forks")
def test_a_local_run_with_an_error_is_not_restarted(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(tmp_path / "no-store")))
    done = command_line("launch", "local", file, "--out", tmp_path / "run", "--max-restarts", "3", "--submit")
    assert done.returncode == 2
    assert done.stderr.count("no-store") == 1


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL)),
    ],
)
def test_a_local_run_saves_when_its_script_gets_a_signal(
    number: signal.Signals, store: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if number == signal.SIGTERM:  # the others also test the interpreter that the script starts
        request.getfixturevalue("forks")
    plan = planned("local", store, tmp_path / "run", {"max_restarts": 3}, max_steps=100_000)
    script = subprocess.Popen(["bash", plan.folder / "run.sh"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/metrics.jsonl").exists() or not toy.records(tmp_path / "run"):
        assert script.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    script.send_signal(number)
    assert script.wait(timeout=60) == (-signal.SIGKILL if number == signal.SIGKILL else 75)
    while not toy.records(tmp_path / "run", "stopped"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_exit_code_of_a_run_that_exits_at_once_on_sigterm(store: Path, tmp_path: Path) -> None:
    """The signal interrupts the script's wait; the run has exited before the next wait."""
    script = planned("local", store, tmp_path / "run", {"max_restarts": 3}).folder / "run.sh"
    command = next(line for line in script.read_text().splitlines() if line.endswith("& child=$!"))
    exits = "(trap 'exit 75' TERM; touch $PWD/ready; while true; do sleep 0.05; done) & child=$!"
    slow = script.read_text().replace(command, exits).replace("|| true' TERM", "|| true; sleep 1' TERM")
    started = subprocess.Popen(["bash", "-c", slow.replace("$PWD", str(tmp_path))])
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists():
        assert started.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=60) == 75


def test_a_signal_before_there_is_a_run_ends_it_and_no_other_starts(store: Path, tmp_path: Path) -> None:
    script = planned("local", store, tmp_path / "run", {"max_restarts": 3}).folder / "run.sh"
    command = next(line for line in script.read_text().splitlines() if line.endswith("& child=$!"))
    early = script.read_text().replace(command, "kill -TERM $$\nsleep 600 & child=$!")
    done = subprocess.run(["bash", "-c", early], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "")


# ------------------------------------------------------------------------------------------------------------ hosts


def stand_in_for_ssh(folder: Path) -> str:
    """Returns a stand-in for ssh that runs the command on this machine, with the host's name in AS_HOST."""
    script = folder / "ssh.sh"
    script.write_text('host=$1; shift; AS_HOST=$host exec bash -c "$*"\n')
    return f"bash {script}"


@pytest.mark.nightly
@pytest.mark.usefixtures("forks")
def test_hosts_of_different_sizes_train_like_any_other_start(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    table = {"0": 10, "1": 6}
    settings = {"hosts": "localhost:2,127.0.0.1:1", "ssh": stand_in_for_ssh(tmp_path), "port": toy.free_port()}
    plan = planned("hosts", store, tmp_path / "run", settings, batch_size=table)
    assert "3 processes, 16 rows a step" in plan.plan.notes[0]
    assert plan.submit() == 0
    assert "[localhost] step 12/12" in capsys.readouterr().out
    toy.train(toy.parameters(store, batch_size=table), tmp_path / "plain", nodes=(2, 1))
    assert toy.losses(tmp_path / "run") == toy.losses(tmp_path / "plain")


@pytest.mark.nightly
@pytest.mark.usefixtures("forks")
def test_a_lost_process_restarts_all_hosts(store: Path, tmp_path: Path) -> None:
    """Even if rank 0 is late after the restart: no process may read the addresses of the processes before."""
    crash = tmp_path / "crash.py"
    crash.write_text(CRASH.format(mark=str(tmp_path / "crashed")) + LATE)
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store, batch_size={"0": 10, "1": 6})))
    settings = {
        "hosts": "localhost,127.0.0.1", "ssh": stand_in_for_ssh(tmp_path), "port": toy.free_port(), "max_restarts": 1,
    }  # fmt: skip
    plan = plan_launch(
        "hosts", file, tmp_path / "run", LaunchOptions(global_options=["--plugin", str(crash)]), settings=settings
    )
    assert plan.submit() == 0
    assert (tmp_path / "crashed").exists()
    assert list(toy.records(tmp_path / "run", "resume")) == [5]
    assert max(toy.records(tmp_path / "run")) == 12


@pytest.mark.parametrize(("given", "restarts"), [({}, 3), ({"max_restarts": 0}, None), ({"max_restarts": 5}, 5)])
def test_no_restart_is_a_choice_where_lost_nodes_are_survived(
    given: dict[str, object], restarts: int | None, store: Path, tmp_path: Path
) -> None:
    plan = planned(
        "hosts", store, tmp_path / "run", {"hosts": "a01,a02", **given}, batch_size={"0": 8, "1": 8},
        on_lost_node="redistribute",
    )  # fmt: skip
    script = plan.plan.files["node-1.sh"]
    assert ("--max-restarts" in script) == (restarts is not None)
    assert restarts is None or f"--max-restarts {restarts}" in script


def test_rows_go_to_hosts_by_their_names(store: Path, tmp_path: Path) -> None:
    table = {"a02": 9, "a01.lab": 7}
    plan = planned("hosts", store, tmp_path / "run", {"hosts": "a01,me@a02:2"}, batch_size=table)
    assert "node 0: a01, 1 process, 7 rows a step" in plan.plan.notes[0]
    assert "node 1: me@a02, 2 processes, 9 rows a step" in plan.plan.notes[0]
    assert "export TERAKOYA_HOST=a02\n" in plan.plan.files["node-1.sh"]
    with pytest.raises(UserError, match=r'\{"a01": 7, "a03": 9\}'):
        planned("hosts", store, tmp_path / "run", {"hosts": "a01,a03"}, batch_size={"a01": 7, "a02": 9})


def test_a_plan_lists_one_command_a_host_and_what_losing_a_host_means(store: Path, tmp_path: Path) -> None:
    table = {"0": 7, "1": 5, "2": 4}
    settings = {"hosts": "a01,a02,a03", "ssh": "ssh"}
    plan = planned("hosts", store, tmp_path / "run", settings, batch_size=table)
    assert plan.plan.commands[2] == f"ssh a03 'bash {plan.folder}/node-2.sh'"
    assert f"  a03: bash {plan.folder}/node-2.sh" in plan.plan.notes[1]
    assert "--nnodes 3 --nproc-per-node 1 --node-rank 2 --master-addr a01" in plan.plan.files["node-2.sh"]
    assert "--interface a01)" in plan.plan.files["node-2.sh"] and "--interface a02)" in plan.plan.files["node-0.sh"]

    settings |= {"max_restarts": 2, "interface": "eth1"}
    plan = planned("hosts", store, tmp_path / "run", settings, batch_size=table)
    script = plan.plan.files["node-2.sh"]
    assert "--nnodes 3 " in script and "--max-restarts 2" in script and "--local-addr a03" in script
    assert "interface=eth1\n" in script and "host_facts" not in script
    assert "losing a host ends the run" in plan.plan.notes[2]

    settings = {"hosts": "a01,a02"}
    plan = planned("hosts", store, tmp_path / "run", settings, batch_size=table, on_lost_node="redistribute")
    assert "--nnodes 1:2 " in plan.plan.files["node-1.sh"] and "--max-restarts 3" in plan.plan.files["node-1.sh"]
    assert "node 0: a01, 1 process, 9 rows a step" in plan.plan.notes[0]
    assert "the others continue, unless it is a01" in plan.plan.notes[2]


def test_hosts_may_rendezvous_elsewhere(store: Path, tmp_path: Path) -> None:
    settings = {"hosts": "a01,a02", "rendezvous": "login:29400"}
    table = {"0": 9, "1": 7}
    changes: dict[str, object] = {"batch_size": table, "on_lost_node": "redistribute"}
    plan = planned("hosts", store, tmp_path / "run", settings, **changes)
    for script in plan.plan.files.values():
        assert "--rdzv-endpoint login:29400" in script and "is_host=0," in script
    assert plan.plan.notes[2].endswith("after losing a host the others continue")
    names = [
        re.findall(r"--rdzv-id (\S+)", each.plan.files["node-0.sh"] + each.plan.files["node-1.sh"])
        for each in (plan, planned("hosts", store, tmp_path / "run", settings, **changes))
    ]
    assert names[0][0] == names[0][1] != names[1][0]  # one for all hosts, and another for the next start
    with pytest.raises(UserError, match=r"rendezvous: login:29400: .* needs max_restarts"):
        planned("hosts", store, tmp_path / "run", settings, batch_size=table)


def test_a_table_for_other_hosts_is_refused_with_a_matching_one(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'keeps the global batch of 16: \{"0": 6, "1": 5, "2": 5\}'):
        planned("hosts", store, tmp_path / "run", {"hosts": "a,b,c"})
    with pytest.raises(UserError, match="b would split 2 rows among 4 processes"):
        planned("hosts", store, tmp_path / "run", {"hosts": "a,b:4"}, batch_size={"0": 14, "1": 2})


def test_a_local_run_of_several_nodes_is_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch_size is for 2 nodes"):
        planned("local", store, tmp_path / "run", {}, batch_size={"0": 8, "1": 8})


# ------------------------------------------------------------------------------------- nodes of {"*": ROWS}

CLUSTERS = {"slurm": {"time": "01:00:00"}}
ASKS = {"slurm": "--nodes=3", "pbs": "-l select=3\n", "grid_engine": "-pe mpi 3\n"}
if find_spec("terakoya_clusters"):
    CLUSTERS |= {"pbs": {"time": "01:00:00"}, "grid_engine": {"time": "01:00:00", "pe": "mpi"}}


@pytest.mark.parametrize("launcher", CLUSTERS)
def test_nodes_are_given_to_the_job_and_to_the_run(launcher: str, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store, batch_size={"*": 8})))
    plan = plan_launch(launcher, file, tmp_path / "run", LaunchOptions(nodes=3), settings=CLUSTERS[launcher])
    assert plan.job.batch_size == {"0": 8, "1": 8, "2": 8}
    scripts = "".join(plan.plan.files.values())
    assert ASKS[launcher] in scripts
    assert f"train {file} --out {tmp_path}/run --nodes 3" in scripts


@pytest.mark.parametrize("launcher", CLUSTERS)
def test_equal_nodes_without_their_number_are_refused(launcher: str, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'^run\.json: batch_size: \{"\*": 8\} is the rows of each node.*add --nodes N'):
        planned(launcher, store, tmp_path / "run", CLUSTERS[launcher], batch_size={"*": 8})
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store)))
    with pytest.raises(UserError, match=r"^--nodes 3: batch_size is for 1 node: "):
        plan_launch(launcher, file, tmp_path / "run", LaunchOptions(nodes=3), settings=CLUSTERS[launcher])


def test_a_launcher_whose_settings_name_the_nodes_needs_no_number(store: Path, tmp_path: Path) -> None:
    plan = planned("hosts", store, tmp_path / "run", {"hosts": "a01,a02"}, batch_size={"*": 8})
    assert "node 1: a02, 1 process, 8 rows a step" in plan.plan.notes[0]
    assert "--nodes 2 --node-rank 1" in plan.plan.files["node-1.sh"]
    plan = planned("local", store, tmp_path / "run", {}, batch_size={"*": 8})
    assert plan.job.batch_size == {"-1": 8}
    plan = planned("local", store, tmp_path / "run", {})
    assert "--nodes" not in plan.plan.files["run.sh"]


@pytest.mark.nightly
@pytest.mark.usefixtures("forks")
def test_a_run_keeps_the_table_that_it_began_with(store: Path, tmp_path: Path) -> None:
    settings = toy.parameters(store, batch_size={"*": 8}, evaluation=None, max_steps=2)
    toy.train(settings, tmp_path / "run", "--nodes", "2", nodes=(1, 1))
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000002/manifest.json").read_text())
    assert manifest["parameters"]["batch_size"] == {"0": 8, "1": 8}
    fork(tmp_path / "run", tmp_path / "fork", ['batch_size={"*": 8}', "max_steps=9"])
    assert json.loads((tmp_path / "fork/parameters.json").read_text())["batch_size"] == {"0": 8, "1": 8}
    more = {**settings, "max_steps": 3}
    said = toy.train(more, tmp_path / "run", "--nodes", "1", code=2)
    assert "2 steps of 16, but batch_size is now 8: keep the global batch" in " ".join(said.split())
    toy.train(more, tmp_path / "run", "--nodes", "1", "--set", "batch_size.*=16")
    assert list(toy.records(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.parametrize("line", ["export WANDB_API_KEY=0123abcd", "ulimit -n 9; AWS_SECRET_ACCESS_KEY='x/y' ls"])
def test_a_launcher_refuses_lines_of_bash_that_set_a_secret(line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^launch slurm: setup\.1: looks like a secret") as refused:
        plan_launch(
            "slurm", Path("tiny_bert"), tmp_path / "run", settings={"time": "1:00:00", "setup": ["module load x", line]}
        )
    assert line not in str(refused.value) and not list(tmp_path.iterdir())


def test_a_job_names_the_file_of_a_preset(tmp_path: Path) -> None:
    verb, file = make_job(Path("tiny_bert"), tmp_path / "run").arguments[:2]
    assert verb == "train" and Path(file).is_absolute() and Path(file).name == "tiny_bert.json"


def test_what_a_file_server_does_not_answer_is_started_again_and_what_a_user_has_to_mend_is_not() -> None:
    final = FINAL_EXIT_CODES.split(" | ")
    assert str(TemporaryFailure.exit_code) not in final and str(UserError.exit_code) in final
