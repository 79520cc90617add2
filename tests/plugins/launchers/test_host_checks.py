"""Hosts are looked at before anything starts: what is found is shown, what is wrong is said with the host's name."""

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
from terakoya.launch.host_facts import collect_facts, interface_to
from terakoya_plugins.launchers.hosts.checks import Answer, Asked, look, refuse, show

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
found = json.load(open(sys.argv[1]))
print(json.dumps({{**found, "clock": time.time() + found["ahead"]}}))
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
    """A folder with a stand-in for ssh, and a stand-in for Python that says what ANSWER.json of a host holds."""
    (tmp_path / "ssh").write_text(HOST.format())
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "python").write_text(PYTHON.format(folder=tmp_path, python=sys.executable))
    (programs / "python").chmod(0o755)
    return tmp_path


def asked(place: Path, port: int, *names: str, **changes: Any) -> Asked:
    settings: dict[str, Any] = {
        "processes": [1] * len(names), "ssh": f"bash {place}/ssh", "folder": place, "seen": place, "port": port,
        "setup": [f"export PATH={place}/programs:$PATH"],
    }  # fmt: skip
    return Asked(names, **{**settings, **changes})


def pretend(place: Path, host: str, **changes: Any) -> None:
    """Lets `host` answer as this machine does, but for `changes`."""
    found = {**collect_facts(), "interface": "eth0", "address": "10.0.0.9", "ahead": 0.0, **changes}
    (place / f"{host}.json").write_text(json.dumps(found))


def problems(answers: list[Answer]) -> list[str]:
    with pytest.raises(UserError) as refused:
        refuse(answers)
    return str(refused.value).splitlines()


def shown(answers: list[Answer], port: int) -> str:
    text = io.StringIO()
    Console(file=text, width=200).print(show(answers, first=answers[0].host, port=port))
    return text.getvalue()


def test_hosts_that_are_alike_pass(place: Path, port: int) -> None:
    answers = look(asked(place, port, "localhost", "me@127.0.0.1", reads=[place / "programs"]))
    refuse(answers)
    assert [answer.facts and answer.facts["interface"] for answer in answers] == ["lo", "lo"]
    table = shown(answers, port)
    assert "me@127.0.0.1" in table and "free" in table and "reached" in table and "seen" in table
    assert not list(place.glob(".seen-*")), "what was written to be seen is gone"


def test_one_host_has_nobody_to_call(place: Path, port: int) -> None:
    answers = look(asked(place, port, "localhost"))
    refuse(answers)
    assert answers[0].facts is not None and answers[0].facts["call"] is None


def test_what_differs_is_said_with_host_and_remedy(place: Path, port: int) -> None:
    here = collect_facts()["versions"]
    pretend(place, "old", versions={**here, "torch": "2.0.0"})
    pretend(place, "early", ahead=-40.0)
    pretend(place, "apart", missing=["/store"], unknown_names=["localhost"], call="Connection refused")
    pretend(place, "small", gpus=2)
    answers = look(asked(place, port, "localhost", "old", "early", "apart", "small", "far", processes=[1] * 4 + [4, 1]))
    early = answers[2].clock - answers[0].clock
    assert -45 < early < -39  # an answer takes a moment
    assert problems(answers) == [
        "localhost: does not know old, early, apart, small, far: add to its /etc/hosts, or list the hosts by address",
        f"old: has torch 2.0.0, localhost has {here['torch']}: install the same",
        f"early: its clock is {-early:.0f} s behind that of localhost: start a time service on both, such as chrony",
        "apart: does not know localhost: add to its /etc/hosts, or list the hosts by address",
        "apart: sees no /store: all hosts need the file system that it is on",
        f"apart: does not reach port {port} of localhost (Connection refused); look at firewalls, and at what "
        "`getent hosts localhost` says there",
        "small: has 2 GPUs for 4 processes; give each process one",
        f"far: is not reached (ssh: connect to host far: No route to host); `bash {place}/ssh far true` must work "
        "without a password, or run its script there by hand",
    ]
    table = shown(answers, port)
    assert f"{early:+.1f} s" in table and "not reached" in table and "missing" in table


def test_a_first_host_that_is_not_reached_is_said_and_the_others_are_asked(place: Path, port: int) -> None:
    answers = look(asked(place, port, "far", "localhost"))
    assert [line.partition(":")[0] for line in problems(answers)] == ["far", "localhost"]  # it knows no host "far"
    assert "not reached" not in shown(answers, port)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_port_in_use_is_answered_with_a_free_one(place: Path, taken: int) -> None:
    said = problems(look(asked(place, taken, "localhost", "127.0.0.1")))
    assert len(said) == 1 and said[0].startswith(f"localhost: port {taken}: Address already in use; choose another")
    free = int(said[0].rpartition(": ")[2].removesuffix(" is free"))
    with socket.socket() as probe:
        probe.bind(("", free))


def test_folders_and_programs_that_are_not_there(place: Path, port: int) -> None:
    said = problems(look(asked(place, port, "localhost", reads=[place / "store"])))
    assert said == [f"localhost: sees no {place}/store: all hosts need the file system that it is on"]
    said = problems(look(asked(place, port, "localhost", folder=place / "nowhere")))
    assert said == [f"localhost: sees no folder {place}/nowhere: all hosts need the file system that it is on"]
    said = problems(look(asked(place, port, "localhost", setup=["export PATH=/none"])))
    assert said[0].startswith("localhost: finds no python: install terakoya there")
    said = problems(look(asked(place, port, "localhost", setup=["modules load cuda"])))
    assert said == ["localhost: exit code 127: bash: line 4: modules: command not found"]


def test_an_interface_that_is_none(place: Path, port: int) -> None:
    said = problems(look(asked(place, port, "localhost", "127.0.0.1", interface="eth7")))
    assert len(said) == 2
    assert all("there is no interface eth7; it has " in line and "--interface" in line for line in said)


def test_the_interface_that_leads_to_a_host() -> None:
    assert interface_to("127.0.0.1") == ("lo", "127.0.0.1")
    with pytest.raises(OSError):
        interface_to("no-such-host.invalid")
