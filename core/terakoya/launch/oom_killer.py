"""Explains the death of a process that a signal ended, and whether the kernel killed it because memory ran out."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from terakoya.process_pool import lines_of

CONTAINER, MACHINE = "this container", "this machine"


def count_oom_kills(*, processes: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> dict[str, int]:
    """Returns how many processes the kernel has killed so far because memory ran out, in this container (control group)
    and on this machine. A count that the system does not provide, or hides, is absent."""
    groups_of_it = (line.split(":", 2) for line in lines_of(processes / "self" / "cgroup"))
    paths = {controllers: path.lstrip("/") for _, controllers, path in groups_of_it}
    files = {
        CONTAINER: [
            *(groups / "memory" / paths[each] / "memory.oom_control" for each in paths if "memory" in each.split(",")),
            *(groups / paths[each] / "memory.events" for each in paths if not each),
            groups / "memory.events",
        ],
        MACHINE: [processes / "vmstat"],
    }
    kills = {}
    for scope, candidates in files.items():
        lines = [line for file in candidates for line in lines_of(file)]
        counts = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
        if counts:
            kills[scope] = max(counts)
    return kills


def explain_exit(rank: int, code: int, before: Mapping[str, int], after: Mapping[str, int]) -> str | None:
    """Returns a message about process `rank`, which ended with `code` (minus a signal's number), or None if no signal
    ended it. `before` and `after` are the counts of `count_oom_kills` before its start and after its end."""
    if code >= 0:
        return None
    message = f"process {rank} was ended by signal {-code} ({signal.Signals(-code).name})"
    if -code != signal.SIGKILL:
        return message
    scopes = [scope for scope in (CONTAINER, MACHINE) if after.get(scope, 0) > before.get(scope, 0)]
    advice = "`terakoya estimate` shows how much memory each part of a run needs; a smaller micro_batch_size needs less"
    if scopes:
        return f"{message}: {scopes[0]} is out of memory, and the kernel killed a process to free some. {advice}"
    if not after:
        return f"{message}; on Linux the cause is most often the kernel, out of memory. {advice}"
    return (
        f"{message}, but not by the kernel out of memory: it counts no such kill. A user or a scheduler sent the signal"
    )
