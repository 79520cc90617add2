"""Checks hosts before a run starts there: reachable, same versions, clocks in sync, shared files, one network."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from terakoya_launch.host_checks import Answer, address, find_problems

ANSWER_SECONDS = 60.0
"""Timeout of a host's answer; a first import from a cold network file system may take half of it."""

NO_FOLDER, NO_PYTHON = 91, 92
SCRIPT = """\
set -eo pipefail
{enter}
export PATH={programs}:"$PATH"
{setup}
command -v python > /dev/null || exit {no_python}
exec python -m terakoya_launch.host_facts {request}"""


@dataclass(frozen=True)
class HostRequest:
    """The hosts to check, and what to check.

    Attributes:
        names: the hosts as `ssh` knows them; other hosts use the name after the @.
        processes: number of processes on each host.
        ssh: the command before a host and a command.
        folder: the folder where processes will start.
        shared: a folder that all hosts should share, to which a file is written; None if there is none.
        data_folders: further folders that all hosts should see.
        setup: lines of bash that run first.
        port: the port of the first host that the others should reach.
        interface: the network interface to use; None for the one with the route to the others.
        rendezvous: the host and port that all should reach, where that is not `port` of the first host.
    """

    names: Sequence[str]
    processes: Sequence[int]
    ssh: str
    folder: Path
    shared: Path | None
    port: int
    data_folders: Sequence[Path] = ()
    setup: Sequence[str] = ()
    interface: str | None = None
    rendezvous: str | None = None


def check_hosts(request: HostRequest) -> list[Answer]:
    """Collects the facts of all hosts and sets the `problems` of each answer, empty if there are none."""
    shared = request.shared
    proof = shared / f".seen-{secrets.token_hex(4)}" if shared is not None else None
    if proof is not None:
        proof.touch()
    paths = [str(path) for path in (*([] if proof is None else [proof]), *request.data_folders)]
    addresses = [address(name) for name in request.names]
    query = {"paths": paths, "names": addresses, "interface": request.interface}
    try:
        if request.rendezvous is not None:
            answers = _query_all(request, query, addresses)
        elif len(addresses) == 1:
            answers = [_query(request, 0, query)]
        else:
            with _query_first(request, {**query, "peer": addresses[1]}, callers=len(addresses) - 1) as first:
                port_is_free = first.error is None and not first.problems
                call = [addresses[0], request.port] if port_is_free else None
                answers = [first, *_query_others(request, {**query, "peer": addresses[0], "call": call})]
    finally:
        if proof is not None:
            proof.unlink()
    for answer, processes in zip(answers, request.processes, strict=True):
        port = request.port if request.rendezvous is None else None
        find_problems(answer, answers[0], processes, shared=shared, proof=proof, port=port)
    return answers


# --------------------------------------------------------------------------------------------------------- queries


def _command(request: HostRequest, index: int, query: Mapping[str, Any]) -> list[str]:
    folder = shlex.quote(str(request.folder))
    script = SCRIPT.format(
        enter=f"cd {folder} || exit {NO_FOLDER}" if request.shared is not None else f"mkdir -p {folder}; cd {folder}",
        programs=shlex.quote(str(Path(sys.executable).parent)),
        setup="\n".join(request.setup),
        request=shlex.quote(json.dumps(query)),
        no_python=NO_PYTHON,
    )
    remote = f"bash -c {shlex.quote(script)}"
    return ["bash", "-c", f"{request.ssh} {request.names[index]} {shlex.quote(remote)}"]


def _query(request: HostRequest, index: int, query: Mapping[str, Any]) -> Answer:
    answer = Answer(request.names[index])
    try:
        result = subprocess.run(
            _command(request, index, query), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=ANSWER_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        answer.error = f"no answer in {ANSWER_SECONDS:.0f} s; try: {request.ssh} {answer.host} true"
        return answer
    _read(answer, request, result.stdout, result.stderr, result.returncode)
    return answer


def _query_all(request: HostRequest, query: Mapping[str, Any], addresses: Sequence[str]) -> list[Answer]:
    """Returns the answers of all hosts, each of which calls the rendezvous."""
    assert request.rendezvous is not None
    host, _, port = request.rendezvous.rpartition(":")
    peer = None if len(addresses) == 1 else addresses[1]
    first = _query(request, 0, {**query, "peer": peer, "call": [host, int(port)]})
    answers = [first, *_query_others(request, {**query, "peer": addresses[0], "call": [host, int(port)]})]
    for answer in answers:
        if answer.facts is not None and answer.facts["call"] is not None:
            answer.problems.append(
                f"cannot reach the rendezvous {request.rendezvous} ({answer.facts['call']}); start it there: python -m "
                f"terakoya_launch.rendezvous_store {port}"
            )
    return answers


def _query_others(request: HostRequest, query: Mapping[str, Any]) -> list[Answer]:
    answers: dict[int, Answer] = {}

    def run(index: int) -> None:
        answers[index] = _query(request, index, query)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(1, len(request.names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [answers[index] for index in sorted(answers)]


@contextlib.contextmanager
def _query_first(request: HostRequest, query: Mapping[str, Any], *, callers: int) -> Iterator[Answer]:
    """Yields the first host's answer while that host listens on its port for `callers` others."""
    answer = Answer(request.names[0])
    listen = {"port": request.port, "callers": callers, "seconds": ANSWER_SECONDS}
    process = subprocess.Popen(
        _command(request, 0, {**query, "listen": listen}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, errors="replace",
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    timeout = threading.Timer(ANSWER_SECONDS, process.kill)
    timeout.start()
    try:
        line = _next_answer(process.stdout)
        received = time.time()
        port = _next_answer(process.stdout) if line else ""
        timeout.cancel()
        if port:
            _read(answer, request, line, "", 0, received=received)
            assert answer.facts is not None
            answer.facts = {**answer.facts, **json.loads(port)}
            if answer.facts["port"] is not None:
                free = answer.facts["free_port"]
                advice = "choose another with --port" + (f": {free} is free" if free is not None else "")
                answer.problems.append(f"port {request.port}: {answer.facts['port']}; {advice}")
        elif process.wait() < 0:
            answer.error = f"no answer in {ANSWER_SECONDS:.0f} s; try: {request.ssh} {answer.host} true"
        else:
            _read(answer, request, "", process.stderr.read(), process.returncode)
        yield answer
    finally:
        timeout.cancel()
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            with contextlib.suppress(OSError):
                stream.close()


def _next_answer(lines: IO[str]) -> str:
    """Returns the next line of JSON, "" at the end; skips what the host's start-up files print."""
    return next((line for line in lines if line.startswith("{")), "")


def _read(
    answer: Answer, request: HostRequest, output: str, errors: str, code: int, *, received: float | None = None
) -> None:
    """Reads a host's output into `answer`: its last line is JSON, earlier lines come from the host's start-up files."""
    received = time.time() if received is None else received
    lines = output.strip().splitlines()
    if code == 0 and lines:
        try:
            answer.facts = json.loads(lines[-1])
        except json.JSONDecodeError:
            answer.error = f'expected an answer in JSON, got "{lines[-1][:80]}"'
            return
        answer.clock = answer.facts["clock"] - received
        return
    last = (errors.strip().splitlines() or lines or [f"exit code {code}"])[-1]
    if code == NO_FOLDER:
        answer.error = f"has no folder {request.folder}: all hosts must mount the file system that it is on"
    elif code == NO_PYTHON:
        answer.error = (
            "finds no python: install terakoya there at the same path, or give --setup lines that put it on the PATH"
        )
    elif "No module named" in last:
        answer.error = f"cannot start terakoya there ({last}): install the version of this machine"
    elif code == 255:
        answer.error = (
            f"cannot be reached ({last}); `{request.ssh} {answer.host} true` must work without a password, "
            "or run its script there by hand"
        )
    else:
        answer.error = f"exit code {code}: {last}"
