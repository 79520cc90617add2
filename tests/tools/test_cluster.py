"""`terakoya launch hosts` on three hosts of tools/cluster, with killed processes, disconnected cables and lost hosts.

Needs root and permission to create namespaces, and is skipped otherwise. tools/cluster/README.md has the observations.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import toy
import warm_python
from selection import at_night

logger = logging.getLogger("terakoya.tests")

CLUSTER = Path(__file__).parents[2] / "tools/cluster/cluster.sh"
HOSTS = ("a01", "a02", "a03")
TABLE = {"a01": 7, "a02": 5, "a03": 4}
STEPS = 40
SILENCE = 10
"""`parallel.timeout_seconds`: seconds after which processes give up silent ones."""
NOTICE = 10.0 + 30.0
"""Further seconds until the last of them has printed its error: a rank that sends no heartbeats is named after 6 and
rank 0 leaves when the others have heard of it, within 10 on an idle machine; 30 more are for a busy one."""
SLOW = """\
import time
from terakoya import hookimpl

@hookimpl
def step_finished(run, report):
    time.sleep(0.1 if run.world_size == 3 else 2)  # so that a lost host comes back in time
"""


def missing_requirement() -> str | None:
    """Returns why this machine cannot run the hosts, or None if it can."""
    if os.geteuid() != 0:
        return "needs root"
    for program in ("ip", "unshare", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    command = [
        "unshare",
        "--mount",
        "--net",
        "--uts",
        "--pid",
        "--fork",
        "ip",
        "link",
        "add",
        "switch",
        "type",
        "bridge",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else f"this kernel creates no namespaces with a bridge: {done.stderr.strip()}"


REASON = missing_requirement()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=f"no hosts on this machine: {REASON}"),
    pytest.mark.timeout(900),  # a busy machine; each wait has a limit of its own
]


class Cluster:
    """Running hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ssh = str(folder / "enter")

    def warm_python(self) -> contextlib.AbstractContextManager[Path]:
        """A stand-in for `python` on the hosts, see helpers/warm_python.py."""
        return warm_python.running_on({host: int((self.folder / f"{host}.pid").read_text()) for host in HOSTS})

    def on(self, host: str, command: str) -> subprocess.CompletedProcess[str]:
        """Runs `command` on `host` and waits for it."""
        return subprocess.run([self.ssh, host, command], capture_output=True, text=True, timeout=120)

    def link(self, host: str, state: str) -> None:
        """Sets the cable of `host` to `down` or `up`."""
        subprocess.run([self.folder / "link", host, state], check=True)


@contextlib.contextmanager
def hosts_up(folder: Path) -> Iterator[Cluster]:
    """Runs the hosts; all their processes end with the block."""
    process = subprocess.Popen(
        [CLUSTER, folder, str(len(HOSTS)), "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        deadline = time.monotonic() + 30
        while not (folder / "ready").exists():
            assert process.poll() is None, process.stdout.read().decode()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield Cluster(folder)
    finally:
        process.stdin.close()  # cat ends, and all hosts with it
        code = process.wait(timeout=30)
        output = process.stdout.read().decode()
        process.stdout.close()
    assert code == 0, output


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with hosts_up(tmp_path_factory.mktemp("cluster") / "hosts") as hosts:
        yield hosts


def settings_of(store: Path, **changes: Any) -> dict[str, Any]:
    """A toy run on the hosts, without dropout, whose random numbers depend on the rank."""
    parameters = toy.parameters(store)
    return {
        **parameters, "architecture": toy.without_dropout(parameters["architecture"]), "batch_size": TABLE,
        "micro_batch_size": None, "max_steps": STEPS, "parallel": {"engine": "ddp", "timeout_seconds": SILENCE},
        **changes,
    }  # fmt: skip


class HostsLaunch:
    """A running `terakoya launch hosts`: its output, with the time of each line."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Mapping[str, Any],
        out: Path,
        *arguments: str,
        plugin: Path | None = None,
        hosts: Sequence[str] = HOSTS,
        ssh: str | None = None,
        at: str | None = None,
        python: Path | None = None,
        forks: Path | str = sys.executable,
    ) -> None:
        """Starts it, here and on hosts, by `forks`, and training processes by `python`; both by default by this one."""
        self.out = out
        file = out.parent / f"{out.name}.json"
        file.write_text(json.dumps(settings))
        global_options = ["--plugin", str(plugin)] if plugin is not None else []
        login = ["export OMP_NUM_THREADS=1", f"export PYTHONPATH={os.environ.get('PYTHONPATH', '')}"]
        if python is not None:
            login.append(f"export PYTHON_EXEC={python}")  # torchrun's variable
        launcher = {"hosts": ",".join(hosts), "ssh": ssh or cluster.ssh, "setup": login}
        launcher_file = out.parent / f"{out.name}.hosts.json"
        launcher_file.write_text(json.dumps(launcher))
        command = [
            str(forks), "-m", "terakoya", *global_options, "launch", "hosts", str(file), "--out", str(out),
            "--settings", str(launcher_file), *arguments,
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command if at is None else [cluster.ssh, at, " ".join(command)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.lines.append((time.monotonic(), line.rstrip()))

    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def finish(self, *, code: int = 0, seconds: float = 300.0) -> str:
        """Waits for the end; returns what was printed."""
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"still running after {seconds} s:\n{self.text()}")
        self._reader.join(timeout=10)
        assert self.process.returncode == code, self.text()
        return self.text()

    def until(self, condition: Callable[[], bool], *, seconds: float = 200.0) -> None:
        """Waits until `condition` is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def until_step(self, step: int) -> None:
        self.until(lambda: (self.out / "metrics.jsonl").exists() and max(toy.records(self.out), default=0) >= step)

    def until_noticed(self, hosts: Sequence[str], since: float, *, seconds: float) -> None:
        """Waits up to `seconds` until processes of all `hosts` have printed which one is lost, after `since`."""
        errors: dict[str, tuple[float, str]] = {}

        def noticed() -> bool:
            for moment, line in list(self.lines):
                host = line[1:4]
                if moment > since and host in hosts and "error: " in line:
                    errors.setdefault(host, (moment - since, line.rpartition("] ")[2]))
            return len(errors) == len(hosts)

        self.until(noticed, seconds=seconds)
        for host, (after, words) in sorted(errors.items()):
            logger.info("%s noticed after %.2f s: %s", host, after, words)


@pytest.fixture(scope="module")
def undisturbed(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on the three hosts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with hosts_up(folder / "hosts") as cluster, cluster.warm_python() as python:
        HostsLaunch(cluster, settings_of(store), folder / "run", "--submit", python=python, forks=python).finish()
    return folder / "run"


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A plugin that makes steps long enough to disturb the run between them."""
    file = tmp_path / "slow.py"
    file.write_text(SLOW)
    return file


def test_check_prints_the_hosts_and_starts_nothing(cluster: Cluster, store: Path, tmp_path: Path) -> None:
    with cluster.warm_python() as python:
        output = HostsLaunch(cluster, settings_of(store), tmp_path / "run", "--check", forks=python).finish()
    for number, host in enumerate(HOSTS, 1):
        row = next(line for line in output.splitlines() if line.strip(" │┃").startswith(f"{host} "))
        assert f"eth0 10.77.0.{number}" in row and "seen" in row and ("free" if number == 1 else "reached") in row
    assert not (tmp_path / "run").exists()


def test_rows_by_host_name_train_as_one_process(undisturbed: Path, store: Path, tmp_path: Path) -> None:
    world = next(iter(toy.records(undisturbed, "start").values()))["world"]
    assert world["nodes"] == {"0": 1, "1": 1, "2": 1}
    toy.train(settings_of(store, batch_size={"-1": 16}), tmp_path / "alone")
    ours, alone = toy.losses(undisturbed), toy.losses(tmp_path / "alone")
    for step, (loss, norm) in alone.items():
        assert ours[step] == pytest.approx((loss, norm), rel=1e-6 if step == 1 else 1e-5), step


@pytest.mark.nightly
@pytest.mark.parametrize(
    "engine",
    [*({"engine": "deepspeed", "zero_stage": stage} for stage in range(4)), {"engine": "fsdp"}],
    ids=["zero-0", "zero-1", "zero-2", "zero-3", "fsdp"],
)
def test_every_engine_trains_over_hosts_as_one_process(
    engine: dict[str, Any], cluster: Cluster, store: Path, tmp_path: Path
) -> None:
    if engine["engine"] == "deepspeed":
        pytest.importorskip("deepspeed")
    settings = settings_of(store, parallel={**engine, "timeout_seconds": 120}, max_steps=10)
    HostsLaunch(cluster, settings, tmp_path / "run", "--submit").finish()
    toy.train({**settings, "batch_size": {"-1": 16}, "parallel": {"engine": "ddp"}}, tmp_path / "alone")
    ours = toy.losses(tmp_path / "run")
    for step, (loss, norm) in toy.losses(tmp_path / "alone").items():
        assert ours[step] == pytest.approx((loss, norm), rel=1e-6 if step == 1 else 1e-5), step


@pytest.mark.parametrize("cable", at_night([False, True], always=[False]), ids=["alone", "and a cable"])
def test_a_killed_process_and_a_disconnected_cable_change_no_loss(
    cable: bool, cluster: Cluster, store: Path, undisturbed: Path, slow: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    arguments = ("--max-restarts", "3", "--submit")
    with cluster.warm_python() as python:
        run = HostsLaunch(cluster, settings_of(store), out, *arguments, plugin=slow, python=python)
        run.until_step(8)
        killed = time.monotonic()
        done = cluster.on("a03", f"kill -9 $(pgrep -P $(cat {out}.launch/node-2.pid))")
        assert done.returncode == 0, done.stderr
        run.until_noticed(HOSTS[:2], killed, seconds=NOTICE)
        run.until(lambda: bool(toy.records(out, "resume")))
        first = max(toy.records(out, "resume"))
        assert first >= 5

        if cable:
            run.until_step(first + 12)
            cluster.link("a02", "down")
            run.until_noticed(HOSTS, time.monotonic(), seconds=SILENCE + NOTICE)
            cluster.link("a02", "up")
            run.until(lambda: max(toy.records(out, "resume")) > first)
        run.finish()
    assert toy.losses(out) == toy.losses(undisturbed)


@pytest.mark.nightly
def test_without_restarts_a_disconnected_cable_ends_the_run_and_the_same_command_resumes(
    cluster: Cluster, store: Path, undisturbed: Path, slow: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run = HostsLaunch(cluster, settings_of(store), out, "--submit", plugin=slow)
    run.until_step(8)
    cluster.link("a03", "down")
    run.until_noticed(HOSTS, time.monotonic(), seconds=SILENCE + NOTICE)
    cluster.link("a03", "up")
    run.finish(code=76)
    HostsLaunch(cluster, settings_of(store), out, "--submit", plugin=slow).finish()
    assert toy.losses(out) == toy.losses(undisturbed)


@pytest.mark.nightly
def test_the_batch_of_a_lost_host_is_redistributed_and_the_host_may_come_back(
    cluster: Cluster, store: Path, undisturbed: Path, slow: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    settings = settings_of(store, on_lost_node="redistribute", max_steps=STEPS)
    run = HostsLaunch(cluster, settings, out, "--submit", plugin=slow)
    run.until_step(8)
    cluster.on("a03", f"kill -9 $(cat {out}.launch/node-2.pid) $(pgrep -P $(cat {out}.launch/node-2.pid))")
    run.until(lambda: worlds(out)[-1] == ["0", "1"], seconds=180)
    assert any("a03 ended with exit code" in line for _, line in run.lines)
    assert any('they share the global batch of 16: {"a01": 9, "a02": 7}' in line for _, line in run.lines)
    resumed = max(toy.records(out, "resume"))
    run.until_step(resumed + 2)

    back = subprocess.Popen([cluster.ssh, "a03", f"bash {out}.launch/node-2.sh"], stdout=subprocess.DEVNULL)
    run.until(lambda: worlds(out)[-1] == ["0", "1", "2"], seconds=180)
    run.finish()
    assert back.wait(timeout=60) == 0
    for step, (loss, norm) in toy.losses(undisturbed).items():
        assert toy.losses(out)[step] == pytest.approx((loss, norm), rel=1e-5), step


@pytest.mark.nightly
def test_the_first_host_may_be_lost_where_hosts_rendezvous_elsewhere(
    cluster: Cluster, store: Path, slow: Path, tmp_path: Path
) -> None:
    """a03 has the rendezvous and trains nothing; a01, the first host, is killed, and comes back."""
    slow.write_text(SLOW.replace("world_size == 3", "world_size == 2"))
    out = tmp_path / "run"
    settings = settings_of(store, on_lost_node="redistribute", batch_size={"a01": 9, "a02": 7})
    words = ("--rendezvous", "a03:29400", "--submit")
    refused = HostsLaunch(cluster, settings, out, *words, hosts=HOSTS[:2]).finish(code=2)
    assert "cannot reach the rendezvous a03:29400" in " ".join(refused.split())
    command = (
        f"PYTHONPATH={os.environ.get('PYTHONPATH', '')} {sys.executable} -m terakoya_launch.rendezvous_store 29400"
    )
    meeting = subprocess.Popen([cluster.ssh, "a03", command], stdout=subprocess.PIPE, text=True)
    assert meeting.stdout is not None and "find each other on port 29400" in meeting.stdout.readline()
    with meeting.stdout:
        run = HostsLaunch(cluster, settings, out, *words, plugin=slow, hosts=HOSTS[:2])
        run.until_step(8)
        cluster.on("a01", f"kill -9 $(cat {out}.launch/node-0.pid) $(pgrep -P $(cat {out}.launch/node-0.pid))")
        run.until(lambda: worlds(out)[-1] == ["1"], seconds=180)
        assert any('they share the global batch of 16: {"a02": 16}' in line for _, line in run.lines), run.text()
        resumed = max(toy.records(out, "resume"))
        run.until_step(resumed + 2)
        back = subprocess.Popen([cluster.ssh, "a01", f"bash {out}.launch/node-0.sh"], stdout=subprocess.DEVNULL)
        run.until(lambda: worlds(out)[-1] == ["0", "1"], seconds=180)
        run.finish()
        assert back.wait(timeout=60) == 0
        meeting.terminate()
        meeting.wait(timeout=30)
    toy.train({**settings, "batch_size": {"-1": 16}, "on_lost_node": "stop"}, tmp_path / "alone")
    ours = toy.losses(out)
    for step, (loss, norm) in toy.losses(tmp_path / "alone").items():
        assert ours[step] == pytest.approx((loss, norm), rel=1e-6 if step == 1 else 1e-5), step


def worlds(out: Path) -> list[list[str]]:
    """Returns the node ranks of each start of a run."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [list(line["world"]["nodes"]) for line in lines if line["kind"] == "start"]


# ------------------------------------------------------------------------------------------------------------- sshd


@pytest.fixture
def ssh_config(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Starts sshd on every host; returns a configuration of ssh that reaches them with its own key."""
    server = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("openssh-server is not installed")
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    (folder / "sshd_config").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\nUsePAM no\nStrictModes no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\n"
    )
    config = folder / "ssh_config"
    config.write_text(
        f"Host a*\n  User root\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n  BatchMode yes\n"
        f"  StrictHostKeyChecking accept-new\n  UserKnownHostsFile {folder}/known_hosts\n  LogLevel ERROR\n"
    )
    for host in HOSTS:  # /run/sshd must exist, but only inside the hosts
        started = cluster.on(
            host, f"mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && {server} -f {folder}/sshd_config"
        )
        assert started.returncode == 0, started.stderr
    return config


@pytest.mark.nightly
def test_hosts_are_reached_by_ssh(cluster: Cluster, store: Path, ssh_config: Path, tmp_path: Path) -> None:
    ssh = f"ssh -F {ssh_config}"
    output = HostsLaunch(cluster, settings_of(store), tmp_path / "run", "--check", ssh=ssh, at="desk").finish()
    assert len(re.findall(r"eth0 10\.77\.0\.[123]", output)) == 3

    refused = HostsLaunch(
        cluster, settings_of(store), tmp_path / "run", "--check", ssh=ssh, at="desk", hosts=("a01", "a02", "a9")
    ).finish(code=2)  # fmt: skip
    assert "a9" in refused


@pytest.mark.nightly
def test_a_run_over_ssh_is_stopped_resumes_and_loses_a_process(
    cluster: Cluster, store: Path, undisturbed: Path, ssh_config: Path, slow: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"

    def launch() -> HostsLaunch:
        ssh = f"ssh -F {ssh_config}"
        arguments = ("--max-restarts", "1", "--submit")
        return HostsLaunch(cluster, settings_of(store), out, *arguments, ssh=ssh, at="desk", plugin=slow)

    first = launch()
    first.until_step(8)
    first.process.send_signal(signal.SIGINT)
    assert "sending a stop request to all hosts" in first.finish(code=75)
    for host in HOSTS:
        assert cluster.on(host, "pgrep -f terakoya").returncode == 1, f"processes still run on {host}"
    stopped = max(toy.records(out, "stopped"))

    second = launch()
    second.until_step(stopped + 8)
    assert cluster.on("a03", f"kill -9 $(pgrep -P $(cat {out}.launch/node-2.pid))").returncode == 0
    second.finish()
    first_resume, second_resume = sorted(toy.records(out, "resume"))
    assert first_resume == stopped < second_resume
    assert toy.losses(out) == toy.losses(undisturbed)
