"""What hosts say of themselves before a run starts there, compared: same versions and stores, clocks in sync, shared
files, one network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terakoya.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

CLOCK_SECONDS = 5.0
"""The largest difference of clocks: people compare the logs of hosts, and file systems compare times."""


@dataclass
class Answer:
    """A host's answer: the `facts` of `host_facts.collect_facts`, or None and `error`. `clock` is the number of seconds
    by which its clock is ahead of this machine's."""

    host: str
    facts: Mapping[str, Any] | None = None
    error: str | None = None
    clock: float = 0.0
    problems: list[str] = field(default_factory=list)


def address(name: str) -> str:
    """Returns the name that other hosts use for the host that ssh knows as `name`."""
    return name.rpartition("@")[2]


def results_table(answers: Sequence[Answer], meeting: str, *, is_first: bool = True) -> Table:
    """Returns a table of the facts. `meeting` is the host and port where all meet, and `is_first` whether that is the
    first host's own."""
    from rich.table import Table

    table = Table("host", "python", "terakoya", "torch", "clock", "cores", "GPUs", "network", "files", meeting)
    for answer in answers:
        facts = answer.facts
        if facts is None:
            table.add_row(answer.host, *["-"] * 9)
            continue
        versions = facts["versions"]
        network = f"{facts['interface']} {facts['address']}" if facts["interface"] else "-"
        files = "seen" if not facts["missing"] else "missing"
        reached = "free" if answer is answers[0] and is_first else "reached"
        if answer is answers[0] and len(answers) == 1 and is_first:
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


def raise_on_problems(answers: Sequence[Answer]) -> None:
    """Raises UserError with a line for each problem of a host."""
    lines = [f"{answer.host}: {problem}" for answer in answers for problem in answer.problems]
    if lines:
        raise UserError("\n".join(lines))


def find_problems(
    answer: Answer, first: Answer, processes: int, *, shared: Path | None, proof: Path | None, port: int | None
) -> None:
    """Adds to `answer` what is wrong with its host, which will run `processes`, beside the `first` one.

    Args:
        shared: a folder that all hosts should see, in which `proof` is a file; None if there is none.
        port: the port of the first host that the others should reach; None where they meet elsewhere.
    """
    if answer.facts is None:
        answer.problems.append(str(answer.error))
        return
    facts = answer.facts
    if facts.get("interface_error") and not facts["unknown_names"]:
        answer.problems.append(f"{facts['interface_error']}; choose another with --interface")
    if facts["unknown_names"]:
        names = ", ".join(facts["unknown_names"])
        answer.problems.append(f"cannot resolve {names}: add to its /etc/hosts, or list the hosts by address")
    for path in facts["missing"]:
        if path == str(proof):
            answer.problems.append(
                f"{shared} is not the same folder as on this machine: all hosts must mount one file system"
            )
        else:
            answer.problems.append(f"has no {path}: all hosts must mount the file system that it is on")
    if facts["gpus"] and processes > facts["gpus"]:
        answer.problems.append(f"has {facts['gpus']} GPUs for {processes} processes; give each process one")
    if facts["call"] is not None and port is not None:
        answer.problems.append(
            f"cannot reach port {port} of {first.host} ({facts['call']}); check firewalls, and the output of "
            f"`getent hosts {address(first.host)}` there"
        )
    if first.facts is None or answer is first:
        return
    for package, version in facts["versions"].items():
        if version != first.facts["versions"][package]:
            answer.problems.append(
                f"has {package} {version}, {first.host} has {first.facts['versions'][package]}: install the same"
            )
    for path, content in facts.get("contents", {}).items():
        if content != first.facts.get("contents", {}).get(path, content):
            answer.problems.append(f"{path} is another store than on {first.host}: copy it there again")
    offset = answer.clock - first.clock
    if abs(offset) > CLOCK_SECONDS:
        apart = "s ahead of" if offset > 0 else "s behind"
        answer.problems.append(
            f"its clock is {abs(offset):.0f} {apart} that of {first.host}: start a time service on both, such as chrony"
        )
