"""Reads lists of hosts: hostfiles of DeepSpeed, Megatron-LM, MPI, Grid Engine and PBS, or names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from terakoya.errors import UserError

LINE = re.compile(
    r"(?P<name>(?:[A-Za-z0-9_.][A-Za-z0-9_.-]*@)?[A-Za-z0-9_.][A-Za-z0-9_.-]*|\[[0-9a-fA-F:]+\])"
    r"(?:\s*:\s*(?P<colon>\d+)"  # MPICH
    r"|\s+(?:slots|max_slots|max-slots)\s*=\s*(?P<slots>\d+)(?:\s+max[_-]slots\s*=\s*\d+)?"  # DeepSpeed, Open MPI
    r"|\s+(?P<granted>\d+)(?:\s+\S+){0,2})?"  # Grid Engine's $PE_HOSTFILE: host, slots, queue, cores
)


@dataclass(frozen=True)
class Host:
    """A host and its number of processes, None if the list has no number."""

    name: str
    processes: int | None = None

    @property
    def address(self) -> str:
        """The name that other hosts use: without the user of ssh."""
        return self.name.rpartition("@")[2]


def read_hosts(given: str) -> list[Host]:
    """Returns the hosts in the file `given`, or the hosts that `given` itself lists: `a01:4,a02:4,a03:2`.

    A line of a file is `name slots=4` (DeepSpeed, Megatron-LM, Open MPI), `name:4` (MPICH), `name 4 queue cores` (Grid
    Engine), or a name; # starts a comment. A bare name on several lines has that many processes (PBS); a host on two
    lines with numbers is an error: MPI would add them up, DeepSpeed refuses.

    Raises:
        UserError: no such file, a line of another format, a host given twice, or no host at all.
    """
    path = Path(given)
    lines: Iterable[tuple[str, str]]
    if path.is_file():
        texts = path.read_text(encoding="utf-8").splitlines()
        lines = [(f"{given}, line {number}", text) for number, text in enumerate(texts, 1)]
    elif "/" in given:
        raise UserError(f"hosts: {given}: no such file; expected a hostfile, or names such as a01:4,a02:4")
    else:
        lines = [("hosts", text) for text in given.split(",")]
    hosts: dict[str, Host] = {}
    bare_counts: dict[str, int] = {}
    for where, text in lines:
        text = text.partition("#")[0].strip()
        if not text:
            continue
        match = LINE.fullmatch(text)
        if match is None:
            raise UserError(f'{where}: expected a name, "name slots=4" or "name:4", got "{text}"')
        name, slots = match["name"], match["colon"] or match["slots"] or match["granted"]
        if slots and int(slots) == 0:
            raise UserError(f"{where}: {name} has no slots; leave the line out")
        if name in hosts and (slots or name not in bare_counts):
            raise UserError(f"{where}: {name} is listed twice; give each host once, with all its processes")
        if not slots:
            bare_counts[name] = bare_counts.get(name, 0) + 1
        hosts[name] = Host(name, int(slots) if slots else bare_counts[name] if bare_counts[name] > 1 else None)
    if not hosts:
        raise UserError(f"{given}: expected at least one host, got none")
    return list(hosts.values())
