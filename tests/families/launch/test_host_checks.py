"""Hosts are checked before a run starts: facts are shown as a table, problems are reported with the host's name."""

import io
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from terakoya.errors import UserError
from terakoya_launch.host_checks import Answer, raise_on_problems, results_table
from terakoya_launch.host_facts import collect_facts, interface_to
from terakoya_launch.launchers.hosts.checks import HostRequest, check_hosts

HOST = """\
host=$1; shift
test "$host" = far && {{ echo "ssh: connect to host far: No route to host" >&2; exit 255; }}
AS_HOST=$host exec bash -c "$*"
"""
PYTHON = """\
#!/bin/bash
answer={folder}/$AS_HOST.json
if [ ! -e "$answer" ]; then exec {python} "$@"; fi
echo "welcome to $AS_HOST"
{python} - "$answer" << 'END'
import json, sys, time
facts = json.load(open(sys.argv[1]))
print(json.dumps({{**facts, "clock": time.time() + facts["ahead"]}}))
END
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a stand-in for ssh, and a stand-in for Python that prints the host's HOST.json."""
    (tmp_path / "ssh").write_text(HOST.format())
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python").write_text(PYTHON.format(folder=tmp_path, python=sys.executable))
    (programs / "python").chmod(0o755)
    return tmp_path


def request(place: Path, port: int, *names: str, **changes: Any) -> HostRequest:
    settings: dict[str, Any] = {
        "processes": [1] * len(names), "ssh": f"bash {place}/ssh", "folder": place, "shared": place, "port": port,
        "setup": [f"export PATH={place}/programs:$PATH"],
    }  # fmt: skip
    return HostRequest(names, **{**settings, **changes})


def pretend(place: Path, host: str, **changes: Any) -> None:
    """Makes `host` answer as this machine does, except for `changes`."""
    facts = {**collect_facts(), "interface": "eth0", "address": "10.0.0.9", "ahead": 0.0, **changes}
    (place / f"{host}.json").write_text(json.dumps(facts))


def problems(answers: list[Answer]) -> list[str]:
    with pytest.raises(UserError) as error:
        raise_on_problems(answers)
    return str(error.value).splitlines()


def table_text(answers: list[Answer], port: int) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(results_table(answers, f"{answers[0].host}:{port}"))
    return text.getvalue()


def test_equal_hosts_pass(place: Path, port: int) -> None:
    answers = check_hosts(request(place, port, "localhost", "me@127.0.0.1", data_folders=[place / "programs"]))
    raise_on_problems(answers)
    assert [answer.facts and answer.facts["interface"] for answer in answers] == ["lo", "lo"]
    table = table_text(answers, port)
    assert "me@127.0.0.1" in table and "free" in table and "reached" in table and "seen" in table
    assert not list(place.glob(".seen-*")), "the file that hosts looked for is removed"


def test_a_single_host_makes_no_call(place: Path, port: int) -> None:
    answers = check_hosts(request(place, port, "localhost"))
    raise_on_problems(answers)
    assert answers[0].facts is not None and answers[0].facts["call"] is None


def test_differences_are_reported_with_host_and_remedy(place: Path, port: int) -> None:
    versions = collect_facts()["versions"]
    pretend(place, "old", versions={**versions, "torch": "2.0.0"})
    pretend(place, "early", ahead=-40.0)
    pretend(place, "apart", missing=["/store"], unknown_names=["localhost"], call="Connection refused")
    pretend(place, "small", gpus=2)
    answers = check_hosts(
        request(place, port, "localhost", "old", "early", "apart", "small", "far", processes=[1] * 4 + [4, 1])
    )
    early = answers[2].clock - answers[0].clock
    assert -45 < early < -39  # an answer takes a moment
    assert problems(answers) == [
        "localhost: cannot resolve old, early, apart, small, far: add to its /etc/hosts, or list the hosts by address",
        f"old: has torch 2.0.0, localhost has {versions['torch']}: install the same",
        f"early: its clock is {-early:.0f} s behind that of localhost: start a time service on both, such as chrony",
        "apart: cannot resolve localhost: add to its /etc/hosts, or list the hosts by address",
        "apart: has no /store: all hosts must mount the file system that it is on",
        f"apart: cannot reach port {port} of localhost (Connection refused); check firewalls, and the output of "
        "`getent hosts localhost` there",
        "small: has 2 GPUs for 4 processes; give each process one",
        f"far: cannot be reached (ssh: connect to host far: No route to host); `bash {place}/ssh far true` must work "
        "without a password, or run its script there by hand",
    ]
    table = table_text(answers, port)
    assert f"{early:+.1f} s" in table and "not reached" in table and "missing" in table


def test_an_unreachable_first_host_is_reported_and_the_others_are_checked(place: Path, port: int) -> None:
    answers = check_hosts(request(place, port, "far", "localhost"))
    assert [line.partition(":")[0] for line in problems(answers)] == ["far", "localhost"]  # it cannot resolve "far"
    assert "not reached" not in table_text(answers, port)


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_for_a_port_in_use_a_free_one_is_suggested(place: Path, used_port: int) -> None:
    lines = problems(check_hosts(request(place, used_port, "localhost", "127.0.0.1")))
    assert len(lines) == 1 and lines[0].startswith(
        f"localhost: port {used_port}: Address already in use; choose another"
    )
    free = int(lines[0].rpartition(": ")[2].removesuffix(" is free"))
    with socket.socket() as probe:
        probe.bind(("", free))


def test_missing_folders_and_programs(place: Path, port: int) -> None:
    lines = problems(check_hosts(request(place, port, "localhost", data_folders=[place / "store"])))
    assert lines == [f"localhost: has no {place}/store: all hosts must mount the file system that it is on"]
    lines = problems(check_hosts(request(place, port, "localhost", folder=place / "nowhere")))
    assert lines == [f"localhost: has no folder {place}/nowhere: all hosts must mount the file system that it is on"]
    lines = problems(check_hosts(request(place, port, "localhost", setup=["export PATH=/none"])))
    assert lines[0].startswith("localhost: finds no python: install terakoya there")
    lines = problems(check_hosts(request(place, port, "localhost", setup=["modules load cuda"])))
    assert lines == ["localhost: exit code 127: bash: line 4: modules: command not found"]


def test_an_interface_that_does_not_exist(place: Path, port: int) -> None:
    lines = problems(check_hosts(request(place, port, "localhost", "127.0.0.1", interface="eth7")))
    assert len(lines) == 2
    assert all("there is no interface eth7; it has " in line and "--interface" in line for line in lines)


def test_the_interface_with_the_route_to_a_host() -> None:
    assert interface_to("127.0.0.1") == ("lo", "127.0.0.1")
    with pytest.raises(OSError):
        interface_to("no-such-host.invalid")
