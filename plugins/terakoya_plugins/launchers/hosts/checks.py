"""Looking at hosts before anything starts on them: reached, alike, on one clock, one file system, one network."""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from terakoya.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

ANSWER_SECONDS = 60.0
"""How long a host has to answer; a first import from a cold network file system may take half of it."""
CLOCK_SECONDS = 5.0
"""How far clocks may be apart: logs of several hosts are read side by side, and file systems compare times."""

NO_FOLDER, NO_PYTHON = 91, 92
SCRIPT = """\
set -eo pipefail
cd {folder} || exit {no_folder}
export PATH={programs}:"$PATH"
{setup}
command -v python > /dev/null || exit {no_python}
exec python -m terakoya.launch.host_facts {request}"""


@dataclass(frozen=True)
class Asked:
    """What hosts are asked, and how.

    Attributes:
        names: the hosts as `ssh` knows them; those behind an @ are called by it from the others.
        processes: how many start on each.
        ssh: what stands before a host and a command.
        folder: where processes will start.
        seen: a folder of the run, to which a file is written that all hosts should see.
        reads: folders that all hosts should see, too.
        setup: lines of bash that run first.
        port: of the first host, which the others should reach.
        interface: the network interface to talk over; None is the one that leads to the others.
    """

    names: Sequence[str]
    processes: Sequence[int]
    ssh: str
    folder: Path
    seen: Path
    port: int
    reads: Sequence[Path] = ()
    setup: Sequence[str] = ()
    interface: str | None = None


@dataclass
class Answer:
    """What a host said: `facts`, as `host_facts.facts` has them, or None and `error`. `clock` is how many seconds its
    clock is ahead of the one here."""

    host: str
    facts: Mapping[str, Any] | None = None
    error: str | None = None
    clock: float = 0.0
    problems: list[str] = field(default_factory=list)


def look(asked: Asked) -> list[Answer]:
    """Asks all hosts and judges what they say: `problems` of each answer, empty where all is well."""
    proof = asked.seen / f".seen-{secrets.token_hex(4)}"
    proof.touch()
    paths = [str(path) for path in (proof, *asked.reads)]
    called = [address(name) for name in asked.names]
    first_asks = {"paths": paths, "names": called, "interface": asked.interface}
    try:
        if len(called) == 1:
            answers = [_ask(asked, 0, first_asks)]
        else:
            with _first_host(asked, {**first_asks, "peer": called[1]}, callers=len(called) - 1) as first:
                port_is_free = first.error is None and not first.problems
                others = {**first_asks, "peer": called[0], "call": [called[0], asked.port] if port_is_free else None}
                answers = [first, *_together(asked, others)]
    finally:
        proof.unlink()
    for answer, processes in zip(answers, asked.processes, strict=True):
        _judge(answer, answers[0], processes, asked, proof)
    return answers


def address(name: str) -> str:
    """What other hosts call the host that ssh knows as `name`."""
    return name.rpartition("@")[2]


def show(answers: Sequence[Answer], *, first: str, port: int) -> Table:
    """The table of what was found."""
    from rich.table import Table

    table = Table(
        "host", "python", "terakoya", "torch", "clock", "cores", "GPUs", "network", "files", f"{first}:{port}"
    )
    for answer in answers:
        facts = answer.facts
        if facts is None:
            table.add_row(answer.host, *["-"] * 9)
            continue
        versions = facts["versions"]
        network = f"{facts['interface']} {facts['address']}" if facts["interface"] else "-"
        files = "seen" if not facts["missing"] else "missing"
        reached = "free" if answer is answers[0] else "reached"
        if answer is answers[0] and len(answers) == 1:
            reached = "-"
        elif facts.get("port") is not None:
            reached = "taken"
        elif facts["call"] is not None:
            reached = "not reached"
        elif answer is not answers[0] and (answers[0].facts is None or answers[0].facts.get("port") is not None):
            reached = "-"
        table.add_row(
            answer.host, versions["python"], versions["terakoya"], versions["torch"],
            f"{answer.clock - answers[0].clock:+.1f} s", str(facts["cores"]), str(facts["gpus"]), network, files,
            reached,
        )  # fmt: skip
    return table


def refuse(answers: Sequence[Answer]) -> None:
    """Raises UserError with a line for each problem of a host."""
    lines = [f"{answer.host}: {problem}" for answer in answers for problem in answer.problems]
    if lines:
        raise UserError("\n".join(lines))


# --------------------------------------------------------------------------------------------------------- asking


def _command(asked: Asked, index: int, request: Mapping[str, Any]) -> list[str]:
    script = SCRIPT.format(
        folder=shlex.quote(str(asked.folder)),
        programs=shlex.quote(str(Path(sys.executable).parent)),
        setup="\n".join(asked.setup),
        request=shlex.quote(json.dumps(request)),
        no_folder=NO_FOLDER,
        no_python=NO_PYTHON,
    )
    remote = f"bash -c {shlex.quote(script)}"
    return ["bash", "-c", f"{asked.ssh} {asked.names[index]} {shlex.quote(remote)}"]


def _ask(asked: Asked, index: int, request: Mapping[str, Any]) -> Answer:
    answer = Answer(asked.names[index])
    try:
        done = subprocess.run(
            _command(asked, index, request), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        answer.error = f"no answer in {ANSWER_SECONDS:.0f} s; try: {asked.ssh} {answer.host} true"
        return answer
    _read(answer, asked, done.stdout, done.stderr, done.returncode)
    return answer


def _together(asked: Asked, request: Mapping[str, Any]) -> list[Answer]:
    """The answers of all hosts but the first, asked at once."""
    answers: dict[int, Answer] = {}

    def ask(index: int) -> None:
        answers[index] = _ask(asked, index, request)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(1, len(asked.names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in sorted(answers)]


@contextlib.contextmanager
def _first_host(asked: Asked, request: Mapping[str, Any], *, callers: int) -> Iterator[Answer]:
    """The first host's answer, while it listens on its port for `callers` others."""
    answer = Answer(asked.names[0])
    listen = {"port": asked.port, "callers": callers, "seconds": ANSWER_SECONDS}
    process = subprocess.Popen(
        _command(asked, 0, {**request, "listen": listen}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    overdue = threading.Timer(ANSWER_SECONDS, process.kill)
    overdue.start()
    try:
        said = _next_answer(process.stdout)
        here = time.time()
        port = _next_answer(process.stdout) if said else ""
        overdue.cancel()
        if port:
            _read(answer, asked, said, "", 0, here=here)
            assert answer.facts is not None
            answer.facts = {**answer.facts, **json.loads(port)}
            if answer.facts["port"] is not None:
                free = answer.facts["free_port"]
                choose = "choose another with --port" + (f": {free} is free" if free is not None else "")
                answer.problems.append(f"port {asked.port}: {answer.facts['port']}; {choose}")
        elif process.wait() < 0:
            answer.error = f"no answer in {ANSWER_SECONDS:.0f} s; try: {asked.ssh} {answer.host} true"
        else:
            _read(answer, asked, "", process.stderr.read(), process.returncode)
        yield answer
    finally:
        overdue.cancel()
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            _close(stream)


def _next_answer(lines: IO[str]) -> str:
    """The next line that is JSON, "" at the end: what the host's own start-up files print is passed over."""
    return next((line for line in lines if line.startswith("{")), "")


def _close(stream: IO[str]) -> None:
    with contextlib.suppress(OSError):
        stream.close()


def _read(answer: Answer, asked: Asked, said: str, errors: str, code: int, *, here: float | None = None) -> None:
    """Takes over what a host said: its last line is the JSON, what was printed before by its own files is not."""
    here = time.time() if here is None else here
    lines = said.strip().splitlines()
    if code == 0 and lines:
        try:
            answer.facts = json.loads(lines[-1])
        except json.JSONDecodeError:
            answer.error = f'expected an answer in JSON, got "{lines[-1][:80]}"'
            return
        answer.clock = answer.facts["clock"] - here
        return
    last = (errors.strip().splitlines() or lines or [f"exit code {code}"])[-1]
    if code == NO_FOLDER:
        answer.error = f"sees no folder {asked.folder}: all hosts need the file system that it is on"
    elif code == NO_PYTHON:
        answer.error = (
            "finds no python: install terakoya there at the same place, or give lines of --setup that find it"
        )
    elif "No module named" in last:
        answer.error = f"cannot start terakoya there ({last}): install the version that is here"
    elif code == 255:
        answer.error = (
            f"is not reached ({last}); `{asked.ssh} {answer.host} true` must work without a password, "
            "or run its script there by hand"
        )
    else:
        answer.error = f"exit code {code}: {last}"


# -------------------------------------------------------------------------------------------------------- judging


def _judge(answer: Answer, first: Answer, processes: int, asked: Asked, proof: Path) -> None:
    if answer.facts is None:
        answer.problems.append(str(answer.error))
        return
    facts = answer.facts
    if facts.get("interface_error") and not facts["unknown_names"]:
        answer.problems.append(f"{facts['interface_error']}; name the right one with --interface")
    if facts["unknown_names"]:
        names = ", ".join(facts["unknown_names"])
        answer.problems.append(f"does not know {names}: add to its /etc/hosts, or list the hosts by address")
    for path in facts["missing"]:
        if path == str(proof):
            answer.problems.append(f"{asked.seen} is not the folder that is here: all hosts need one file system")
        else:
            answer.problems.append(f"sees no {path}: all hosts need the file system that it is on")
    if facts["gpus"] and processes > facts["gpus"]:
        answer.problems.append(f"has {facts['gpus']} GPUs for {processes} processes; give each process one")
    if facts["call"] is not None:
        answer.problems.append(
            f"does not reach port {asked.port} of {first.host} ({facts['call']}); look at firewalls, and at what "
            f"`getent hosts {address(first.host)}` says there"
        )
    if first.facts is None or answer is first:
        return
    for package, version in facts["versions"].items():
        if version != first.facts["versions"][package]:
            answer.problems.append(
                f"has {package} {version}, {first.host} has {first.facts['versions'][package]}: install the same"
            )
    apart = answer.clock - first.clock
    if abs(apart) > CLOCK_SECONDS:
        answer.problems.append(
            f"its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of {first.host}: "
            "start a time service on both, such as chrony"
        )
