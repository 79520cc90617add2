"""Workers of pytest-xdist fork from one server, which ends with pytest's own process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest
import toy

HELPERS = Path(__file__).parent / "helpers"
OWNER = """
import fork_server, json, time
from multiprocessing import forkserver
print(json.dumps([*fork_server.share(("marker",)), forkserver._forkserver._forkserver_pid]), flush=True)
time.sleep(60)
"""
USER = """
import fork_server, json, multiprocessing, os, sys
address, wanted, server = json.loads(sys.argv[1])
fork_server.use(address, wanted)
def check(folder):
    assert "marker" in sys.modules and os.getppid() == server and "FORK_SERVER_WANTED" not in os.environ
    assert os.getcwd() == folder and os.readlink("/proc/self/fd/1") == os.devnull
if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=check, args=(os.getcwd(),))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("used", [False, True])
def test_processes_share_a_server_that_ends_with_its_parent(used: bool, tmp_path: Path) -> None:
    (tmp_path / "marker.py").touch()
    user = tmp_path / "user.py"
    user.write_text(USER)
    environment = {**os.environ, "PYTHONPATH": f"{HELPERS}:{tmp_path}"}
    owner = subprocess.Popen([sys.executable, "-c", OWNER], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        shared = owner.stdout.readline()
        server = int(shared.rstrip("]\n").split()[-1])
        if used:
            users = [subprocess.Popen([sys.executable, user, shared], env=environment, cwd=HELPERS) for _ in range(2)]
            assert [each.wait(30) for each in users] == [0, 0]
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate()
    deadline = time.monotonic() + 20
    while is_running(server):
        assert time.monotonic() < deadline, "the server outlives its parent"
        time.sleep(0.02)


def is_running(process: int) -> bool:
    """A process that has ended may remain as a zombie where nothing waits for orphans."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def write_parents(out: Path) -> None:
    """Writes the id of this process's parent, and of the parent's parent."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    out.write_text(f"{os.getppid()} {stat.rpartition(')')[2].split()[1]}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_forks_from_the_server_of_pytest_itself(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    toy.fork(write_parents, tmp_path / "parents").join(60)
    _, starter = (tmp_path / "parents").read_text().split()
    is_worker = hasattr(request.config, "workerinput")
    assert int(starter) == (os.getppid() if is_worker else os.getpid())


def test_the_environment_is_as_before_when_the_server_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(fork_server.forkserver, "ensure_running", lambda: seen.update(os.environ))
    monkeypatch.setenv("KEPT", "before")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = dict(os.environ)
    fork_server.start(KEPT="the server's", NEW="the server's")
    assert seen["KEPT"] == seen["NEW"] == "the server's" and seen["PYTHONPATH"]
    assert dict(os.environ) == before
