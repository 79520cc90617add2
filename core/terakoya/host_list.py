"""Lists of hosts as people have them: DeepSpeed's and Megatron-LM's hostfiles, MPI's, or names with commas."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from terakoya.errors import UserError

LINE = re.compile(
    r"(?P<name>[A-Za-z0-9_.@-]+|\[[0-9a-fA-F:]+\])"
    r"(?:\s*:\s*(?P<colon>\d+)|\s+(?:slots|max_slots|max-slots)\s*=\s*(?P<slots>\d+))?"
)


@dataclass(frozen=True)
class Host:
    """A host and its processes; None where the list does not say how many."""

    name: str
    processes: int | None = None


def read_hosts(given: str) -> list[Host]:
    """The hosts of the file `given`, or those that `given` names: `a01:4,a02:4,a03:2`.

    A line of a file is `name slots=4` (DeepSpeed, Megatron-LM, Open MPI), `name:4` (MPICH), or a name; # begins a
    comment. One host twice is an error: MPI would add up.

    Raises:
        UserError: no such file, a line that is none of these, a host given twice, or no host at all.
    """
    path = Path(given)
    lines: Iterable[tuple[str, str]]
    if path.is_file():
        texts = path.read_text(encoding="utf-8").splitlines()
        lines = [(f"{given}, line {number}", text) for number, text in enumerate(texts, 1)]
    elif "/" in given:
        raise UserError(f"hosts: {given}: no such file; expected a file of hosts, or names such as a01:4,a02:4")
    else:
        lines = [("hosts", text) for text in given.split(",")]
    found: dict[str, Host] = {}
    for where, text in lines:
        text = text.partition("#")[0].strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        if match is None:
            raise UserError(f'{where}: expected a name, "name slots=4" or "name:4", got "{text}"')
        slots = match["colon"] or match["slots"]
        host = Host(match["name"], int(slots) if slots else None)
        if host.processes == 0:
            raise UserError(f"{where}: {host.name} has no slots; leave the line out")
        if host.name in found:
            raise UserError(f"{where}: {host.name} is there already; give each host once, with all its processes")
        found[host.name] = host
    if not found:
        raise UserError(f"{given}: expected at least one host, got none")
    return list(found.values())
