"""`launch slurm --check`, and that of other launchers where they are installed, with stand-ins for the schedulers'
programs: two nodes of this machine.

tests/tools/test_slurm.py has a real Slurm.
"""

from __future__ import annotations

import json
import re
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import toy
from selection import at_night
from stand_in_programs import Programs

from terakoya.errors import UserError
from terakoya_launch import job_checks
from terakoya_launch.plan import PlannedLaunch, plan_launch

SETTINGS: dict[str, dict[str, Any]] = {"slurm": {}}
if find_spec("terakoya_clusters"):
    SETTINGS |= {"pbs": {}, "grid_engine": {"pe": "hosts"}}
NODES = ("localhost", "127.0.0.1")


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Schedulers that run a script at once on the two nodes, as job N, of which no other job has the port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        number = probe.getsockname()[1] - 20000
    programs = Programs(tmp_path)
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{name} 1 q@{name} -\n" for name in NODES))
    job = f'JOB_ID={number} PBS_JOBID={number}.server PE_HOSTFILE={hosts} PBS_NODEFILE={hosts} bash "${{@: -1}}"'
    out = f"$(sed -n 's/^#SBATCH --output=//p' \"${{@: -1}}\" | sed 's/%j/{number}/')"
    facts = f"JobId={number} JobState=COMPLETED ExitCode=0:0 StdOut=/o Power="
    names = "\\n".join(NODES)
    programs.set(
        qsub=f"{job} > /dev/null; echo {number}",
        qstat="exit 0", qrsh='shift 3; exec "$@"', pbs_tmrsh='shift; exec "$@"',
        sbatch=f'SLURM_JOB_ID={number} SLURM_JOB_NODELIST=x bash "${{@: -1}}" > "{out}" 2>&1; echo {number}',
        srun='while [ "$1" != python ]; do shift; done; SLURM_NODEID=0 "$@" & SLURM_NODEID=1 "$@"; wait',
        scontrol=f'case "$2" in hostnames) printf "{names}\\n" ;; job) echo "{facts}" ;; esac', scancel="",
    )  # fmt: skip
    monkeypatch.setenv("PATH", programs.environment["PATH"])
    return programs


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.make_store(tmp_path_factory.mktemp("data") / "data", documents=20, seed=1)


def planned(launcher: str, store: Path, folder: Path, **settings: Any) -> PlannedLaunch:
    file = folder / "run.json"
    file.write_text(json.dumps(toy.parameters(store, batch_size={"0": 8, "1": 8})))
    given = {"time": "24:00:00", **SETTINGS[launcher], **settings}
    return plan_launch(launcher, file, folder / "run", settings=given)


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("launcher", at_night(SETTINGS, always=["slurm"]))
def test_equal_nodes_pass(launcher: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(launcher, store, tmp_path)
    plan.check()
    said = capsys.readouterr().out
    assert (
        "checks 2 nodes" in said
        and said.count("seen") == 2
        and "reached" in said
        and len(re.findall(r"[+-]0\.\d s", said)) == 2
    )
    assert not (tmp_path / "run").exists() and not list((plan.folder / "check").glob(".seen-*"))
    (script,) = (plan.folder / "check").glob("job.*")
    assert re.search(r"(time|h_rt|walltime)=00:10:00", script.read_text()) and "24:00:00" in "".join(
        plan.plan.files.values()
    )


@pytest.mark.parametrize(
    "launcher", at_night((differ := [name for name in SETTINGS if name != "pbs"]), always=differ[-1:])
)
def test_nodes_that_differ_are_named(launcher: str, programs: Programs, store: Path, tmp_path: Path) -> None:
    """The second node has another torch, another store, another clock, and does not see the plan's folder."""
    facts = tmp_path / "sitecustomize.py"
    facts.write_text(
        "import os\n"
        "if os.environ.get('GROUP_RANK', os.environ.get('SLURM_NODEID')) == '1':\n"
        "    from importlib import metadata\n"
        "    import time, pathlib, hashlib\n"
        "    clock, exists, version = time.time, pathlib.Path.exists, metadata.version\n"
        "    time.time = lambda: clock() + 60\n"
        "    metadata.version = lambda name: '1.0' if name == 'torch' else version(name)\n"
        "    pathlib.Path.exists = lambda path, **k: not path.name.startswith('.seen') and exists(path, **k)\n"
        "    read = pathlib.Path.read_bytes\n"
        "    pathlib.Path.read_bytes = lambda path: b'' if path.name == 'store.json' else read(path)\n"
    )
    plan = planned(launcher, store, tmp_path, setup=[f"export PYTHONPATH={tmp_path}:${{PYTHONPATH:-}}"])
    with pytest.raises(UserError) as raised:
        plan.check()
    host = socket.gethostname()
    said = str(raised.value)
    assert f"{host}: {plan.folder}/check is not the same folder as on this machine" in said
    assert f"{host}: has torch 1.0, {host} has " in said and f"{store} is another store than on {host}" in said
    assert re.search(r"its clock is (59|60) s ahead of", said)


def test_answers_of_nodes_that_write_at_the_same_time_may_share_a_line(tmp_path: Path) -> None:
    told = [json.dumps({"rank": rank, "host": f"a0{rank}", "offset": None}) for rank in range(3)]
    lines = [f"warning: late{told[1]}{told[0]}", told[2][:20], "the end"]
    one, two, three = job_checks._answers(lines, 3, tmp_path / "out")
    assert (one.host, two.host, one.error) == ("a00", "a01", None)
    assert three.error is not None and "gave no answer" in three.error and "the end" in three.error


@pytest.mark.usefixtures("programs")
def test_a_node_that_cannot_start_shows_its_output(store: Path, tmp_path: Path) -> None:
    plan = planned("slurm", store, tmp_path, setup=["echo 'module: no such module' >&2", "exit 7"])
    with pytest.raises(UserError, match=r"node 0: gave no answer; .*\.out ends with:\n +module: no such module"):
        plan.check()


def test_a_launcher_without_checks_says_so(store: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(toy.parameters(store)))
    with pytest.raises(UserError, match="launch local: has no checks"):
        plan_launch("local", file, tmp_path / "run").check()
